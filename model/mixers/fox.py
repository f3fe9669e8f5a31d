"""Forgetting attention: softmax attention with a forget gate."""

import dataclasses

import jax
import jax.numpy as jnp

from model.cache import Cache
from model.contract import Context, State, wide
from model.layers import dense
from model.mixers.attention import Attention, Entries


class Fox(Attention):
    """The Forgetting Transformer's attention (FoX, https://arxiv.org/abs/2503.02130).

    Each token has a forget gate f in every head, and a score is lowered by the sum of -log f over the tokens from the
    key to the query: distances that tokens decide, in the place of ALiBi's. As a cumulative sum it is a level a token,
    and the bias is the distance of two levels, which also has a meaning where a query sees ahead. `qk_norm` and `gate`
    make the paper's "Pro" layer, but for its shifted keys and values.
    """

    def levels(self, x: jax.Array, ctx: Context, state: State) -> jax.Array:
        f = wide(self.dtype)
        gate = dense(self.n_heads, ("embed", "heads"), f, "forget", bias=True)(x.astype(f))
        forgotten = -jax.nn.log_sigmoid(gate)
        if ctx.segments is not None:
            forgotten = jnp.where(ctx.segments[..., None] > 0, forgotten, 0)
        levels = jnp.cumsum(forgotten, axis=1)
        if state is not None:  # they only rise, so that the highest is where the last token was
            kept = jnp.where(state["segments"][..., None] > 0, state["levels"], 0)
            levels = levels + jnp.max(kept, axis=1, keepdims=True)
        return levels

    @property
    def entries(self) -> Entries:
        return *super().entries, ("levels", (self.n_heads,))

    @property
    def cache(self) -> Cache:
        return dataclasses.replace(super().cache, wide=("levels",))
