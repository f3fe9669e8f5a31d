"""LRU: a linear recurrence made discrete from the start (https://arxiv.org/abs/2303.06349)."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.errors import UserError
from model.mixers.s5 import mimo_system
from model.mixers.state_space import Invariant, System, paired
from model.settings import Fraction, above, at_most


def ring(r_min: float, r_max: float) -> nn.initializers.Initializer:
    """`log nu` for which `|lambda| = exp(-nu)` is uniform in area between two circles."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        area = jax.random.uniform(key, shape, dtype, jnp.finfo(dtype).tiny)
        return jnp.log(-0.5 * jnp.log(area * (r_max**2 - r_min**2) + r_min**2))

    return init


def log_phase(max_phase: float) -> nn.initializers.Initializer:
    return lambda key, shape, dtype: jnp.log(max_phase * jax.random.uniform(key, shape, dtype, jnp.finfo(dtype).tiny))


class LRU(Invariant):
    """LRU: complex modes on a ring inside the unit circle, and inputs scaled so that the state keeps its size."""

    r_min: Fraction = 0.9
    r_max: Fraction = 0.999
    max_phase: Annotated[float, above(0), at_most(2 * np.pi)] = 6.28

    convolves: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {
        "nu_log": "ssm",
        "theta_log": "ssm",
        "gamma_log": "ssm",
        "B": "ssm",
        "D": "no_decay",
    }

    def systems(self) -> list[System]:
        D, N, normal = self.width, self.state // 2, nn.initializers.normal
        nu_log = self.weight("nu_log", ring(self.r_min, self.r_max), (N,), ("inner",))
        theta_log = self.weight("theta_log", log_phase(self.max_phase), (N,), ("inner",))

        def gamma_init(key, shape, dtype):  # sqrt(1 - |lambda|^2)
            return 0.5 * jnp.log(-jnp.expm1(-2 * jnp.exp(nu_log)))

        gamma = jnp.exp(self.weight("gamma_log", gamma_init, (N,), ("inner",)))
        B = paired(self.weight("B", normal((2 * D) ** -0.5), (2, N, D), (None, "inner", "embed")))
        log_A = jax.lax.complex(-jnp.exp(nu_log), jnp.exp(theta_log))
        both = self.readout("C", normal(N**-0.5), ("embed", "inner"))
        return [mimo_system(log_A, gamma[:, None] * B, C) for C in both]

    def state_shape(self) -> tuple[int, ...]:
        return (self.state // 2,)

    def check(self) -> None:
        if self.r_min >= self.r_max:
            raise UserError(f"lru's ring from r_min {self.r_min} to r_max {self.r_max} is empty; r_min must be below")
