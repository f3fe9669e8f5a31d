"""Attention by masks with gaps, each in the way that skips the most.

Arguments are those of `attention` for a whole row: positions are None (0, 1, 2, ... in the row), or those of packed
documents that have no padding inside.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.ops.attention import attention
from model.ops.conv import moved, places
from model.ops.mask import Band, Mask
from model.ops.patterns import Columns, Dilated

SKIPPING = ("flash", "blocks")  # implementations that compute what a mask shows and little more


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    implementation: str | tuple[str, ...] = SKIPPING,
    **call: Any,
) -> jax.Array:
    """Softmax attention, `[B, L, H, V]`: dilated and column masks by moving tokens together, others by lists of blocks.

    Of packed documents, lists are known of masks of bounded reach; for others, and for a dilated mask with a position
    bias, it is found out at run time which tiles are seen, and work not skipped grows with their number only.
    """
    call = dict(q_positions=None, k_positions=None, q_segments=None, k_segments=None, bias=None) | call
    if isinstance(mask, Dilated):
        return dilated(q, k, v, mask, implementation, **call)
    if isinstance(mask, Columns):
        return columns(q, k, v, mask, **call)
    return attention(q, k, v, mask=mask, **call, implementation=implementation)


def dilated(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Dilated, implementation: str | tuple[str, ...], **call: Any
) -> jax.Array:
    """Every step-th token of a row is dealt into a row of its own, and what is seen there is a window."""
    (B, L), step = q.shape[:2], mask.step
    if step == 1:
        return sparse_attention(q, k, v, mask=mask.within(), implementation=implementation, **call)
    n = -(-L // step)

    def dealt(x: jax.Array | None) -> jax.Array | None:
        """`[B, L, ...]` to `[B step, n, ...]`."""
        if x is None:
            return None
        x = jnp.broadcast_to(x, (B, *x.shape[1:]))
        x = jnp.pad(x, [(0, 0), (0, n * step - L)] + [(0, 0)] * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(B, n, step, *x.shape[2:]), 1, 2).reshape(B * step, n, *x.shape[2:])

    if call["q_segments"] is None and L % step:  # the last rows are filled up
        ones = jnp.ones((B, L), jnp.int32)
        call |= dict(q_segments=ones, k_segments=ones, right_padded=True)
    seen: Mask = Band(mask.back, mask.ahead)  # over places in the new rows
    if call["bias"] is not None:
        seen, at = mask, jnp.arange(L, dtype=jnp.int32)[None]
        call |= {name: at if call[name] is None else call[name] for name in ("q_positions", "k_positions")}
        call["gapless"] = False
    else:
        call |= dict(q_positions=None, k_positions=None)
    rows = {name: dealt(call[name]) for name in ("q_positions", "k_positions", "q_segments", "k_segments")}
    y = attention(dealt(q), dealt(k), dealt(v), mask=seen, **call | rows, implementation=implementation)
    y = jnp.swapaxes(y.reshape(B, step, n, *y.shape[2:]), 1, 2)
    return y.reshape(B, n * step, *y.shape[3:])[:, :L]


def columns(q: jax.Array, k: jax.Array, v: jax.Array, mask: Columns, **call: Any) -> jax.Array:
    """The chosen keys are moved together, of which there are at most `last L / n`; a query's own is a part apart."""
    (B, L), at = q.shape[:2], call["q_positions"]
    if at is None:
        at = jnp.arange(L, dtype=jnp.int32)[None]
        there = np.flatnonzero(mask.chosen(np.arange(L)))
        few = dict(k=k[:, there], v=v[:, there], k_positions=jnp.asarray(there[None], jnp.int32))
        if call["k_segments"] is not None:
            few["k_segments"] = call["k_segments"][:, there]
    else:
        # However documents lie: of n tokens from a document's first on, at most the last few are chosen.
        real = jnp.broadcast_to(call["k_segments"] > 0, (B, L))
        there, back = places(mask.chosen(call["k_positions"]) & real)
        there = there[:, : mask.last * L // mask.n]

        def gathered(x: jax.Array) -> jax.Array:
            flat = jnp.broadcast_to(x, (B, *x.shape[1:])).reshape(B, L, -1)
            return moved(flat, there, back).reshape(B, -1, *x.shape[2:])

        few = {name: gathered(x) for name, x in (("k", k), ("v", v))}
        few |= {name: gathered(call[name]) for name in ("k_positions", "k_segments")}
    own, own_lse = attention(q, k, v, mask=Band(0, 0), **call, with_lse=True, implementation="blocks")
    if not few["k"].shape[1]:
        return own
    own_lse = jnp.where(mask.chosen(at)[..., None], -jnp.inf, own_lse)  # it is among the others
    others = call | dict(q_positions=at, gapless=False, mask=Band(None, mask.ahead)) | few
    out, lse = attention(q, others.pop("k"), others.pop("v"), **others, with_lse=True, implementation="tiled")
    share = jax.nn.softmax(jnp.stack([own_lse, lse]), axis=0)[..., None].astype(q.dtype)
    return share[0] * own + share[1] * out
