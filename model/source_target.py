"""A source and the target that answers it: two sequences, or one row that holds both.

Shape letters besides those of the contract: S tokens of the source, T of the target.
"""

import jax
import jax.numpy as jnp
from flax import struct

from model.errors import UserError
from model.heads import Answers
from model.ops.cross_entropy import Scores, Targets


@struct.dataclass
class Pair:
    """Token ids of both, padding told by their segments; None: there is none."""

    source: jax.Array | None  # [B, S] int32; None: the row of the target holds it, or it has been read
    source_segments: jax.Array | None  # [B, S] int32, 0 is padding
    target: jax.Array  # [B, T] int32
    target_segments: jax.Array | None  # [B, T] int32
    at: jax.Array | None  # [B, Q], places in the target that are asked for; before its beginning: nowhere


def apart(given: Pair, S: int, T: int) -> Pair:
    """The pair that a call brings, of rows that hold both where no source is given; S: 0, or a source must be."""
    if given.source is not None:
        return given
    if S:
        raise UserError("the decoder of this model has nothing to look at; pass source=")
    return divide(given.target, given.target_segments, given.at, T)


def divide(tokens: jax.Array, segments: jax.Array | None, at: jax.Array | None, T: int) -> Pair:
    """Rows `[B, L]` that end in a target of T tokens as a source and a target; `at` counts along the rows."""
    L = tokens.shape[1]
    if not 0 < T < L:
        raise UserError(
            f"rows of {L} tokens cannot end in a target of {T}; allowed: at least 1, and 1 of source before it; "
            f"closest: {min(max(T, 1), max(L - 1, 1))}"
        )
    if segments is None:
        return Pair(tokens[:, : L - T], None, tokens[:, L - T :], None, None if at is None else at - (L - T))
    read, begin = boundary(segments, T)
    target_of = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, T))
    return Pair(
        source=tokens[:, : L - T],
        source_segments=read,
        target=target_of(tokens, begin),
        target_segments=target_of(segments, begin),
        at=None if at is None else at - begin[:, None],
    )


def boundary(segments: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """Of rows that end in a target of T tokens: the source's segments `[B, S]`, and where the target begins, `[B]`.

    Padding may lie behind the target, and anywhere in the source.
    """
    L = segments.shape[1]
    index = jnp.arange(L, dtype=jnp.int32)
    begin = jnp.max(jnp.where(segments > 0, index + 1, T), axis=1) - T
    return jnp.where(index < begin[:, None], segments, 0)[:, : L - T], begin


def only_asked(found: Answers, at: jax.Array | None, targets: Targets | None) -> Answers:
    """Logits or scores, with no number where a place `[B, Q]` that is asked for lies before the target."""
    if at is None:
        return found
    if isinstance(found, Scores):
        loss = jnp.where(at >= 0, found.loss, jnp.nan)
        total = jnp.where(jnp.isnan(targets.summed(loss)), jnp.nan, found.total)
        return Scores(loss, found.hits & (at >= 0), total)
    return jnp.where(at[..., None] >= 0, found, jnp.nan)
