"""Griffin's recurrent block: a real-gated linear recurrent unit behind a short convolution, beside a GeLU branch.

https://arxiv.org/abs/2402.19427
"""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context, Mixer, State, wide
from model.documents import neighbours
from model.layers import check_divides, dense, fan_in
from model.mixers.mamba import uniform
from model.ops.conv import conv_tail, short_conv
from model.ops.product import product
from model.ops.scan import LINEAR, linear_scan
from model.settings import Dim

C = 8.0  # the paper's c: how fast a wide open recurrence gate forgets
STEEPEST = 1000.0  # bound on the derivative of the square root, which has none at 0


@jax.custom_jvp
def bounded_sqrt(x: jax.Array) -> jax.Array:
    """A square root whose derivative is bounded."""
    return jnp.sqrt(x)


@bounded_sqrt.defjvp
def bounded_sqrt_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.sqrt(x), t / jnp.sqrt(jnp.maximum(4 * x, STEEPEST**-2))


def rg_lru(
    u: jax.Array,
    r: jax.Array,
    i: jax.Array,
    Lambda: jax.Array,
    h0: jax.Array,
    first: jax.Array,
    real: jax.Array | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The states `h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t`, `[B, L, E]`, with `log a = -c softplus(Lambda) r`.

    u: [B, L, E], and its gates r (recurrence) and i (input); h0: [B, E]. first: [B or 1, L], true where a document
    begins: its input enters whole, as there is nothing yet to keep in balance with it. real: [B, L], false where
    padding leaves the state as it was.
    """
    first = first[..., None]
    log_a = -C * jax.nn.softplus(Lambda) * r
    a = jnp.where(first, 0, jnp.exp(log_a))
    b = jnp.where(first, 1, bounded_sqrt(-jnp.expm1(2 * log_a))) * i * u
    if real is not None:
        a, b = jnp.where(real[..., None], a, 1), jnp.where(real[..., None], b, 0)
    return linear_scan(a, b, h0, implementation=implementation)


def lasting(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Lambda with a, at a wide open gate, uniform in [0.9, 0.999]."""
    a = jax.random.uniform(key, shape, dtype, 0.9, 0.999)
    return jnp.log(jnp.expm1(-jnp.log(a) / C))


def block_fan_in(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Blocks `[..., K, K]`, each of the size that keeps variance."""
    return fan_in(key, (shape[-2], int(np.prod(shape)) // shape[-2]), dtype).reshape(shape)


class RGLRU(Mixer):
    """Griffin's recurrent block: a gated recurrence of one number a channel, with gates that see their own block."""

    inner: Literal[0] | Dim = 0  # channels of the recurrence; 0: as wide as the model
    n_heads: Dim = 4  # blocks of the gates' matrices
    conv: Dim = 4  # width of the short convolution
    implementation: Literal[*LINEAR] | None = None  # of the scan; None picks

    forward_only: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {
        "Lambda": "ssm",
        "gates_bias": "no_decay",
        "conv_bias": "no_decay",
    }

    @property
    def channels(self) -> int:
        return self.inner or self.width

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check()
        E, W, H, f = self.channels, self.conv, self.n_heads, wide(self.dtype)
        past = self.init_state(x.shape[0], 0) if state is None else state

        y = nn.gelu(dense(E, ("embed", "inner"), self.dtype, "y", bias=True)(x))
        u = dense(E, ("embed", "inner"), self.dtype, "x", bias=True)(x)
        kernel = self.weight("conv", uniform(W**-0.5), (W, E), (None, "inner"))
        conv_bias = self.weight("conv_bias", nn.initializers.zeros_init(), (E,), ("inner",))
        c = short_conv(u, kernel, conv_bias, past["conv"], *neighbours(ctx))

        K = E // H
        blocks = self.weight("gates", block_fan_in, (2, H, K, K), (None, "inner", None, None))
        gates = product("blhk,ohkj->oblhj", c.reshape(*c.shape[:2], H, K), blocks, f)
        bias = self.weight("gates_bias", nn.initializers.zeros_init(), (2, H, K), (None, "inner", None))
        r, i = nn.sigmoid(gates + bias[:, None, None]).reshape(2, *c.shape)
        Lambda = self.weight("Lambda", lasting, (E,), ("inner",))

        positions = jnp.arange(x.shape[1])[None] if ctx.positions is None else ctx.positions
        first, real = positions == 0, None
        if ctx.segments is not None:
            real = ctx.segments > 0
        h, last = rg_lru(c.astype(f), r, i, Lambda, past["h"], first, real, self.implementation)
        out = dense(self.width, ("inner", "embed"), self.dtype, "out", bias=True)(h.astype(self.dtype) * y)
        return out, None if state is None else dict(h=last, conv=conv_tail(u, past["conv"], real))

    def check(self) -> None:
        self.check_direction()
        check_divides("model.rglru.n_heads", self.n_heads, "the width of the recurrence", self.channels)

    def init_state(self, batch: int, max_len: int) -> State:
        return dict(
            h=jnp.zeros((batch, self.channels), wide(self.dtype)),
            conv=jnp.zeros((batch, self.conv - 1, self.channels), self.dtype),
        )

    def state_bytes(self, length: int) -> int:
        return self.channels * (jnp.dtype(wide(self.dtype)).itemsize + (self.conv - 1) * jnp.dtype(self.dtype).itemsize)
