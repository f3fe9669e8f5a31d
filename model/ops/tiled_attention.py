"""Exact softmax attention a tile at a time, in plain XLA: memory grows with L, never with L M.

Forward is the online softmax (https://arxiv.org/abs/1805.02867); backward computes each tile again from the stored
log-sum-exp (https://arxiv.org/abs/2205.14135). Both are one scan over the pairs of a query block and a key block
that can see each other: those that cannot, by position or by document, cost nothing.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model import placement
from model.contract import wide
from model.ops.dense_attention import LOW
from model.ops.mask import FULL, Block
from model.ops.scores import Form, Operands, levels, raw_scores, shape_scores, visible


def tiled(form: Form, o: Operands, block: tuple[int, int] | None = None) -> tuple[jax.Array, jax.Array]:
    """Output `[B, L, G, R, V]` and log-sum-exp `[B, L, G, R]`."""
    L, M = o.q.shape[1], o.k.shape[1]
    rows, columns = block or tile_shape(o)
    l, m = min(rows, L), min(columns, M)
    o = pad(o, -L % l, -M % m)
    pairs = candidates(form, -(-L // l), -(-M // m), l, m)
    if form.stretches == 1 and np.all(of_pairs(form, *pairs.T, l, m).every):  # what is not skipped needs no mask
        form = dataclasses.replace(form, mask=FULL)
    sparse = form.stretches != 1 or o.k_segments is not None
    out, lse = _tiled(form, (l, m), Pairs(pairs, sparse), o)
    return out[:, :L].astype(o.v.dtype), lse[:, :L]


def tile_shape(o: Operands) -> tuple[int, int]:
    """Tiles that fit a CPU's cache; on accelerators, enough work to fill the chip. Many rows and heads take small ones.

    On an H200, n 8,192, with gradient: tiles of 512 took 1.4 times as long, of 2,048 0.9 times in 2.4 times the memory.
    """
    if o.additive is not None:  # a tile holds [l, m, K]
        return 64, 64
    B, _, G, R, _ = o.q.shape
    l, m, scores = (256, 512, 2**21) if placement.platform() == "cpu" else (1024, 1024, 2**25)
    while B * G * R * l * m > scores and l > 64:
        l, m = l // 2, m // 2
    return l, m


class Pairs:
    """Which (query block, key block) pairs a call goes through; hashable, so that it can be static."""

    def __init__(self, pairs: np.ndarray, sparse: bool):
        self.i, self.j, self.sparse = pairs[:, 0], pairs[:, 1], sparse
        self._key = (pairs.tobytes(), sparse)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs) and self._key == other._key


def candidates(form: Form, n: int, n_keys: int, l: int, m: int) -> np.ndarray:
    """The block pairs `[n, 2]`, int32, that may hold a visible pair of tokens, as far as is known when traced."""
    i, j = np.mgrid[:n, :n_keys].astype(np.int32)
    if form.stretches == 1:
        keep = np.broadcast_to(of_pairs(form, i, j, l, m).some, i.shape)
        i, j = i[keep], j[keep]
    return np.stack([i.ravel(), j.ravel()], axis=1)


def of_pairs(form: Form, i: np.ndarray, j: np.ndarray, l: int, m: int) -> Block:
    """What is known of block i of the queries and block j of the keys, at positions 0, 1, 2, ..."""
    return form.mask.block(i * l, i * l + l - 1, j * m, j * m + m - 1)


def pad(o: Operands, queries: int, keys: int) -> Operands:
    """Whole blocks; keys that fill the last one belong to no document."""
    if not queries and not keys:
        return o
    q_segments, k_segments = o.q_segments, o.k_segments
    if keys and k_segments is None:
        q_segments = jnp.ones((1, o.q.shape[1]), jnp.int32)
        k_segments = jnp.ones((1, o.k.shape[1]), jnp.int32)

    def longer(x: jax.Array | None, n: int, mode: str = "constant") -> jax.Array | None:
        return None if x is None else jnp.pad(x, [(0, 0), (0, n)] + [(0, 0)] * (x.ndim - 2), mode=mode)

    return o.replace(
        q=longer(o.q, queries),
        k=longer(o.k, keys),
        v=longer(o.v, keys),
        q_positions=longer(o.q_positions, queries, "edge"),
        k_positions=longer(o.k_positions, keys, "edge"),
        q_segments=longer(q_segments, queries),
        k_segments=longer(k_segments, keys),
        q_levels=longer(o.q_levels, queries),
        k_levels=longer(o.k_levels, keys),
    )


def split_length(x: jax.Array | None, size: int) -> jax.Array | None:
    """`[B, n * size, ...]` to `[n, B, size, ...]`."""
    return None if x is None else jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def unblocks(x: jax.Array) -> jax.Array:
    """`[n, B, size, ...]` to `[B, n * size, ...]`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def in_tiles(o: Operands, tile: tuple[int, int]) -> Operands:
    """Every array with its blocks in front."""
    l, m = tile
    return o.replace(
        q=split_length(o.q, l),
        k=split_length(o.k, m),
        v=split_length(o.v, m),
        q_positions=split_length(o.q_positions, l),
        k_positions=split_length(o.k_positions, m),
        q_segments=split_length(o.q_segments, l),
        k_segments=split_length(o.k_segments, m),
        q_levels=split_length(o.q_levels, l),
        k_levels=split_length(o.k_levels, m),
    )


def at(o: Operands, i: jax.Array, j: jax.Array) -> Operands:
    """Block i of the queries and block j of the keys."""
    return o.replace(
        q=o.q[i],
        k=o.k[j],
        v=o.v[j],
        q_positions=o.q_positions[i],
        k_positions=o.k_positions[j],
        q_segments=None if o.q_segments is None else o.q_segments[i],
        k_segments=None if o.k_segments is None else o.k_segments[j],
        q_levels=None if o.q_levels is None else o.q_levels[i],
        k_levels=None if o.k_levels is None else o.k_levels[j],
    )


def after(x: jax.Array, i: jax.Array, j: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A pair of blocks, and whether it is wanted, known no sooner than x.

    Masks follow from pairs and positions, which no layer changes, and JAX takes what is the same in every round out of
    a loop over layers: the masks of all tiles would be made before it, and be held together, L M of them. No block is
    below zero, so nothing changes; but that is not known to XLA. (Not an optimization_barrier: XLA's evaluator of
    constants has none, and a GPU's compiler asks it for the indices of slices.)
    """
    below = jnp.minimum(x[(0,) * x.ndim].astype(jnp.int32), 0)
    return jnp.maximum(i, below), jnp.maximum(j, below), want & (below <= 0)


def needed(form: Form, c: Operands, pairs: Pairs) -> jax.Array:
    """Whether any row of the batch may have a visible pair of tokens in each pair of blocks, by the extents of both."""

    def extents(positions: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, ...]:
        """First and last position and document of each block and row, padding left out, `[n, B or 1]` each."""
        segments = jnp.ones_like(positions) if segments is None else segments
        positions, segments = jnp.broadcast_arrays(positions, segments)
        real, far = segments > 0, jnp.iinfo(jnp.int32).max
        ends = [(jnp.where(real, x, far).min(-1), jnp.where(real, x, -1).max(-1)) for x in (positions, segments)]
        return *ends[0], *ends[1]

    q_low, q_high, q_first, q_last = (x[pairs.i] for x in extents(c.q_positions, c.q_segments))
    k_low, k_high, k_first, k_last = (x[pairs.j] for x in extents(c.k_positions, c.k_segments))
    same = (q_last >= k_first) & (k_last >= q_first)
    return jnp.any(form.mask.block(q_low, q_high, k_low, k_high).some & same, axis=-1)


def tile_mask(form: Form, t: Operands) -> jax.Array | None:
    mask = visible(form, t.q_positions, t.k_positions, t.q_segments, t.k_segments)
    return None if mask is None else mask[:, None, None]


Seen = tuple[jax.Array, jax.Array, jax.Array]  # highest score, sum of the weights [B, G, R, l], and of values


def add_tile(
    form: Form, t: Operands, mask: jax.Array | None, top: jax.Array, total: jax.Array, sum_: jax.Array
) -> Seen:
    """What queries have seen, and the keys of one more tile."""
    raw = raw_scores(t.q, t.k, t.additive)
    scores = shape_scores(form, raw, t.bias, t.q_positions, t.k_positions, levels(t))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    higher = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - higher[..., None])
    shrink = jnp.exp(top - higher)
    seen = jnp.einsum("bgrlm,bmgv->bgrlv", weights.astype(t.v.dtype), t.v, preferred_element_type=sum_.dtype)
    return higher, total * shrink + jnp.sum(weights, axis=-1), sum_ * shrink[..., None] + seen


def pull_tile(
    form: Form, t: Operands, mask: jax.Array | None, lse: jax.Array, delta: jax.Array, d_out: jax.Array
) -> tuple[tuple, tuple, tuple]:
    """A tile's gradients: by queries and their levels; by keys, values and their levels; by what all tiles share."""
    dtype = wide(t.q.dtype)
    raw, pull_raw = scores_with_pull(t)
    scores, pull = jax.vjp(
        lambda raw, bias, levels: shape_scores(form, raw, bias, t.q_positions, t.k_positions, levels),
        raw,
        t.bias,
        levels(t),
    )
    weights = jnp.exp(scores - lse[..., None])
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    d_seen = over_queries(weights.astype(t.v.dtype), d_out, dtype)
    d_weights = jnp.einsum("bgrlv,bmgv->bgrlm", d_out, t.v, preferred_element_type=dtype)
    d_raw, d_bias, d_levels = pull(weights * (d_weights - delta[..., None]))
    d_query, d_key, d_additive = pull_raw(d_raw)
    q_level, k_level = d_levels or (None, None)
    return (d_query, q_level), (d_key, jnp.moveaxis(d_seen, 1, 2), k_level), (d_bias, d_additive)


def over_queries(weights: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """`[B, G, m, K]`: what queries have, `[B, G, R, l, K]`, added up by weights `[B, G, R, l, m]`."""
    if not placement.one_cpu():
        return jnp.einsum("bgrlm,bgrlk->bgmk", weights, x, preferred_element_type=dtype)
    # As a sum over one axis: of two, its compiler writes the weights anew, transposed, a number at a time.
    weights, x = (array.reshape(*array.shape[:2], -1, array.shape[-1]) for array in (weights, x))
    return jnp.einsum("bglm,bglk->bgmk", weights, x, preferred_element_type=dtype)


def when(sparse: bool, wanted: jax.Array, function, *operands):
    """`function(*operands)` where wanted, else the operands as they are; they are small, so passing them is cheap."""
    if not sparse:
        return function(*operands)
    return lax.cond(wanted, function, lambda *same: same, *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tiled(form: Form, tile: tuple[int, int], pairs: Pairs, o: Operands) -> tuple[jax.Array, jax.Array]:
    return forward(form, tile, pairs, o)[0]


def forward(form: Form, tile: tuple[int, int], pairs: Pairs, o: Operands):
    B, L, G, R, _ = o.q.shape
    dtype, n, l = wide(o.q.dtype), L // tile[0], tile[0]
    c = in_tiles(o, tile)
    wanted = needed(form, c, pairs) if pairs.sparse else jnp.ones(len(pairs.i), bool)

    def step(carry, pair):
        i, j, want = after(c.q, *pair)
        t = at(c, i, j)

        def see(*seen):
            return add_tile(form, t, tile_mask(form, t), *seen)

        new = when(pairs.sparse, want, see, *(x[i] for x in carry))
        return tuple(lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(carry, new, strict=True)), None

    # A sink is a key that has been seen already, with a value of 0.
    top = jnp.full((n, B, G, R, l), LOW, dtype)
    total = jnp.zeros((n, B, G, R, l), dtype)
    if o.sinks is not None:
        top, total = top.at[:].set(o.sinks[..., None].astype(dtype)), total + 1
    start = (top, total, jnp.zeros((n, B, G, R, l, o.v.shape[-1]), dtype))
    (top, total, sum_), _ = lax.scan(step, start, (pairs.i, pairs.j, wanted))
    total = jnp.where(total > 0, total, 1)
    out = unblocks(jnp.moveaxis(sum_ / total[..., None], 4, 2))
    lse = unblocks(jnp.moveaxis(top + jnp.log(total), 4, 2))
    return (out, lse), (o, out, lse)


def backward(form: Form, tile: tuple[int, int], pairs: Pairs, kept, grads):
    wide_ones = gradients(form, tile, pairs, kept, grads)
    return (jax.tree.map(lambda grad, x: grad.astype(x.dtype), wide_ones, learned(kept[0])),)


def gradients(form: Form, tile: tuple[int, int], pairs: Pairs, kept, grads) -> Operands:
    """Gradients by all that is learned, in the wide dtype."""
    o, out, lse = kept
    d_out, d_lse = grads
    dtype = wide(o.q.dtype)
    c = in_tiles(o, tile)
    wanted = needed(form, c, pairs) if pairs.sparse else jnp.ones(len(pairs.i), bool)
    delta = jnp.sum(d_out * out, axis=-1) - d_lse  # [B, L, G, R]

    def by_head(x):  # [n, B, l, G, R, ...] -> [n, B, G, R, l, ...]
        return jnp.moveaxis(split_length(x, tile[0]), 2, 4)

    d_outs, lses, deltas = by_head(d_out.astype(o.v.dtype)), by_head(lse), by_head(delta)

    def step(carry, pair):
        by_query, by_key, d_shared = carry
        i, j, want = after(c.q, *pair)
        t = at(c, i, j)

        def see(by_query, by_key, d_shared):
            more = pull_tile(form, t, tile_mask(form, t), lses[i], deltas[i], d_outs[i])
            return jax.tree.map(jnp.add, (by_query, by_key, d_shared), more)

        there = partial(jax.tree.map, lambda x, block: x[block])
        places = jax.tree.map(lambda _: i, by_query), jax.tree.map(lambda _: j, by_key)
        old = there((by_query, by_key), places)
        *new, d_shared = when(pairs.sparse, want, see, *old, d_shared)
        arrays = jax.tree.map(
            lambda x, y, block: lax.dynamic_update_index_in_dim(x, y, block, 0), (by_query, by_key), tuple(new), places
        )
        return (*arrays, d_shared), None

    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, dtype))
    start = zeros((c.q, c.q_levels)), zeros((c.k, c.v, c.k_levels)), jax.tree.map(jnp.zeros_like, (o.bias, o.additive))
    (by_query, by_key, (d_bias, d_additive)), _ = lax.scan(step, start, (pairs.i, pairs.j, wanted))
    (d_q, q_levels), (d_k, d_v, k_levels) = jax.tree.map(unblocks, (by_query, by_key))
    return learned(o).replace(
        q=d_q,
        k=d_k,
        v=d_v,
        bias=d_bias,
        sinks=pull_of_sinks(o, out, lse, grads),
        additive=d_additive,
        q_levels=q_levels,
        k_levels=k_levels,
    )


def pull_of_sinks(o: Operands, out: jax.Array, lse: jax.Array, grads) -> jax.Array | None:
    if o.sinks is None:
        return None
    d_out, d_lse = grads
    return -jnp.sum(jnp.exp(o.sinks - lse) * (jnp.sum(d_out * out, axis=-1) - d_lse), axis=(0, 1))


def learned(o: Operands) -> Operands:
    """The operands that have a gradient."""
    return o.replace(q_positions=None, k_positions=None, q_segments=None, k_segments=None)


def scores_with_pull(t: Operands):
    """Raw scores of a tile, and what takes their gradient to queries, keys and additive weights."""
    dtype = wide(t.q.dtype)
    raw = raw_scores(t.q, t.k, t.additive)
    if t.additive is not None:
        _, pull = jax.vjp(raw_scores, t.q.astype(dtype), t.k.astype(dtype), t.additive)
        return raw, pull

    def pull_dot(d_raw):  # by hand: the products stay in the narrow dtype, which is where accelerators are fast
        d_raw = d_raw.astype(t.q.dtype)
        d_q = jnp.einsum("bgrlm,bmgk->bgrlk", d_raw, t.k, preferred_element_type=dtype)
        d_k = over_queries(d_raw, jnp.moveaxis(t.q, 1, 3), dtype)
        return jnp.moveaxis(d_q, 3, 1), jnp.moveaxis(d_k, 2, 1), None

    return raw, pull_dot


_tiled.defvjp(forward, backward)
