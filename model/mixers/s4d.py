"""S4D: a diagonal state space, the same at every token (https://arxiv.org/abs/2206.11893)."""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context
from model.mixers.state_space import DISCRETISATIONS, Continuous, System, diagonal_recurrence, impulse, of_channels
from model.ops.hippo import legs_modes

# Imaginary parts of A; the real part starts at -1/2, or for `real` at -(n + 1). N modes stand for 2N (conjugate pairs).
INITS = {
    "lin": lambda n, N: np.pi * n,
    "inv": lambda n, N: 2 * N / np.pi * (2 * N / (2 * n + 1) - 1),
    "legs": lambda n, N: legs_modes(2 * N)[0].imag[n],
    "real": lambda n, N: 0.0 * n,
}


def starting_modes(A_init: str, N: int) -> np.ndarray:
    """A before training, one of each conjugate pair."""
    n = np.arange(N)
    return -(n + 1.0 if A_init == "real" else np.full(N, 0.5)) + 1j * INITS[A_init](n, N)


def s4d_kernel(A: jax.Array, C: jax.Array, dt: jax.Array, L: int, discretisation: str = "zoh") -> jax.Array:
    """The convolution kernel `2 Re sum_n C_n B_n A_n^l`, `[L, D]`; A, C: [D, N], dt: [D]."""
    log_A, B = DISCRETISATIONS[discretisation](A, dt[:, None])
    return 2 * impulse(C * B, log_A, L)


def into_state(u: jax.Array, B: jax.Array) -> jax.Array:
    return B * u[..., None]


def out_of_state(h: jax.Array, C: jax.Array) -> jax.Array:
    return 2 * jnp.sum(C.real * h.real - C.imag * h.imag, axis=-1)  # the real part alone


def s4d_recurrence(
    u: jax.Array,
    A: jax.Array,
    C: jax.Array,
    dt: jax.Array,
    h0: jax.Array,
    ctx: Context,
    implementation: str | None,
    discretisation: str = "zoh",
) -> tuple[jax.Array, jax.Array]:
    """The same map token by token, `[B, L, D]`, and the last state: with a past, and across document boundaries."""
    log_A, B = DISCRETISATIONS[discretisation](A, dt[:, None])
    return diagonal_recurrence(jnp.exp(log_A), B, C, into_state, out_of_state, u, h0, ctx, implementation)


def s4d_system(A: jax.Array, C: jax.Array, dt: jax.Array, discretisation: str) -> System:
    """Both forms of one diagonal state space per channel."""
    kernel = partial(s4d_kernel, discretisation=discretisation)
    return of_channels(
        kernel,
        (A, C, dt),
        lambda u, h0, ctx, form: s4d_recurrence(u, A, C, dt, h0, ctx, form, discretisation),
    )


class S4D(Continuous):
    """S4D: a linear time-invariant state space per channel, a convolution in training. B is part of C."""

    A_init: Literal[*INITS] = "lin"
    discretisation: Literal[*DISCRETISATIONS] = "zoh"

    groups: ClassVar[dict[str, str]] = {
        "log_dt": "ssm",
        "A_real": "ssm",
        "A_imag": "ssm",
        "C": "no_decay",
        "D": "no_decay",
    }

    def systems(self) -> list[System]:
        D, N, channels = self.width, self.state // 2, ("inner", None)
        B = legs_modes(2 * N)[2] if self.A_init == "legs" else 1.0

        def C_init(key, shape, dtype):
            return nn.initializers.normal(0.5**0.5)(key, shape, dtype) * jnp.asarray(B, dtype)

        dt = self.steps(D)
        A = self.modes("A", starting_modes(self.A_init, N), (D, N), channels)
        return [s4d_system(A, C, dt, self.discretisation) for C in self.readout("C", C_init, channels)]
