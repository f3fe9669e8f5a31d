"""Exact softmax attention to listed blocks of keys: what a sparse pattern does not show is not computed.

Every block of queries has a static list of the blocks of keys of which it sees some. Step s of a scan takes the s-th
block of all lists, for all query blocks at once, by the online softmax; backward the same steps are taken again from
the log-sum-exp. So work is that of the lists, and memory grows with the length. Lists are filled up to equal sizes;
those that are much longer than others (of tokens that see everything) have a scan of their own.

What a list has is known when traced where positions are 0, 1, 2, ... In packed rows without gaps inside documents a
mask of bounded reach is known too, by distance alone. Any other call (caches; packed rows and a mask of any reach) is
left to `tiled`, which finds out at run time which tiles to skip.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model import placement
from model.contract import wide
from model.ops import tiled_attention as tiles
from model.ops.dense_attention import LOW
from model.ops.mask import Band, Mask, block_matrix
from model.ops.scores import Form, Operands

BY_QUERY = ("q", "q_positions", "q_segments", "q_levels")
BY_KEY = ("k", "v", "k_positions", "k_segments", "k_levels")


class Lists:
    """Of some query blocks `rows` [n], the key blocks that each sees, `keys` [n, J], -1 where a list has ended."""

    def __init__(self, rows: np.ndarray, keys: np.ndarray):
        self.rows, self.keys = rows, keys
        self._key = (rows.tobytes(), keys.shape, keys.tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lists) and self._key == other._key


def blocks(form: Form, o: Operands) -> tuple[jax.Array, jax.Array]:
    """Output `[B, L, G, R, V]` and log-sum-exp `[B, L, G, R]`."""
    if (mask := known(form)) is None:
        return tiles.tiled(form, o)
    L, M = o.q.shape[1], o.k.shape[1]
    size = tile_size(form.mask)
    l, m = min(size, L), min(size, M)
    matrix = block_matrix(mask, -(-L // l), -(-M // m), l, m)
    if form.stretches:
        form = dataclasses.replace(form, mask=form.mask.left(l, m))
    o = tiles.pad(o, -L % l, -M % m)
    c = tiles.in_tiles(o, (l, m)).replace(sinks=None)
    found = [(part.rows, attend(form, part, c)) for part in in_parts(matrix)]
    order = np.argsort(np.concatenate([rows for rows, _ in found]))
    out, lse = (together([part[i] for _, part in found], order) for i in range(2))
    if o.sinks is not None:  # a key with a value of 0
        more = jnp.logaddexp(lse, o.sinks)
        out, lse = out * jnp.exp(lse - more)[..., None], more
    return out[:, :L].astype(o.v.dtype), lse[:, :L]


def known(form: Form) -> Mask | None:
    """A mask over places in the row that shows all that is seen, for the lists; None: known only at run time."""
    if form.stretches == 1:
        return form.mask
    back, ahead = form.mask.reach()
    return Band(back, ahead) if form.gapless and None not in (back, ahead) else None


MOST = 128  # places of a tile


def tile_size(mask: Mask) -> int:
    """The mask's own blocks or, of larger ones, an equal part; of no blocks, what is enough for a matrix product."""
    grain = mask.grain()
    if grain is None:
        return 64 if placement.platform() == "cpu" else MOST
    parts = (grain // n for n in range(1, grain // 32 + 1) if grain % n == 0 and grain // n <= MOST)
    return grain if grain <= MOST else next(parts, grain)


LEAST = 0.1  # of all work, which another scan must save


def in_parts(matrix: np.ndarray) -> list[Lists]:
    """The lists of a block matrix, in parts of about equal length: in each, lists are filled up to the longest."""
    counts = matrix.sum(1)
    order = np.argsort(~matrix, axis=1, kind="stable").astype(np.int32)
    listed = np.where(np.arange(matrix.shape[1]) < counts[:, None], order, -1)
    sizes, of_size = np.unique(np.maximum(counts, 1), return_counts=True)

    def work(ends: list[int]) -> int:
        """Where parts end with the sizes at these places."""
        parts = zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True)
        return sum(int(of_size[first : end + 1].sum() * sizes[end]) for first, end in parts)

    ends = [len(sizes) - 1]
    while others := [sorted([*ends, end]) for end in range(len(sizes)) if end not in ends]:
        best = min(others, key=work)
        if work(best) > (1 - LEAST) * work(ends):
            break
        ends = best
    part = np.searchsorted(sizes[ends], counts)
    rows = [np.flatnonzero(part == i).astype(np.int32) for i in range(len(ends))]
    return [Lists(own, listed[own, : sizes[end]]) for own, end in zip(rows, ends, strict=True)]


def together(parts: list[jax.Array], order: np.ndarray) -> jax.Array:
    """Parts `[n, B, G, R, l, ...]` in the order of the row, `[B, L, G, R, ...]`."""
    x = jnp.concatenate(parts)[order] if len(parts) > 1 else parts[0]
    return tiles.unblocks(jnp.moveaxis(x, 4, 2))


def attend(form: Form, lists: Lists, c: Operands) -> tuple[jax.Array, jax.Array]:
    """Output `[n, B, G, R, l, V]` and log-sum-exp `[n, B, G, R, l]` of the query blocks that these lists are of."""
    if len(lists.rows) < c.q.shape[0]:
        c = c.replace(**{name: x[lists.rows] for name, x in given(c, BY_QUERY).items()})
    return _attend(form, lists, c)


def given(c: Operands, names: tuple[str, ...]) -> dict[str, jax.Array]:
    return {name: x for name in names if (x := getattr(c, name)) is not None}


def at_each(form: Form, c: Operands, run, *by_block: jax.Array):
    """A function of the s-th blocks `[n]` of the lists: `run(t, mask, *more)` for every query block and that of its
    keys, side by side."""

    def step(listed: jax.Array, *more):
        def one(queries, keys, there, *arrays):
            t = c.replace(**queries, **keys)
            mask = tiles.tile_mask(form, t)
            return run(t, there if mask is None else there & mask, *arrays)

        keys = {name: x[jnp.maximum(listed, 0)] for name, x in given(c, BY_KEY).items()}
        return jax.vmap(one)(given(c, BY_QUERY), keys, listed >= 0, *by_block, *more)

    return step


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(form: Form, lists: Lists, c: Operands) -> tuple[jax.Array, jax.Array]:
    return forward(form, lists, c)[0]


def forward(form: Form, lists: Lists, c: Operands):
    n, B, l, G, R, _ = c.q.shape
    dtype = wide(c.q.dtype)
    add = at_each(form, c, partial(tiles.add_tile, form))
    start = (
        jnp.full((n, B, G, R, l), LOW, dtype),
        jnp.zeros((n, B, G, R, l), dtype),
        jnp.zeros((n, B, G, R, l, c.v.shape[-1]), dtype),
    )
    (top, total, sum_), _ = lax.scan(lambda seen, listed: (add(listed, *seen), None), start, lists.keys.T)
    total = jnp.where(total > 0, total, 1)
    out, lse = sum_ / total[..., None], top + jnp.log(total)
    return (out, lse), (c, out, lse)


def backward(form: Form, lists: Lists, kept, grads):
    c, out, lse = kept
    d_out, d_lse = grads
    dtype = wide(c.q.dtype)
    delta = jnp.sum(d_out * out, axis=-1) - d_lse
    pull = at_each(form, c, partial(tiles.pull_tile, form), lse, delta, d_out.astype(c.v.dtype))

    def step(carry, listed):
        by_query, by_key, shared = carry
        more_queries, more_keys, more_shared = pull(listed)
        by_key = jax.tree.map(lambda x, y: x.at[jnp.maximum(listed, 0)].add(y), by_key, more_keys)
        shared = jax.tree.map(lambda x, y: x + jnp.sum(y, axis=0), shared, more_shared)
        return (jax.tree.map(jnp.add, by_query, more_queries), by_key, shared), None

    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, dtype))
    start = zeros((c.q, c.q_levels)), zeros((c.k, c.v, c.k_levels)), jax.tree.map(jnp.zeros_like, (c.bias, c.additive))
    ((d_q, q_levels), (d_k, d_v, k_levels), (d_bias, d_additive)), _ = lax.scan(step, start, lists.keys.T)
    learned = tiles.learned(c)
    wide_ones = learned.replace(
        q=d_q, k=d_k, v=d_v, bias=d_bias, additive=d_additive, q_levels=q_levels, k_levels=k_levels
    )
    return (jax.tree.map(lambda grad, x: grad.astype(x.dtype), wide_ones, learned),)


_attend.defvjp(forward, backward)
