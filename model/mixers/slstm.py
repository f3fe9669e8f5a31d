"""sLSTM: an LSTM whose gates are exponential, its memory an average (https://arxiv.org/abs/2405.04517).

    c_t = f c_{t-1} + i tanh(z~)        n_t = f n_{t-1} + i        h_t = sigmoid(o~) c_t / n_t

where i = exp(i~) and f = sigmoid(f~). The state holds c and n divided by e^m, m being that of the largest of what was
added up. All maps are of heads apart; the block's MLP mixes them.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from model.contract import Context, Mixer, State, wide
from model.documents import neighbours
from model.layers import check_divides, fan_in
from model.mixers.mamba import smooth
from model.mixers.recurrent import over_rows
from model.ops.conv import conv_tail
from model.ops.product import product
from model.ops.recurrence import Past
from model.ops.stretches import gathers, stretches
from model.settings import Dim

Array = jax.Array
KEPT = ("h", "c", "n", "m")
EMPTY = -1e30  # the exponent of a sum that nothing has entered; finite, so that differences of exponents are numbers


def slstm(past: Past, x: Array, u: Array) -> Past:
    """The state after a token; gates i, f, z, o. Any m would do that keeps c and n in range: no gradient runs there."""
    i, f, z, o = jnp.moveaxis(x + u, 1, 0)
    # At least 1 is in n once a token is: the largest of what is added up is divided by itself.
    before = jax.nn.log_sigmoid(f) + jnp.where(past["n"] == 0, EMPTY, past["m"])
    m = lax.stop_gradient(jnp.maximum(before, i))
    kept, new = jnp.exp(before - m), jnp.exp(i - m)
    c, n = kept * past["c"] + new * jnp.tanh(z), kept * past["n"] + new
    return dict(h=nn.sigmoid(o) * c / n, c=c, n=n, m=m)


def memories(heads: int) -> nn.initializers.Initializer:
    """Biases `[4, E]`: of f from long memories to short ones in each head, as the authors start a layer half way up."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        K = shape[1] // heads
        spread = 5 - 12 * (jnp.arange(K, dtype=dtype) / max(K - 1, 1)) ** 0.95
        return jnp.zeros(shape, dtype).at[1].set(jnp.tile(spread, heads))

    return init


def by_head(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """`[H, K, G, K]`, each head's maps by their own fans."""
    H, K, G, _ = shape
    return jnp.stack([fan_in(k, (K, G * K), dtype).reshape(K, G, K) for k in jax.random.split(key, H)])


class SLSTM(Mixer):
    """sLSTM: a scalar memory a channel, exponential gates, and recurrences within heads."""

    n_heads: Dim = 4
    conv: Dim = 4  # width of the short convolution that the gates i and f see

    forward_only: ClassVar[bool] = True
    instead: ClassVar[str] = "lstm or attention"
    last: ClassVar[str] = "norm"  # its scale: no map follows
    groups: ClassVar[dict[str, str]] = {"bias": "no_decay", "conv_bias": "no_decay"}

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        if stretches(x.shape[1]) > 1:
            gathers(f"the recurrence of {self.label}")
        (B, L, D), H, f = x.shape, self.n_heads, wide(self.dtype)
        K = D // H
        past = self.init_state(B, 0) if state is None else state

        smoothed = smooth(self, "conv", x, past["conv"], ctx, "inner")
        W = self.weight("W", by_head, (H, K, 4, K), ("inner", None, None, None))
        U = self.weight("U", nn.initializers.zeros_init(), (H, K, 4, K), ("inner", None, None, None))
        bias = self.weight("bias", memories(H), (4, D), (None, "inner"))

        def gates(x, W):
            return product("blhk,hkgj->blghj", x.reshape(B, L, H, K), W).reshape(B, L, 2, D)

        says = jnp.concatenate([gates(smoothed, W[:, :, :2]), gates(x, W[:, :, 2:])], axis=2)
        y, after = over_rows(slstm, says, U, bias, {name: past[name] for name in KEPT}, ctx)
        norm = nn.LayerNorm(
            epsilon=1e-5, use_bias=False, dtype=self.dtype, param_dtype=f, feature_axes=(-2, -1), name="norm"
        )
        y = norm(y.reshape(B, L, H, K)).reshape(B, L, D)
        if state is None:
            return y, None
        return y, after | dict(conv=conv_tail(x, past["conv"], neighbours(ctx)[1]))

    def check(self) -> None:
        self.check_direction()
        check_divides("model.slstm.n_heads", self.n_heads, "the width", self.width)

    def init_state(self, batch: int, max_len: int) -> State:
        empty = jnp.zeros((batch, self.width), wide(self.dtype))
        return dict.fromkeys(KEPT, empty) | dict(conv=jnp.zeros((batch, self.conv - 1, self.width), self.dtype))

    def state_bytes(self, length: int) -> int:
        tail = (self.conv - 1) * jnp.dtype(self.dtype).itemsize
        return self.width * (len(KEPT) * jnp.dtype(wide(self.dtype)).itemsize + tail)
