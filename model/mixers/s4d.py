"""S4D: a diagonal state space, the same at every token (https://arxiv.org/abs/2206.11893)."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context, Mixer, State, wide
from model.documents import document_positions, open_reading
from model.errors import UserError, choose
from model.layers import dense
from model.ops.conv import fft_conv
from model.ops.scan import diagonal_scan

# Imaginary parts of A; the real part starts at -1/2. N modes stand for 2N real ones (conjugate pairs).
INITS = {
    "lin": lambda n, N: np.pi * n,
    "inv": lambda n, N: 2 * N / np.pi * (2 * N / (2 * n + 1) - 1),
}


def zoh(A: jax.Array, dt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zero-order hold of `x' = A x + u`: the discrete A and B, `[D, N]`; dt: [D]."""
    return jnp.exp(dt[:, None] * A), jnp.expm1(dt[:, None] * A) / A


def s4d_kernel(A: jax.Array, C: jax.Array, dt: jax.Array, L: int) -> jax.Array:
    """The convolution kernel `2 Re sum_n C_n B_n A_n^l`, `[L, D]`."""
    _, B_bar = zoh(A, dt)
    powers = jnp.exp((dt[:, None] * A)[None] * jnp.arange(L).astype(dt.dtype)[:, None, None])
    return 2 * jnp.einsum("dn,ldn->ld", C * B_bar, powers).real


def s4d_recurrence(
    u: jax.Array,
    A: jax.Array,
    C: jax.Array,
    dt: jax.Array,
    h0: jax.Array,
    ctx: Context,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The same map token by token, `[B, L, D]`, and the last state: with a past, and across document boundaries."""
    A_bar, B_bar = zoh(A, dt)

    def expand(x):
        b = B_bar * x["u"][..., None]
        a = jnp.broadcast_to(A_bar, b.shape)
        if "real" in x:
            real = x["real"][..., None, None]
            a = jnp.where(real, a * (x["positions"] > 0)[..., None, None], 1)
            b = jnp.where(real, b, 0)
        return a, b

    def contract(h, x):
        return 2 * jnp.sum(C.real * h.real - C.imag * h.imag, axis=-1)  # the real part alone

    inputs = dict(u=u)
    if ctx.segments is not None:
        inputs |= dict(real=ctx.segments > 0, positions=ctx.positions)
    return diagonal_scan(expand, contract, h0, inputs, implementation=implementation)


class S4D(Mixer):
    """S4D: a linear time-invariant state space per channel, a convolution in training."""

    state: int = 64  # N, real size; half as many complex modes
    A_init: str = "lin"  # lin or inv
    dt_min: float = 0.001
    dt_max: float = 0.1
    implementation: str | None = None  # convolution, or one of the scan; None picks

    groups: ClassVar[dict[str, str]] = {
        "log_dt": "ssm",
        "A_real": "ssm",
        "A_imag": "ssm",
        "C": "no_decay",
        "D": "no_decay",
    }

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check()
        D, N, f = self.width, self.state // 2, wide(self.dtype)
        channels = ("inner", None)

        def log_dt_init(key, shape, dtype):
            return jax.random.uniform(key, shape, dtype, np.log(self.dt_min), np.log(self.dt_max))

        def imag_init(key, shape, dtype):
            return jnp.broadcast_to(jnp.asarray(INITS[self.A_init](np.arange(N), N), dtype), shape)

        def param(name, init, shape, axes):
            return self.param(name, nn.with_logical_partitioning(init, axes), shape, f)

        dt = jnp.exp(param("log_dt", log_dt_init, (D,), channels[:1]))
        real = param("A_real", nn.initializers.constant(np.log(0.5)), (D, N), channels)
        A = jax.lax.complex(-jnp.exp(real), param("A_imag", imag_init, (D, N), channels))
        directions = 1 if self.causal else 2
        C = param("C", nn.initializers.normal(0.5**0.5), (directions, 2, D, N), (None, None, *channels))
        C = jax.lax.complex(C[:, 0], C[:, 1])
        skip = param("D", nn.initializers.normal(1.0), (D,), channels[:1])

        u = x.astype(f)
        y, state = self.mix(u, A, C[0], dt, ctx, state)
        if not self.causal:
            back, _ = self.mix(u[:, ::-1], A, C[1], dt, reverse(ctx), None)
            y = y + back[:, ::-1]
        y = nn.gelu(y + skip * u).astype(self.dtype)
        value, gate = jnp.moveaxis(dense((2, D), ("embed", None, "mlp"), self.dtype, "out", bias=True)(y), -2, 0)
        return value * nn.sigmoid(gate), state

    def mix(self, u: jax.Array, A: jax.Array, C: jax.Array, dt: jax.Array, ctx: Context, state: State):
        """A convolution where nothing is carried or reset, else the recurrence."""
        plain = state is None and ctx.segments is None
        if self.implementation == "convolution" and not plain:
            raise UserError("s4d's convolution cannot carry a state or reset at documents; set implementation=None")
        if plain and self.implementation in (None, "convolution"):
            return fft_conv(u, s4d_kernel(A, C, dt, u.shape[1])), None
        h0 = self.init_state(u.shape[0], 0) if state is None else state
        y, h = s4d_recurrence(u, A, C, dt, h0, ctx, self.implementation)
        return y, None if state is None else h

    def check(self) -> None:
        choose("s4d A_init", self.A_init, INITS)
        if self.state < 2 or self.state % 2:
            raise UserError(f"s4d's state {self.state} must be even: its modes come in conjugate pairs")
        if not 0 < self.dt_min <= self.dt_max:
            raise UserError(f"dt_min {self.dt_min} must be positive and at most dt_max {self.dt_max}")

    def init_state(self, batch: int, max_len: int) -> State:
        dtype: Any = jnp.result_type(wide(self.dtype), jnp.complex64)
        return jnp.zeros((batch, self.width, self.state // 2), dtype)

    def state_bytes(self, length: int) -> int:
        return self.width * self.state * jnp.dtype(wide(self.dtype)).itemsize


def reverse(ctx: Context) -> Context:
    """The context of the rows read backwards, with positions counted from each document's end."""
    if ctx.segments is None:
        return ctx
    segments = ctx.segments[:, ::-1]
    positions, _ = document_positions(segments, open_reading(segments.shape[0]))
    return ctx.replace(positions=positions, segments=segments)
