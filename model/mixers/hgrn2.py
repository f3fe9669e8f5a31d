"""HGRN2: a gated linear recurrence whose state is a matrix (https://arxiv.org/abs/2404.07904)."""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context, State, wide
from model.layers import norm
from model.mixers.decaying import Decaying
from model.settings import at_least, below

Array = jax.Array


def forget(gate: Array, bound: float) -> tuple[Array, Array]:
    """The logarithm of `f = bound + (1 - bound) sigmoid(gate)`, and 1 - f, where f may be close to either end."""
    log_f = jax.nn.log_sigmoid(gate) + np.log1p(-bound)
    return jnp.logaddexp(np.log(bound), log_f) if bound else log_f, (1 - bound) * jax.nn.sigmoid(-gate)


class HGRN2(Decaying):
    """HGRN2: what a channel forgets makes room for as much of the new, so that forget gates are keys as well."""

    # Below which no gate falls. In the paper it is learned and rises with the layer: give layers entries of their own.
    lower_bound: Annotated[float, at_least(0), below(1)] = 0.0

    @property
    def sides(self) -> tuple[int, int]:
        return (self.width // self.n_heads,) * 2

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        K, _ = self.sides
        q, gate, v = (self.heads(name, x, K) for name in ("q", "forget", "v"))
        w, k = forget(gate.astype(wide(self.dtype)), self.lower_bound)
        y, after = self.fade(nn.silu(q), k, v, w, ctx, state)
        return self.close(norm("rmsnorm", self.dtype, "norm", axes=2)(y)), after
