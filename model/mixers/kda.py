"""Kimi Delta Attention: the delta rule where every channel forgets at its rate (https://arxiv.org/abs/2510.26692)."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide
from model.layers import dense
from model.mixers.deltanet import DeltaNet
from model.mixers.mamba import inverse_softplus_dt
from model.mixers.mamba2 import log_uniform_A
from model.settings import Dim, Positive

Array = jax.Array


class KDA(DeltaNet):
    """Kimi Delta Attention: a decay of every channel, the delta rule, and a gate of the outputs."""

    rank: Literal[0] | Dim = 0  # of the maps that decide the decay and the gate; 0: head_dim
    dt_min: Positive = 0.001
    dt_max: Positive = 0.1

    groups: ClassVar[dict[str, str]] = {"A_log": "ssm", "dt_bias": "ssm"}

    def low_rank(self, x: Array, name: str) -> Array:
        """A map to heads through few channels, `[B, L, H, K]`."""
        K = self.channels
        low = dense(self.rank or K, ("embed", None), self.dtype, f"{name}_down")(x)
        return dense((self.width // K, K), (None, "inner", None), self.dtype, f"{name}_up")(low)

    def decay(self, x: Array) -> Array:
        K, f = self.channels, wide(self.dtype)
        H, dt_init = self.width // K, inverse_softplus_dt(self.dt_min, self.dt_max)
        A_log = self.weight("A_log", log_uniform_A, (H,), ("inner",))
        dt_bias = self.weight("dt_bias", dt_init, (H, K), ("inner", None))
        return -jnp.exp(A_log)[:, None] * jax.nn.softplus(self.low_rank(x, "decay").astype(f) + dt_bias)

    def gated(self, y: Array, x: Array) -> Array:
        return y * nn.sigmoid(self.low_rank(x, "gate"))
