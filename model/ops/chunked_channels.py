"""A matrix state whose channels decay by themselves, as matrix products.

    y_t = r_t keep_t h_{t-1}        h_t = keep_t diag(e^{w_t}) h_{t-1} + k_t^T v_t

Letters beside the project's own: Q tokens of a block, M blocks of a chunk. Every channel decays by itself, so the decay
between two tokens enters a matrix product as two factors: the earlier token's, up to a boundary between them, and the
later one's, from there. Neither exceeds 1, and nothing is divided by a decay. Gated Linear Attention
(https://arxiv.org/abs/2312.06635) does so between blocks; halves of halves give all pairs in a block a boundary too.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.ops.decays import FORGET, in_chunks
from model.ops.stretches import handed_on, on_stretches, stretches

Array = jax.Array
BLOCK = 16  # Q: tokens that meet in pairs
CHUNK = 64  # tokens whose products the backward pass holds at once

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def forgetting(r: Array, w: Array, keep: Array | None) -> tuple[Array, Array]:
    """Tokens that read nothing of the past, and leave nothing of it, where it is not kept."""
    if keep is None:
        return r, w
    keep = keep[..., None, None]
    return jnp.where(keep, r, 0), jnp.where(keep, w, FORGET)


def meetings(Q: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens lie between each token and a boundary, `[n+1, Q, Q]`, and which pairs meet there, `[n, Q, Q]`.

    In n rounds spans of 1, 2, 4, ... tokens are joined in twos; the tokens of the second meet those of the first, so
    every pair meets once. The last boundary is the block's start, where it meets those before it.
    """
    t = np.arange(Q)
    half = 2 ** np.arange((Q - 1).bit_length())[:, None]
    joined, second = t // (2 * half), t // half % 2 == 1
    boundary = (2 * joined + 1) * half
    start = np.stack([*np.where(second, boundary, t + 1), np.zeros_like(t)])
    end = np.stack([*np.where(second, t, boundary), t])
    inside = (start[..., None] <= t) & (t < end[..., None])
    return inside, (joined[..., None] == joined[:, None]) & second[..., None] & ~second[:, None]


def block_states(h: Array, k: Array, v: Array, w: Array) -> tuple[Array, Array]:
    """The state after a chunk, and those that its blocks begin with, `[B, H, M, K, V]`.

    k, w: [B, H, M, Q, K]; v: [B, H, M, Q, V], with V for the channels of a value.
    """
    # Every sum is added up by itself: differences of running sums would lose all else beside a FORGET.
    later = np.tri(w.shape[3], k=-1).T.astype(w.dtype)
    added = einsum("bhmjk,bhmjv->bhmkv", k * jnp.exp(einsum("ij,bhmjk->bhmik", later, w)), v)
    total = jnp.exp(jnp.sum(w, axis=3))[..., None]
    before = []
    for m in range(w.shape[2]):
        before.append(h)
        h = total[:, :, m] * h + added[:, :, m]
    return h, jnp.stack(before, axis=2)


def run_chunk(h: Array, tokens: tuple[Array, ...]) -> tuple[Array, Array]:
    """The state after a chunk and its outputs; h: [B, H, K, V], tokens: r, k, v, w."""
    r, k, v, w = tokens
    inside, meets = meetings(w.shape[3])
    *to_boundary, to_token = jnp.exp(einsum("nij,bhmjk->nbhmik", inside.astype(w.dtype), w))
    weights = sum(
        jnp.where(pairs, einsum("bhmik,bhmjk->bhmij", r * decay, k * decay), 0)
        for pairs, decay in zip(meets, to_boundary, strict=True)
    )
    h, before = block_states(h, k, v, w)
    past = einsum("bhmik,bhmkv->bhmiv", r * to_token, before)
    return h, past + einsum("bhmij,bhmjv->bhmiv", weights, v)


def chunked(r: Array, k: Array, v: Array, w: Array, h0: Array, keep: Array | None = None) -> tuple[Array, Array]:
    """Products within a chunk, one chunk after another, and states from device to device that share the length."""
    r, w = forgetting(r, w, keep)
    r, k, v = (x.astype(w.dtype) for x in (r, k, v))
    if stretches(v.shape[1]) == 1:
        return chunks_in_turn(run_chunk, h0, r, k, v, w)

    def stretch(tokens, h0, share):
        r, k, v, w = tokens
        _, end = chunks_in_turn(lambda h, tokens: (block_states(h, *tokens)[0], None), jnp.zeros_like(h0), k, v, w)
        start, last = handed_on(jnp.exp(jnp.sum(w, axis=1))[..., None], end, h0, share)
        return chunks_in_turn(run_chunk, start, r, k, v, w)[0], last

    return on_stretches(stretch, (r, k, v, w), h0)


def chunks_in_turn(run: Callable, h0: Array, *tokens: Array) -> tuple[Array | None, Array]:
    """Outputs `[B, L, H, V]`, if there are any, and the last state. The backward pass recomputes a chunk at a time."""
    B, L, H, _ = tokens[0].shape
    M = -(-min(L, CHUNK) // BLOCK)

    def chunks(x):  # a filled step has k = 0 and w = 0, which leaves the state as it was
        tiles = in_chunks(in_chunks(x, M * BLOCK), BLOCK, axis=2)
        return jnp.transpose(tiles, (1, 0, 4, 2, 3, 5))  # [n, B, H, M, Q, K]

    h, y = lax.scan(jax.checkpoint(run, prevent_cse=False), h0, tuple(map(chunks, tokens)))
    return None if y is None else jnp.transpose(y, (1, 0, 3, 4, 2, 5)).reshape(B, -1, H, y.shape[-1])[:, :L], h
