"""Which blocks of keys each query chooses: the order of tokens, blocks in it, and their scores.

A block is `size` tokens of one document that follow each other, padding left out, and is known by its first token.
Queries are among the keys, q: [B, L, G, R, K]; k: [B, M, G, K]. They choose a tile at a time, on a GPU in kernels where
these can serve.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model import placement
from model.contract import wide
from model.documents import document_positions, open_reading
from model.ops.conv import moved, places
from model.ops.fused import SIDES, needs_unmet

Array = jax.Array
TILE = 128  # queries that choose at a time, at least
SCORES = 2**26  # numbers of one kind that those who choose together may make on a GPU
ROUNDS = 16  # blocks up to which a GPU finds the highest one after another


@struct.dataclass
class Order:
    """Tokens as they follow each other once padding is left out, and where the queries are among them."""

    document: Array  # [B, M] which document of the row, from 1; 0 beyond the last token
    position: Array  # [B, M] in its document
    index: Array  # [B, L] which token each query is; of padding, that before it
    there: Array | None  # [B, M] where the j-th token stands in the row, -1 beyond the last; None: in the j-th place
    back: Array | None  # [B, M] which token stands there, -1: padding

    def moved(self, x: Array) -> Array:
        """`[B, M, ...]` with tokens in this order."""
        if self.there is None:
            return x
        return moved(x.reshape(*x.shape[:2], -1), self.there, self.back).reshape(x.shape)

    def of_queries(self, x: Array) -> Array:
        """`[B, M]` at the queries, `[B, L]`."""
        return jnp.take_along_axis(x, self.index, axis=1)


def order_of(shape: tuple[int, int], segments: Array | None, first: Array | int = 0, L: int | None = None) -> Order:
    """Of rows [B, M], whose L tokens from the first on are the queries. No segments: one document, no padding."""
    (B, M), L = shape, shape[1] if L is None else L
    t = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, M))
    if segments is None:
        return Order(jnp.ones_like(t), t, lax.dynamic_slice_in_dim(t, first, L, axis=1), None, None)
    real = segments > 0
    there, back = places(real)
    position, _ = document_positions(segments, open_reading(B))
    document = jnp.cumsum(real & (position == 0), axis=1, dtype=jnp.int32)

    def in_order(x):
        return jnp.where(there >= 0, jnp.take_along_axis(x, jnp.maximum(there, 0), axis=1), 0)

    last = jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    index = lax.dynamic_slice_in_dim(last, first, L, axis=1)
    return Order(in_order(document), in_order(position), index, there, back)


def whole_blocks(order: Order, size: int, stride: int) -> tuple[Array, Array]:
    """The first token and the document of each block, both `[B, N]`; where there is none, document 0.

    A document has one at every `stride`-th of its tokens that has `size` tokens from there on; they are numbered along
    the row, and never more than M / stride.
    """
    B, M = order.document.shape
    N = max(M // stride, 1)
    last = jnp.pad(order.document, [(0, 0), (0, size)])[:, size - 1 : size - 1 + M]  # the document of its last token
    opens = (order.document > 0) & (order.position % stride == 0) & (last == order.document)
    t, row = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, M)), jnp.arange(B)[:, None]
    number = jnp.where(opens, jnp.cumsum(opens, axis=1, dtype=jnp.int32) - 1, N)
    start = jnp.full((B, N), M, jnp.int32).at[row, number].set(t, mode="drop")
    return start, jnp.where(start < M, jnp.take_along_axis(order.document, jnp.minimum(start, M - 1), axis=1), 0)


def block_means(k: Array, start: Array, size: int) -> Array:
    """The mean key of each block, `[B, N, G, K]`, in float32 at least."""
    (B, M, *rest), N = k.shape, start.shape[1]
    at = jnp.minimum(start[..., None] + jnp.arange(size, dtype=jnp.int32), M - 1).reshape(B, N * size)
    tokens = jnp.take_along_axis(k.reshape(B, M, -1), at[..., None], axis=1).reshape(B, N, size, *rest)
    return jnp.mean(tokens, axis=2, dtype=wide(k.dtype))


def highest(scores: Array, allowed: Array, start: Array, n: int) -> Array:
    """The first tokens of the n allowed blocks with the highest scores, `[B, ..., n]`, -1 where there are fewer.

    scores, allowed: [B, ..., N]; start: [B, N]. Of equal scores the earlier block's counts more.
    """
    n = min(n, scores.shape[-1])
    one_by_one = placement.platform() == "gpu" and n <= ROUNDS
    best, number = (in_rounds if one_by_one else lax.top_k)(jnp.where(allowed, scores, -jnp.inf), n)
    found = jnp.take_along_axis(start, number.reshape(start.shape[0], -1), axis=1).reshape(number.shape)
    return jnp.where(best > -jnp.inf, found, -1)


def in_rounds(scores: Array, n: int) -> tuple[Array, Array]:
    """As `lax.top_k`, one after another: scores are read n times, where a GPU would sort all of them.

    Where there are fewer than n above -inf, the others are -inf at any place.
    """
    place = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)

    def higher(one, other):
        (score, at), (score_2, at_2) = one, other
        first = (score > score_2) | ((score == score_2) & (at < at_2))
        return jnp.where(first, score, score_2), jnp.where(first, at, at_2)

    none, found, left = (jnp.array(-jnp.inf, scores.dtype), jnp.int32(scores.shape[-1])), [], scores
    for _ in range(n):
        best, at = lax.reduce((left, place), none, higher, (scores.ndim - 1,))
        found.append((best, jnp.minimum(at, scores.shape[-1] - 1)))
        # By the last one alone, so that no array of scores is made anew.
        best, at = best[..., None], at[..., None]
        left = jnp.where((scores < best) | ((scores == best) & (place > at)), scores, -jnp.inf)
    if not found:
        return jnp.zeros((*scores.shape[:-1], 0), scores.dtype), jnp.zeros((*scores.shape[:-1], 0), jnp.int32)
    best, number = (jnp.stack(parts, axis=-1) for parts in zip(*found, strict=True))
    return best, number


def choosing(q: Array, N: int) -> int:
    """Queries `[B, L, G, R, K]` that choose among N at a time: on a GPU, whose steps of a loop cost, as many as fit."""
    B, L, G, R, _ = q.shape
    if placement.platform() != "gpu":
        return min(TILE, L)
    B, G = placement.held(("batch", "heads"), (B, G))
    return min(L, max(TILE, SCORES // (B * G * R * N)))


def nearest_means(q: Array, k: Array, order: Order, size: int, n: int, implementation: str | None = None) -> Array:
    """MoBA's choice: the n earlier blocks whose mean key gives the highest product with the query, and its own.

    Gives their first tokens, `[B, L, G R, n + 1]`: every head chooses by itself, and nothing is learned by it.
    implementation: as of `model.ops.chosen.attend`.
    """
    q, k = lax.stop_gradient((q, k))
    start, document = whole_blocks(order, size, size)
    means = block_means(k, start, size)
    place, mine = order.of_queries(order.position), order.of_queries(order.document)
    own = order.index - place % size  # where the query's own block begins
    if choice_fused(q, n, implementation):
        from model.ops import fused_choice as by  # here: Pallas takes a second to load, and only GPUs need it

        queries = by.Queries(order.index, order.index - place, own, mine)
        found = by.nearest(q, means, queries, by.Blocks(start, document), n)
        return with_own(own, jnp.moveaxis(found, 2, 1))

    def choose(q, own, mine):
        scores = jnp.einsum("blgrk,bngk->bgrln", q.astype(means.dtype), means)
        scores = scores.reshape(scores.shape[0], -1, *scores.shape[3:])  # [B, G R, t, N]
        allowed = (document[:, None] == mine[..., None]) & (start[:, None] < own[..., None])
        return with_own(own, highest(scores, allowed[:, None], start, n))

    return in_tiles(choose, choosing(q, start.shape[1]), q, own, mine)


def choice_fused(q: Array, n: int, implementation: str | None) -> bool:
    """Whether kernels find the n blocks that each of many queries chooses."""
    many = q.shape[1] > TILE and 0 < n <= ROUNDS
    return implementation in (None, "fused") and many and q.shape[-1] in SIDES and not needs_unmet(q)


def with_own(own: Array, found: Array) -> Array:
    """A query's own block before those it has found; own: [B, t]; found: [B, H, t, n]. Gives `[B, t, H, n + 1]`."""
    own = jnp.broadcast_to(own[:, None, :, None], (*found.shape[:3], 1))
    return jnp.moveaxis(jnp.concatenate([own, found], axis=-1), 1, 2)


def in_tiles(run: Callable[..., Array], size: int, *arrays: Array) -> Array:
    """`run` on tiles along the length of arrays `[B, L, ...]`, one after another."""
    L = arrays[0].shape[1]
    _, y = lax.scan(lambda _, tile: (None, run(*tile)), None, tuple(tiles(x, size) for x in arrays))
    return untiled(y, L)


def tiles(x: Array, size: int) -> Array:
    """`[B, L, ...]` to `[n, B, size, ...]`, zeros behind."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def untiled(x: Array, L: int) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :L]
