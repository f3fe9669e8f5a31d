"""Softmax attention by static sparse patterns: what every such mixer shares."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.cache import Cache, Ring
from model.contract import Context, State
from model.errors import UserError
from model.mixers.attention import MultiHead, begin, out_of_heads, queries_keys_values, remember
from model.ops.attention import IMPLEMENTATIONS, attention, attention_weights
from model.ops.conv import moved, places
from model.ops.mask import Mask
from model.ops.scores import Bias
from model.ops.sparse_attention import SKIPPING, sparse_attention
from model.positions.position import Position

Arrays = dict[str, jax.Array]
Call = dict[str, Any]  # by keyword, for the attention op


@dataclasses.dataclass(frozen=True)
class Turn:
    """How a position encoding turns the heads of tokens."""

    position: Position
    at: jax.Array  # [B or 1, L]
    span: int

    def first(self, n: int) -> "Turn":
        return dataclasses.replace(self, at=self.at[:, :n])

    def queries(self, q: jax.Array) -> jax.Array:
        return self.position.rotate_queries(q, self.at, self.span)

    def keys(self, k: jax.Array) -> jax.Array:
        return self.position.rotate_keys(k, self.at, self.span)


class Sparse(MultiHead):
    """Multi-head attention whose heads take turns in a few masks, over positions within documents.

    Padding is taken out of packed rows first, so that tokens of a document lie side by side. A cache is read by the
    same masks, and is a ring where they reach no farther back than that.
    """

    implementation: Literal[*IMPLEMENTATIONS] | None = None  # None: what is not seen is skipped; others: of all pairs

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Head h has that of h's turn."""
        raise NotImplementedError

    def check(self, position: Position) -> None:
        super().check(position)
        if self.n_heads < len(self.masks):
            raise UserError(
                f"model.{self.label}.n_heads {self.n_heads} is too few for {len(self.masks)} patterns that heads take "
                f"turns in; closest: {len(self.masks)}"
            )
        if position.stretches and isinstance(self.cache, Ring):
            name = type(position).__name__.lower()
            raise UserError(f"position {name!r} stretches with the length, and a ring never grows; use scaling 'ntk'")

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        skips = state is None and self.implementation in (None, "blocks") and not self.looked_into()
        packed = state is None and ctx.segments is not None and not ctx.right_padded
        if skips and packed:
            there, back = places(ctx.segments > 0)
            x, ctx = moved(x, there, back), without_gaps(ctx, there)
        position, at, span = begin(self, x, ctx, state)
        queries, kept = self.projected(x, Turn(position, at, span), skips and not packed)
        call = dict(bias=ctx.bias if position.shares else position.bias(self.n_heads, self.causal))
        if state is None:
            at = ctx.positions if packed else None
            call |= dict(q_positions=at, k_positions=at, q_segments=ctx.segments, k_segments=ctx.segments)
            call |= dict(right_padded=ctx.right_padded, gapless=skips and packed)
        else:
            kept, where, state = remember(self.cache, ctx, state, **kept)
            call |= where
        y, weights = self.attend(queries, kept, call, skips)
        if weights is not None:
            self.sow("maps", "weights", weights)
        y = out_of_heads(self, y)
        return moved(y, back, there) if skips and packed else y, state

    def projected(self, x: jax.Array, turn: Turn, alone: bool) -> tuple[Arrays, Arrays]:
        """Queries, and what others see of tokens, which a cache keeps; alone: rows are one document from its first."""
        q, k, v = queries_keys_values(self, self.heads, x, x)
        return dict(q=turn.queries(q)), dict(k=turn.keys(k), v=v)

    def attend(self, queries: Arrays, kept: Arrays, call: Call, skips: bool) -> tuple[jax.Array, jax.Array | None]:
        """The outputs of all heads, `[B, L, H, K]`, and their weights if someone wants to look at them."""
        return self.in_turns(self.masks, queries["q"], kept["k"], kept["v"], call, skips)

    def in_turns(
        self, masks: tuple[Mask, ...], q: jax.Array, k: jax.Array, v: jax.Array, call: Call, skips: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Attention whose heads take turns in these masks."""
        outputs, weights, order = [], [], []
        for mask, heads, own in turns(masks, *self.heads[:2]):
            turn = (jnp.take(q, heads, axis=2), *(x if own is None else jnp.take(x, own, axis=2) for x in (k, v)))
            options = call | dict(mask=mask, bias=of_heads(call["bias"], heads))
            if skips:
                outputs.append(sparse_attention(*turn, **options, implementation=self.implementation or SKIPPING))
            else:
                outputs.append(attention(*turn, **options, implementation=self.implementation))
            if self.looked_into():
                weights.append(attention_weights(*turn, **options))
            order += list(heads)
        back = np.argsort(order)
        y = jnp.take(jnp.concatenate(outputs, axis=2), back, axis=2)
        return y, jnp.take(jnp.concatenate(weights, axis=1), back, axis=1) if weights else None

    @property
    def cache(self) -> Cache:
        back = [mask.reach()[0] for mask in self.masks]
        return super().cache if None in back else Ring(self.entries, self.dtype, max(back) + 1)


def turns(masks: tuple[Mask, ...], H: int, G: int) -> Iterator[tuple[Mask, np.ndarray, np.ndarray | None]]:
    """Each mask, the heads that have it, and the key-value heads that they read in their order; None: all, as ever."""
    R = H // G
    for turn, mask in enumerate(masks):
        heads = np.arange(turn, H, len(masks))
        yield mask, heads, None if R % len(masks) == 0 or len(masks) == 1 else heads // R


def of_heads(bias: Bias | None, heads: np.ndarray) -> Bias | None:
    """A position bias of some heads."""
    if bias is None:
        return None

    def own(leaf: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        return jnp.take(leaf, heads, axis=names.index("heads")) if "heads" in names else leaf

    return bias.replace(params=jax.tree.map(own, bias.params, bias.axes))


def without_gaps(ctx: Context, there: jax.Array) -> Context:
    """The context of rows whose real tokens have been moved to the front."""

    def front(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, there.shape)
        return jnp.where(there >= 0, jnp.take_along_axis(x, jnp.maximum(there, 0), axis=1), 0)

    return ctx.replace(positions=front(ctx.positions), segments=front(ctx.segments))
