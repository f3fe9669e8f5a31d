"""Where documents begin in rows that pack several, and padding, with counts that carry over between calls."""

import jax
import jax.numpy as jnp
from flax import struct

from model.contract import Context


@struct.dataclass
class Reading:
    """How far each row has been read: the open document and the number of its tokens seen."""

    segment: jax.Array  # [B] int32
    count: jax.Array  # [B] int32


def open_reading(batch: int) -> Reading:
    return Reading(segment=jnp.zeros(batch, jnp.int32), count=jnp.zeros(batch, jnp.int32))


def document_positions(segments: jax.Array, reading: Reading) -> tuple[jax.Array, Reading]:
    """Positions within documents, `[B, L]`, and the reading after these tokens.

    A token opens a document when its segment differs from that of the last token that was not padding, so padding
    between two calls does not close a document. Padding itself gets position 0.
    """
    real = segments > 0
    # Counts are int32, whatever JAX takes integers to be: they go into caches that are.
    seen = jnp.cumsum(real, axis=1, dtype=jnp.int32) - real  # real tokens before each one, in this call
    # The index of the last real token before each one (-1: none in this call) and its segment.
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    last = jax.lax.cummax(jnp.where(real, index, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], axis=1)
    carried = reading.segment[:, None]
    previous = jnp.where(before < 0, carried, jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=1))
    opens = real & (segments != previous)
    # Tokens seen when the current document opened; before any opening the count goes on from the reading.
    opened = jax.lax.cummax(jnp.where(opens, seen, -1), axis=1)
    positions = jnp.where(opened < 0, seen + reading.count[:, None], seen - opened)
    end = jnp.maximum(last[:, -1:], 0)
    any_real = last[:, -1] >= 0
    after = Reading(
        segment=jnp.where(any_real, jnp.take_along_axis(segments, end, axis=1)[:, 0], reading.segment),
        count=jnp.where(any_real, jnp.take_along_axis(positions, end, axis=1)[:, 0] + 1, reading.count),
    )
    return jnp.where(real, positions, 0), after


def neighbours(ctx: Context) -> tuple[jax.Array | None, jax.Array | None]:
    """How far back each token may look, in tokens of its document, and which are no padding; None: all of them."""
    return (None, None) if ctx.segments is None else (ctx.positions, ctx.segments > 0)


def marks(ctx: Context) -> tuple[jax.Array | None, jax.Array | None]:
    """Which tokens are real and before which the past is kept, `[B, L]`; None: all."""
    if ctx.segments is None:
        return None, None
    real = ctx.segments > 0
    return real, (ctx.positions > 0) | ~real


def at_real(real: jax.Array | None, x: jax.Array) -> jax.Array:
    """x with zeros at padding."""
    return x if real is None else jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)


def looking_back(ctx: Context) -> Context:
    """The context of those who see no later token: to them, padding behind a row is nothing."""
    return ctx.replace(positions=None, segments=None) if ctx.right_padded else ctx


def reverse(ctx: Context) -> Context:
    """The context of the rows read backwards, with positions counted from each document's end."""
    if ctx.segments is None:
        return ctx
    segments = ctx.segments[:, ::-1]
    positions, _ = document_positions(segments, open_reading(segments.shape[0]))
    return ctx.replace(positions=positions, segments=segments, right_padded=False)
