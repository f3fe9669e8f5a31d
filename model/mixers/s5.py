"""S5: one state space that all channels write to and read from (https://arxiv.org/abs/2208.04933)."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.layers import check_divides
from model.mixers.state_space import DISCRETISATIONS, Continuous, System, diagonal_recurrence, paired, powers
from model.ops.hippo import legs_modes
from model.settings import Dim


def into_state(u: jax.Array, B: jax.Array) -> jax.Array:
    """`B u`, `[..., N]`; B: [N, D]."""
    return jax.lax.complex(u @ B.real.T, u @ B.imag.T)


def out_of_state(h: jax.Array, C: jax.Array) -> jax.Array:
    """`Re C h`, `[..., D]`; C: [D, N]."""
    return h.real @ C.real.T - h.imag @ C.imag.T


def mimo_system(log_A: jax.Array, B: jax.Array, C: jax.Array) -> System:
    """Both forms of `h_t = A h_{t-1} + B u_t`, `y_t = Re C h_t`; log_A: [N], B: [N, D], C: [D, N], all discrete.

    The convolution is of the modes: all their states exist at once, where a scan holds those of a chunk.
    """
    return System(
        lambda u, past, convolve: out_of_state(convolve(into_state(u, B), into_state(past, B), powers, (log_A,)), C),
        lambda u, h0, ctx, form: diagonal_recurrence(jnp.exp(log_A), B, C, into_state, out_of_state, u, h0, ctx, form),
    )


class S5(Continuous):
    """S5: a diagonal state space over all channels, its modes those of HiPPO-N blocks, run by a scan.

    The paper draws normal B and C and moves them to the basis of the modes. The half of a unitary basis that has one
    of each conjugate pair makes of a normal matrix a complex normal one, so they are drawn there at once.
    """

    blocks: Dim = 1  # J, copies of a smaller HiPPO-N that the modes start from
    discretisation: Literal[*DISCRETISATIONS] = "zoh"

    convolves: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {
        "log_dt": "ssm",
        "Lambda_real": "ssm",
        "Lambda_imag": "ssm",
        "B": "ssm",
        "D": "no_decay",
    }

    def systems(self) -> list[System]:
        D, N, normal = self.width, self.state // 2, nn.initializers.normal
        start = np.tile(legs_modes(self.state // self.blocks)[0], self.blocks)
        Lambda = self.modes("Lambda", start, (N,), ("inner",))
        dt = self.steps(N)
        B = paired(self.weight("B", normal((2 * D) ** -0.5), (2, N, D), (None, "inner", "embed")))
        log_A, hold = DISCRETISATIONS[self.discretisation](Lambda, dt)
        both = self.readout("C", normal(self.state**-0.5), ("embed", "inner"))
        return [mimo_system(log_A, hold[:, None] * B, 2 * C) for C in both]

    def state_shape(self) -> tuple[int, ...]:
        return (self.state // 2,)

    def check(self) -> None:
        check_divides("s5's blocks", self.blocks, "the pairs of its state,", self.state // 2)
