"""Mamba: a gated selective state space (https://arxiv.org/abs/2312.00752)."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.documents import marks, neighbours
from model.layers import dense, norm
from model.mixers.state_space import log_uniform
from model.ops.conv import conv_tail, short_conv_silu
from model.ops.scan import SELECTIVE, selective_scan
from model.settings import Dim, Positive


def inverse_softplus_dt(dt_min: float, dt_max: float) -> nn.initializers.Initializer:
    """A bias whose softplus is log-uniform in [dt_min, dt_max], not below 1e-4."""
    log_dt = log_uniform(dt_min, dt_max)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        dt = jnp.maximum(jnp.exp(log_dt(key, shape, dtype)), 1e-4)
        return dt + jnp.log(-jnp.expm1(-dt))

    return init


def uniform(scale: float) -> nn.initializers.Initializer:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -scale, scale)


def log_range(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """log(1), ..., log(N) in every channel: S4D-Real."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=dtype)), shape)


@jax.custom_vjp
def softplus(x: jax.Array) -> jax.Array:
    """The gradient is made of the value, which a scan keeps anyway."""
    return jax.nn.softplus(x)


def softplus_forward(x):
    y = softplus(x)
    return y, y


def softplus_backward(y, g):
    return (-g * jnp.expm1(-y),)


softplus.defvjp(softplus_forward, softplus_backward)


def step_size(raw: jax.Array, real: jax.Array | None) -> jax.Array:
    """dt, `[B, L, ...]`: positive, and 0 at padding, which leaves a state as it was. real: [B, L]."""
    return softplus(raw if real is None else jnp.where(real[..., None], raw, -jnp.inf))


def smooth(mixer: Mixer, name: str, u: jax.Array, past: jax.Array, ctx: Context, axis: str | None) -> jax.Array:
    """A short convolution along the length, of `mixer.conv` tokens, and SiLU."""
    W, n = mixer.conv, u.shape[-1]
    kernel = mixer.weight(name, uniform(W**-0.5), (W, n), (None, axis))
    bias = mixer.weight(f"{name}_bias", uniform(W**-0.5), (n,), (axis,))
    return short_conv_silu(u, kernel, bias, past, *neighbours(ctx))


class Mamba(Mixer):
    """Mamba-1: a state space whose step size, input and output maps depend on the token."""

    state: Dim = 16  # N, per channel
    conv: Dim = 4  # width of the short convolution
    expand: Dim = 2  # inner channels per model channel
    dt_rank: Literal[0] | Dim = 0  # 0: ceil(width / 16)
    dt_min: Positive = 0.001
    dt_max: Positive = 0.1
    norm: Literal["none", "learned", "plain"] = "none"  # of dt, B and C: with a learned scale (Jamba), or without one
    norm_eps: Positive = 1e-5
    implementation: Literal[*SELECTIVE] | None = None  # of the scan; None picks

    forward_only: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {
        "A_log": "ssm",
        "D": "ssm",
        "dt_bias": "ssm",
        "conv_bias": "no_decay",
    }

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check_direction()
        E, N = self.expand * self.width, self.state
        R = self.dt_rank or -(-self.width // 16)
        f = wide(self.dtype)
        past = self.init_state(x.shape[0], 0) if state is None else state

        u, z = dense((2, E), ("embed", None, "inner"), self.dtype, "in", apart=True)(x)
        c = smooth(self, "conv", u, past["conv"], ctx, "inner")

        low, B, C = jnp.split(dense(R + 2 * N, ("inner", None), self.dtype, "x")(c), [R, R + N], axis=-1)
        if self.norm != "none":
            normed = dict(eps=self.norm_eps, learned=self.norm == "learned")
            parts = dict(dt_norm=low, B_norm=B, C_norm=C)
            low, B, C = (norm("rmsnorm", f, name, **normed)(part) for name, part in parts.items())
        dt_kernel = self.weight("dt", uniform(R**-0.5), (R, E), (None, "inner"))
        dt_init = inverse_softplus_dt(self.dt_min, self.dt_max)
        dt = low.astype(f) @ dt_kernel + self.weight("dt_bias", dt_init, (E,), ("inner",))
        A = -jnp.exp(self.weight("A_log", log_range, (E, N), ("inner", None)))
        D = self.weight("D", nn.initializers.ones_init(), (E,), ("inner",))

        real, keep = marks(ctx)
        dt = step_size(dt, real)
        y, h = selective_scan(c, dt, A, B, C, past["h"], keep, implementation=self.implementation)

        def gated(y, c, z, D):
            return (y + D * c) * nn.silu(z.astype(f))

        out = dense(self.width, ("inner", "embed"), self.dtype, "out", of=gated)(y, c, z, D)
        return out, None if state is None else dict(h=h, conv=conv_tail(u, past["conv"], real))

    def init_state(self, batch: int, max_len: int) -> State:
        E = self.expand * self.width
        return dict(
            h=jnp.zeros((batch, E, self.state), wide(self.dtype)),
            conv=jnp.zeros((batch, self.conv - 1, E), self.dtype),
        )

    def state_bytes(self, length: int) -> int:
        E = self.expand * self.width
        return E * (
            self.state * jnp.dtype(wide(self.dtype)).itemsize + (self.conv - 1) * jnp.dtype(self.dtype).itemsize
        )
