"""RWKV-6's time mixing: a matrix state that forgets at rates the token decides (https://arxiv.org/abs/2404.05892)."""

from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.documents import at_real, marks, neighbours
from model.head_norm import HeadNorm
from model.layers import dense
from model.mixers.mamba import uniform
from model.mixers.rwkv import spread
from model.mixers.time_mixing import TimeMixing
from model.ops.conv import conv_tail, shift
from model.ops.product import product
from model.ops.wkv import IMPLEMENTATIONS, wkv6
from model.settings import Dim

Array = jax.Array


def steps(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """From slow to fast over all channels, as the paper does half way up."""
    size = shape[0] * shape[1]
    return (-6 + 5 * (jnp.arange(size, dtype=dtype) / max(size - 1, 1)) ** 1.35).reshape(shape)


class RWKV6(TimeMixing):
    """RWKV-6's time mixing: a matrix state a head, whose decay and whose mix of neighbours depend on the token."""

    mix_rank: Dim = 32  # of the map that decides how much of the token before to mix in
    decay_rank: Dim = 64  # of the map that decides the decay
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of wkv6; None picks

    fewest_heads: ClassVar[int] = 4
    groups: ClassVar[dict[str, str]] = {
        "decay": "ssm",
        "bonus": "ssm",
        "mix": "no_decay",
        "mix_base": "no_decay",
    }

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        D, K, R, f = self.width, self.channels, self.mix_rank, wide(self.dtype)
        H = D // K
        past = self.init_state(x.shape[0], 0) if state is None else state
        wide_x = x.astype(f)  # rounded once, after mixing
        other = shift(x, past["shift"], *neighbours(ctx)).astype(f) - wide_x

        # Five mixes of the token and the one before, in amounts that a first mix decides.
        half_way = spread(lambda i: 1 - i**0.5)
        base = wide_x + other * self.weight("mix_base", half_way, (D,), (None,))
        zeros = nn.initializers.zeros_init()
        low = jnp.tanh(dense((5, R), ("embed", None, None), self.dtype, "mix_down", init=zeros)(base))
        up = self.weight("mix_up", uniform(0.01), (5, R, D), (None, None, "embed"))
        amount = self.weight("mix", half_way, (5, D), (None, None))[:, None, None]
        amount = amount + product("blor,ord->obld", low, up, f)
        for_w, for_k, for_v, for_r, for_g = (wide_x + other * amount).astype(self.dtype)

        heads = partial(dense, (H, K), ("embed", "inner", None), self.dtype)
        r, k, v, g = heads("r")(for_r), heads("k")(for_k), heads("v")(for_v), heads("g")(for_g)
        low = jnp.tanh(dense(self.decay_rank, ("embed", None), self.dtype, "decay_down", init=zeros)(for_w))
        d = dense((H, K), (None, "inner", None), self.dtype, "decay_up", init=uniform(0.01))(low)
        w = -jnp.exp(self.weight("decay", steps, (H, K), ("inner", None)) + d.astype(f))
        u = self.weight("bonus", nn.initializers.normal(0.1), (H, K), ("inner", None))

        real, keep = marks(ctx)
        k, w = at_real(real, k), at_real(real, w)
        y, h = wkv6(r, k, v, w, u, past["h"], keep, implementation=self.implementation)
        # By head. Outputs are not divided by the root of 64: their variance is that much larger, as is this epsilon.
        norm = HeadNorm(self.dtype, 64e-5, name="norm")
        out = dense(D, ("inner", None, "embed"), self.dtype, "out", inputs=2)(norm(y) * nn.silu(g))
        return out, None if state is None else dict(h=h, shift=conv_tail(x, past["shift"], real))
