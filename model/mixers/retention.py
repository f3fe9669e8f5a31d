"""Retention: linear attention whose heads fade at fixed rates, with turned queries and keys (RetNet).

From https://arxiv.org/abs/2307.08621. A head's norm makes its outputs as large whatever scores are divided by, so none
of the paper's three ways to keep scores in range is here but the root of the key's size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context, State, wide
from model.errors import UserError
from model.mixers.decaying import Decaying, gated
from model.positions.rotary import angles, inverse_frequencies, turn_pairs
from model.settings import Dim

Array = jax.Array
THETA = 10000.0


def log_decays(heads: int) -> np.ndarray:
    """`log(1 - 2^(-5-h))` of each head, `[H]`."""
    return np.log1p(-(2.0 ** (-5 - np.arange(heads))))


class Retention(Decaying):
    """RetNet's multi-scale retention: every head forgets at a rate of its own, and tokens know their distance."""

    expand: Dim = 2  # channels of values and gate per model channel

    @property
    def sides(self) -> tuple[int, int]:
        return self.width // self.n_heads, self.expand * self.width // self.n_heads

    def check(self) -> None:
        super().check()
        K, _ = self.sides
        if K % 2:
            raise UserError(f"retention turns pairs, so width / n_heads must be even, not {K}; closest: {K + 1}")

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        (K, V), (B, L, _), f = self.sides, x.shape, wide(self.dtype)
        at = jnp.arange(L, dtype=jnp.int32)[None] if ctx.positions is None else ctx.positions
        turns = angles(at, inverse_frequencies(K, THETA), f)[:, :, None]
        sin, cos = jnp.sin(turns), jnp.cos(turns)
        q, k = (turn_pairs(self.heads(name, x, K).astype(f), sin, cos, "half") for name in "qk")
        w = jnp.broadcast_to(jnp.asarray(log_decays(self.n_heads), f), (B, L, self.n_heads))
        y, after = self.fade(q * K**-0.5, k, self.heads("v", x, V), w, ctx, state)
        return self.close(gated(self.head_norm(y), self.heads("gate", x, V))), after
