"""Gated DeltaNet: the delta rule on a state that forgets at a rate the token decides (https://arxiv.org/abs/2412.06464).

It is Qwen3-Next's layer where that has as many heads of keys as of values; heads that share keys are not here.
"""

from typing import ClassVar

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


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet: Mamba-2's decay of a head, the delta rule, and a gate of the outputs."""

    expand: Dim = 2  # value channels for each of a key's
    dt_min: Positive = 0.001
    dt_max: Positive = 0.1

    label: ClassVar[str] = "gated_deltanet"
    groups: ClassVar[dict[str, str]] = {"A_log": "ssm", "dt_bias": "ssm"}

    @property
    def values(self) -> int:
        return self.expand * self.channels

    def decay(self, x: Array) -> Array:
        H, f = self.width // self.channels, wide(self.dtype)

        def per_head(name, init):
            return self.weight(name, init, (H,), ("inner",))

        low = dense(H, ("embed", "inner"), self.dtype, "dt")(x).astype(f)
        dt = jax.nn.softplus(low + per_head("dt_bias", inverse_softplus_dt(self.dt_min, self.dt_max)))
        return -jnp.exp(per_head("A_log", log_uniform_A)) * dt

    def gated(self, y: Array, x: Array) -> Array:
        return y * nn.silu(dense(y.shape[2:], ("embed", "inner", None), self.dtype, "gate")(x))
