"""DeltaNet: a matrix state that is corrected, not added to (https://arxiv.org/abs/2406.06484).

What its gated kin add is a decay and a gate of the outputs: `decay` and `gated` below.
"""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from model.contract import Context, Mixer, State, wide
from model.documents import at_real, marks, neighbours
from model.layers import check_divides, dense, norm
from model.mixers.mamba import uniform
from model.ops.conv import conv_tail, short_conv_silu
from model.ops.delta_rule import IMPLEMENTATIONS, delta_rule
from model.settings import Dim

Array = jax.Array


def unit(x: Array) -> Array:
    """Vectors of length 1, wide; those close to zero stay so."""
    x = x.astype(wide(x.dtype))
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class DeltaNet(Mixer):
    """DeltaNet: a state that is moved towards saying a token's value when asked with its key."""

    head_dim: Literal[0] | Dim = 0  # K, channels of a key; 0: 64, or fewer so that there are four heads
    conv: Dim = 4  # width of the short convolutions
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of delta_rule; None picks

    forward_only: ClassVar[bool] = True

    @property
    def channels(self) -> int:
        return self.head_dim or min(64, max(1, self.width // 4))

    @property
    def values(self) -> int:
        """P, channels of a value."""
        return self.channels

    def decay(self, x: Array) -> Array | None:
        """Log decays of heads `[B, L, H]` or channels `[B, L, H, K]`, wide."""
        return None

    def gated(self, y: Array, x: Array) -> Array:
        """Outputs `[B, L, H, P]` as a gate lets them through."""
        return y

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        K, P, f = self.channels, self.values, wide(self.dtype)
        H = self.width // K
        past = self.init_state(x.shape[0], 0) if state is None else state

        def heads(name, size):
            u = dense(H * size, ("embed", "inner"), self.dtype, name)(x)
            kernel = self.weight(f"conv_{name}", uniform(self.conv**-0.5), (self.conv, H * size), (None, "inner"))
            c = short_conv_silu(u, kernel, jnp.zeros(H * size, f), past[name], *neighbours(ctx))
            return u, c.reshape(*x.shape[:2], H, size)

        (u_q, q), (u_k, k), (u_v, v) = heads("q", K), heads("k", K), heads("v", P)
        q, k = (unit(q) * K**-0.5).astype(self.dtype), unit(k).astype(self.dtype)
        beta = nn.sigmoid(dense(H, ("embed", "inner"), self.dtype, "beta")(x).astype(f))
        w = self.decay(x)

        real, keep = marks(ctx)
        beta, w = at_real(real, beta), None if w is None else at_real(real, w)
        y, h = delta_rule(q, k, v, w, past["h"], keep, beta=beta, implementation=self.implementation)
        y = self.gated(norm("rmsnorm", self.dtype, "norm")(y), x)
        out = dense(self.width, ("inner", None, "embed"), self.dtype, "out", inputs=2)(y)
        if state is None:
            return out, None
        return out, dict(h=h, **{n: conv_tail(u, past[n], real) for n, u in (("q", u_q), ("k", u_k), ("v", u_v))})

    def check(self) -> None:
        self.check_direction()
        check_divides(f"model.{self.label}.head_dim", self.channels, "the width", self.width)

    def init_state(self, batch: int, max_len: int) -> State:
        K, P = self.channels, self.values
        H = self.width // K
        sizes = dict(q=K, k=K, v=P)
        tails = {name: jnp.zeros((batch, self.conv - 1, H * n), self.dtype) for name, n in sizes.items()}
        return dict(h=jnp.zeros((batch, H, K, P), wide(self.dtype)), **tails)

    def state_bytes(self, length: int) -> int:
        K, P = self.channels, self.values
        tails = (self.conv - 1) * (2 * K + P) * jnp.dtype(self.dtype).itemsize
        return self.width // K * (K * P * jnp.dtype(wide(self.dtype)).itemsize + tails)
