"""Mamba-2: a selective state space with one decay for all channels of a head (https://arxiv.org/abs/2405.21060)."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.documents import marks
from model.layers import Scale, check_divides, dense, rms_norm
from model.mixers.mamba import inverse_softplus_dt, smooth, step_size
from model.ops.conv import conv_tail
from model.ops.ssd import IMPLEMENTATIONS, ssd
from model.settings import Dim, Positive


def log_uniform_A(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """log A with A uniform in [1, 16]."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


class Mamba2(Mixer):
    """Mamba-2: heads whose state forgets at one rate, so that a sequence is mixed by matrix products."""

    state: Dim = 128  # N, per channel
    head_dim: Literal[0] | Dim = 0  # P, channels of a head; 0: 64, or fewer so that there are four heads
    n_groups: Dim = 1  # G: heads of a group share B and C, and are normalised together
    conv: Dim = 4  # width of the short convolution
    expand: Dim = 2  # inner channels per model channel
    dt_min: Positive = 0.001
    dt_max: Positive = 0.1
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the ssd op; None picks

    forward_only: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {
        "A_log": "ssm",
        "D": "ssm",
        "dt_bias": "ssm",
        "conv_x_bias": "no_decay",
        "conv_BC_bias": "no_decay",
    }

    @property
    def inner(self) -> int:
        return self.expand * self.width

    @property
    def channels(self) -> int:
        return self.head_dim or min(64, max(1, self.inner // 4))

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check()
        E, N, G, P = self.inner, self.state, self.n_groups, self.channels
        H, f, lead = E // P, wide(self.dtype), x.shape[:2]
        past = self.init_state(x.shape[0], 0) if state is None else state

        z = dense(E, ("embed", "inner"), self.dtype, "z")(x)
        u = dense(E, ("embed", "inner"), self.dtype, "x")(x)
        BC = dense(2 * G * N, ("embed", None), self.dtype, "BC")(x)
        low = dense(H, ("embed", "inner"), self.dtype, "dt")(x)
        c = smooth(self, "conv_x", u, past["x"], ctx, "inner").reshape(*lead, H, P)
        B, C = jnp.moveaxis(smooth(self, "conv_BC", BC, past["BC"], ctx, None).reshape(*lead, 2, G, N), 2, 0)

        def per_head(name, init):
            return self.weight(name, init, (H,), ("inner",))

        dt = low.astype(f) + per_head("dt_bias", inverse_softplus_dt(self.dt_min, self.dt_max))
        A = -jnp.exp(per_head("A_log", log_uniform_A))
        D = per_head("D", nn.initializers.ones_init())

        real, keep = marks(ctx)
        dt = step_size(dt, real)
        y, h = ssd(c, dt, A, B, C, past["h"], keep, implementation=self.implementation)
        scale = Scale((G, E // G), self.dtype, name="norm")()

        def gated(y, c, z, D, scale):
            y = (y + D[:, None] * c).reshape(*lead, E) * nn.silu(z.astype(f))
            # Gated first, then normalised, in the groups that tensor sharding would keep on one device.
            return rms_norm(y.reshape(*lead, G, E // G), scale).reshape(*lead, E)

        out = dense(self.width, ("inner", "embed"), self.dtype, "out", of=gated)(y, c, z, D, scale)
        tails = dict(x=conv_tail(u, past["x"], real), BC=conv_tail(BC, past["BC"], real))
        return out, None if state is None else dict(h=h, **tails)

    def check(self) -> None:
        self.check_direction()
        check_divides("model.mamba2.head_dim", self.channels, "the inner width", self.inner)
        check_divides("model.mamba2.n_groups", self.n_groups, "the number of heads", self.inner // self.channels)

    def init_state(self, batch: int, max_len: int) -> State:
        shape = (batch, self.inner // self.channels, self.channels, self.state)
        return dict(
            h=jnp.zeros(shape, wide(self.dtype)),
            x=jnp.zeros((batch, self.conv - 1, self.inner), self.dtype),
            BC=jnp.zeros((batch, self.conv - 1, 2 * self.n_groups * self.state), self.dtype),
        )

    def state_bytes(self, length: int) -> int:
        tails = (self.conv - 1) * (self.inner + 2 * self.n_groups * self.state)
        return self.inner * self.state * jnp.dtype(wide(self.dtype)).itemsize + tails * jnp.dtype(self.dtype).itemsize
