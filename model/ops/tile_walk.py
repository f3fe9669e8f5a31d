"""Which tiles of queries and keys meet in a flash attention kernel: those that are skipped cost nothing."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.ops.mask import Mask
from model.ops.scores import Operands

Array = jax.Array
FAR = 2**30  # farther than any position, document or tile


class Walk(NamedTuple):
    """The tiles that each of n tiles meets, in order: a..b to be masked, b..c seen whole, c..d to be masked.

    A tile that meets far more than others, as global tokens do, is walked in parts side by side: the first in the
    tile's own place, the others behind the n tiles.
    """

    spans: np.ndarray  # [P, 4] int32: a, b, c, d
    listed: np.ndarray | None = None  # [T] int32: the tile at each place of the order; None: the place itself
    tile: np.ndarray | None = None  # [P] int32: whose part it is; None: each is a tile's whole walk

    @property
    def n(self) -> int:
        return len(self.spans) if self.tile is None else int(self.tile.max()) + 1

    def tiles(self) -> np.ndarray:
        """The tile of each part."""
        return np.arange(len(self.spans), dtype=np.int32) if self.tile is None else self.tile


MOST = 4  # times as many tiles as the mean that one part meets
LEAST = 16  # tiles that are not worth parting


def in_parts(walk: Walk) -> Walk:
    """The same, none of whose parts is far longer than the mean, but for a last one that is empty."""
    a, d = walk.spans[:, 0], walk.spans[:, 3]
    most = max(LEAST, MOST * math.ceil(np.mean(d - a)))
    more = np.maximum(-((a - d) // most), 1) - 1  # parts of each tile beside its first
    if not more.any():
        return walk
    tile = np.concatenate([np.arange(len(a)), np.repeat(np.arange(len(a)), more), [0]])
    nth = np.concatenate([np.zeros(len(a), int), *(1 + np.arange(k) for k in more[more > 0]), [0]])
    first = a[tile] + nth * most
    parts = np.clip(walk.spans[tile], first[:, None], first[:, None] + most)
    parts[-1] = 0
    return Walk(parts.astype(np.int32), walk.listed, tile.astype(np.int32))


def long_tiles(walk: Walk) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tiles that are walked in parts, `[T]`, and the places of these, `[T, C]`; those of about as many parts together.

    Where a tile has fewer than C, the empty part stands for the others.
    """
    empty = len(walk.tile) - 1
    counts = np.bincount(walk.tile[:empty])
    behind = len(counts) + np.cumsum(counts - 1) - (counts - 1)  # where a tile's other parts begin
    widths = np.where(counts > 1, 2 ** np.ceil(np.log2(counts)), 0).astype(int)
    for C in sorted(set(widths) - {0}):
        tiles = np.flatnonzero(widths == C)
        nth = np.arange(1, C)
        others = np.where(nth < counts[tiles, None], behind[tiles, None] + nth - 1, empty)
        yield tiles, np.concatenate([tiles[:, None], others], axis=1)


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
    if (spans := without_gaps(own, other, whole, n)) is not None:
        return Walk(spans)
    order = np.lexsort((other, ~whole, own))
    met, seen_whole = (np.bincount(own[some], minlength=n) for some in (slice(None), whole))
    first = np.cumsum(met) - met
    return Walk(np.stack([first, first, first + seen_whole, first + met], axis=1).astype(np.int32), other[order])


def without_gaps(own: np.ndarray, other: np.ndarray, whole: np.ndarray, n: int) -> np.ndarray | None:
    """The spans of n tiles that meet all others from the first to the last, as of a prefix; None if not all do."""

    def stretch(own: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        first, end = np.full(n, FAR), np.zeros(n, int)
        np.minimum.at(first, own, other)
        np.maximum.at(end, own, other + 1)
        first = np.minimum(first, end)
        return first, end, bool((end - first == np.bincount(own, minlength=n)).all())

    a, d, met = stretch(own, other)
    b, c, seen_whole = stretch(own[whole], other[whole])
    if not (met and seen_whole):
        return None
    none = b == c
    return np.stack([a, np.where(none, a, b), np.where(none, a, c), d], axis=1).astype(np.int32)


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


def tiles_of_a_document(o: Operands, tile: tuple[int, int], by_key: bool) -> Array:
    """The first and the end of a run of tiles of keys all of whose tokens are of one document with all of each tile of
    queries, `[B or 1, n, 2]`; `by_key`, the other way round. Of several runs, the first."""

    def documents(segments: Array, size: int, none: int) -> Array:
        """Of each tile, which one it is of; `none` where it is of several, or has padding."""
        tiles = segments.reshape(segments.shape[0], -1, size)
        first = tiles[..., 0]
        return jnp.where((tiles == first[..., None]).all(-1) & (first > 0), first, none)

    q, k = documents(o.q_segments, tile[0], -1), documents(o.k_segments, tile[1], -2)
    same = q[..., None, :] == k[..., None] if by_key else q[..., None] == k[..., None, :]
    first = jnp.argmax(same, axis=-1, keepdims=True)
    place = jnp.arange(same.shape[-1])
    end = jnp.min(jnp.where(~same & (place > first), place, len(place)), axis=-1)
    end = jnp.where(same.any(-1), end, first[..., 0])
    return jnp.stack([first[..., 0], end], axis=-1).astype(jnp.int32)


Made = tuple[Array, ...]  # for whole tiles, and where some are walked in parts, for the further parts


def summed(made: Made, walk: Walk, size: int, axis: int) -> Array:
    """What programs made for `size` tokens each, along an axis, as sums of whole tiles."""
    return of_tiles((made,), walk, size, (axis,), lambda x: (jnp.sum(x, axis=axis + 1, dtype=jnp.float32),))[0]


def averaged(out: Made, lse: Made, walk: Walk, size: int) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` that programs made, and their log-sum-exp `[B, H, L]`, as those of whole tiles."""

    def joined(out: Array, lse: Array) -> tuple[Array, Array]:
        """out: [B, T, C, l, H, V]; lse: [B, H, T, C, l]."""
        whole = jax.nn.logsumexp(lse, axis=3)
        share = jnp.exp(lse - whole[:, :, :, None])
        return jnp.einsum("btclhv,bhtcl->btlhv", out.astype(jnp.float32), share), whole

    return of_tiles((out, lse), walk, size, (1, 2), joined)


def of_tiles(made: tuple[Made, ...], walk: Walk, size: int, axes: tuple[int, ...], join: Callable) -> tuple[Array, ...]:
    """What programs made, of whole tiles: `join` takes `[..., T, C, size, ...]` of T tiles in C parts each."""
    if walk.tile is None:
        return tuple(whole for (whole,) in made)

    def tiled(x: Array, axis: int) -> Array:
        return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])

    wholes, others = ([tiled(x, axis) for x, axis in zip(some, axes, strict=True)] for some in zip(*made, strict=True))
    for tiles, places in long_tiles(walk):
        parts = (
            jnp.concatenate([whole.take(tiles[:, None], axis), other.take(places[:, 1:] - walk.n, axis)], axis + 1)
            for whole, other, axis in zip(wholes, others, axes, strict=True)
        )
        for i, (x, axis) in enumerate(zip(join(*parts), axes, strict=True)):
            at = (slice(None),) * axis + (tiles,)
            x = jax.lax.optimization_barrier(x.astype(wholes[i].dtype))  # fused with what reads them it would copy all
            wholes[i] = wholes[i].at[at].set(x, unique_indices=True, indices_are_sorted=True)
    return tuple(x.reshape(whole.shape) for x, (whole, _) in zip(wholes, made, strict=True))
