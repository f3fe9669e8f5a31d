"""Which tiles of queries and keys meet in a flash attention kernel: those that are skipped cost nothing."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.ops.mask import Mask
from model.ops.scores import Operands

Array = jax.Array


class Walk(NamedTuple):
    """The tiles that each of n tiles meets, in order: a..b to be masked, b..c seen whole, c..d to be masked."""

    spans: np.ndarray  # [n, 4] int32: a, b, c, d
    listed: np.ndarray | None = None  # [T] int32: the tile at each place of the order; None: the place itself


def walk(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int], M: int, by_key: bool) -> Walk:
    """For tiles of queries, what they meet of the keys; `by_key`, the other way round.

    Positions are 0, 1, 2, ... Lengths, of queries and keys, are whole tiles; keys from M on are not there.
    """
    (l, m), (n, n_keys) = tile, (size // part for size, part in zip(lengths, tile, strict=True))
    if (band := mask.band()) is not None:
        back, ahead = band
        if by_key:
            return along(ahead, back, n_keys, n, m, l, whole=n, rows=M // m)
        return along(back, ahead, n, n_keys, l, m, whole=M // m, rows=n)
    i, j, whole = meetings(mask, tile, (n, n_keys))
    whole = whole & (j < M // m)
    own, other, n = (j, i, n_keys) if by_key else (i, j, n)
    order = np.lexsort((other, ~whole, own))
    met, seen_whole = (np.bincount(own[some], minlength=n) for some in (slice(None), whole))
    first = np.cumsum(met) - met
    return Walk(np.stack([first, first, first + seen_whole, first + met], axis=1).astype(np.int32), other[order])


STRIP = 2**24  # pairs of tiles that are looked at at once


@lru_cache(maxsize=64)
def meetings(mask: Mask, tile: tuple[int, int], counts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of tiles i of queries and j of keys of which the mask shows something, and whether it shows all."""
    (l, m), (n, n_keys) = tile, counts
    rows, keys = max(1, STRIP // n_keys), np.arange(n_keys, dtype=np.int32)[None] * m
    found = []
    for first in range(0, n, rows):
        queries = np.arange(first, min(first + rows, n), dtype=np.int32)[:, None] * l
        block = mask.block(queries, queries + l - 1, keys, keys + m - 1)
        some, every = (np.broadcast_to(x, (len(queries), n_keys)) for x in block)
        i, j = np.nonzero(some)
        found.append((i + first, j, every[i, j]))
    i, j, whole = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return i.astype(np.int32), j.astype(np.int32), whole


def along(back: int | None, ahead: int | None, n: int, n_others: int, l: int, m: int, whole: int, rows: int) -> Walk:
    """Of a band: what n tiles of l meet of others of m. Tokens are missing from others from `whole` on, and from tiles
    from `rows` on."""
    low = np.arange(n) * l
    high = low + l - 1
    a = np.zeros(n, int) if back is None else np.maximum(-((m - 1 + back - low) // m), 0)
    d = np.full(n, n_others) if ahead is None else np.minimum((high + ahead) // m + 1, n_others)
    b = np.zeros(n, int) if back is None else -((back - high) // m)
    c = np.full(n, whole) if ahead is None else np.minimum((low + ahead - m + 1) // m + 1, whole)
    a = np.minimum(a, d)
    b = np.clip(b, a, d)
    c = np.where(np.arange(n) < rows, np.clip(c, b, d), b)
    return Walk(np.stack([a, b, c, d], axis=1).astype(np.int32))


FAR = 2**30  # farther than any position or document


def tiles_met(o: Operands, tile: tuple[int, int], mask: Mask | None, by_key: bool) -> Array:
    """The first and the end of the tiles of keys that share a document with each tile of queries, `[B or 1, n, 2]`;
    `by_key`, the other way round. Of tokens that stand anywhere, a mask must also show something between these tiles.
    """

    def ends(x: Array, segments: Array | None, size: int, axis: int) -> tuple[Array, Array]:
        """The least and the largest of a tile's real tokens, as rows or as columns."""
        real = jnp.ones(x.shape, bool) if segments is None else segments > 0
        tiles = [y.reshape(y.shape[0], -1, size) for y in (jnp.where(real, x, FAR), jnp.where(real, x, -1))]
        return jnp.expand_dims(tiles[0].min(-1), axis), jnp.expand_dims(tiles[1].max(-1), axis)

    def of_both(q: Array, k: Array) -> tuple[Array, Array, Array, Array]:
        return *ends(q, o.q_segments, tile[0], 2), *ends(k, o.k_segments, tile[1], 1)

    meet = True
    if o.k_segments is not None:
        low, high, other_low, other_high = of_both(o.q_segments, o.k_segments)
        meet = (low <= other_high) & (other_low <= high)
    if mask is not None:
        q_low, q_high, k_low, k_high = of_both(o.q_positions, o.k_positions)
        meet = meet & mask.block(q_low, q_high, k_low, k_high).some & (q_low < FAR) & (k_low < FAR)
    meet = jnp.swapaxes(meet, 1, 2) if by_key else meet
    place = jnp.arange(meet.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(meet, place, meet.shape[-1]), axis=-1)
    return jnp.stack([first, jnp.max(jnp.where(meet, place + 1, 0), axis=-1)], axis=-1)
