"""The kernels of flash attention, each for a tile of queries or of keys; `flash_attention` says what they are given.

The chip's own exponential is that of 2: weights are `2^(unit scores - unit highest)`, one multiply-add for a pair of
tokens, which has the scale in it where what is added to scores can be had in their unit. Letters beside the project's
own: l queries and m keys of a tile.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops.dense_attention import LOW
from model.ops.fused_state import Refs
from model.ops.mask import both
from model.ops.scores import Form
from model.ops.tile_walk import Walk

Array = jax.Array
LOG2_E = math.log2(math.e)
Made = tuple[Any, ...]  # what a program writes to: of whole tiles, and of the further parts of those that are in parts


class Shape(NamedTuple):
    """Of a kernel: tile sizes, warps and stages."""

    l: int
    m: int
    warps: int
    stages: int


def over(see: Refs, spans: Walk, step: Any, start: Any) -> Any:
    """`step(tile, masked, carry)` over the tiles that this program's own tile meets; those seen whole first."""
    a, b, c, d = (see["spans"][i] for i in range(4))
    before, whole, behind = (np.any(first < end) for first, end in pairwise(spans.spans.T))

    def loop(first: Array, end: Array, masked: bool, carry: Any, at: Any = lambda place: place) -> Any:
        def body(place, carry):
            place = at(place)
            return step(see["listed"][place] if "listed" in see else place, masked, carry)

        return lax.fori_loop(first, end, body, carry)

    if "met" in see and "listed" not in see:
        a, d = jnp.maximum(a, see["met"][0]), jnp.minimum(d, see["met"][1])
    if "met" in see and "alone" not in see:
        return loop(a, d, True, start)
    if "alone" in see:
        b = jnp.clip(jnp.maximum(b, see["alone"][0]), a, d)
        c = jnp.clip(jnp.minimum(c, see["alone"][1]), b, d)
        before = True
    if whole:
        start = loop(b, c, False, start)
    if before:  # and behind, in one loop: there is less to compile
        return loop(a, d - c + b, True, start, lambda place: jnp.where(place < b, place, place - b + c))
    return loop(c, d, True, start) if behind else start


class Side(NamedTuple):
    """The tokens of a tile but for their channels, laid out along the rows or the columns of scores."""

    at: Array  # positions
    low: Array  # the first of them
    high: Array  # the last
    place: Array  # in the row
    segment: Array | None
    level: Array | None


def own(see: Refs, size: int) -> tuple[Array, Any]:
    """Where the program's own tile begins in the row, and its tokens."""
    first = see["tile"][...] * size
    return first, pl.ds(first, size)


def opens(see: Refs) -> Array:
    """Whether the program is the first, or the only, that walks its tile."""
    return pl.program_id(0) == see["tile"][...]


def put(made: Made, value: Array, opens: Array, at: tuple = (...,)) -> None:
    """The first of a tile writes in the tile's place, others elsewhere."""
    value = value.astype(made[0].dtype)
    if len(made) == 1:
        made[0][at] = value
        return
    for ref, here in zip(made, (opens, ~opens), strict=True):

        @pl.when(here)
        def _(ref=ref):
            ref[at] = value


def side(see: Refs, name: str, first: Array, size: int, axis: int, head: tuple = (), per: float = LOG2_E) -> Side:
    """Of `size` queries (`name` q) or keys (k) from `first` on; `head`: which one, where a program sees several; `per`:
    the unit of scores, in which levels are."""
    here = pl.ds(first, size)

    def laid(x: Array | None) -> Array | None:
        return None if x is None else (x[:, None] if axis == 0 else x[None, :])

    place = first + lax.iota(jnp.int32, size)
    positions, segments, levels = (see.get(f"{name}_{kind}") for kind in ("positions", "segments", "levels"))
    at, low, high = place, first, first + size - 1
    if positions is not None:
        at = positions[here]
        low, high = jnp.min(at), jnp.max(at)
    return Side(
        at=laid(at),
        low=low,
        high=high,
        place=laid(place),
        segment=laid(None if segments is None else segments[here]),
        level=laid(None if levels is None else levels[*head, here].astype(jnp.float32) * (LOG2_E / per)),
    )


def params(see: Refs, per: float, head: tuple = ()) -> dict[str, Any]:
    """A bias's parameters for one head: numbers, or several numbers each. Of a linear one, in the unit of scores."""

    def of_head(ref) -> Any:
        if len(ref.shape) == len(head):
            return ref[*head] if head else ref[...]
        return tuple(ref[c, *head] for c in range(ref.shape[0]))

    found = {name: of_head(ref) for name, ref in see["bias"].items()} if "bias" in see else {}
    return jax.tree.map(lambda x: x * (LOG2_E / per), found)


def tile_bias(form: Form, bias: dict[str, Any], q: Side, k: Side) -> tuple[Array, Any]:
    """A tile of the bias, and what takes its gradient to the parameters."""
    fn, shape = form.bias, jnp.broadcast_shapes(q.at.shape, k.at.shape)
    # As numbers of tokens, not of pairs: there are fewer to convert. Exact up to 2^24.
    i, j = q.at.astype(jnp.float32), k.at.astype(jnp.float32)

    def every(bias: dict[str, Any]) -> Array:
        return jnp.broadcast_to(fn.score(bias, i, j), shape)

    def one(bias: dict[str, Any]) -> Array:
        return jnp.broadcast_to(fn.score(bias, q.low.astype(jnp.float32), k.low.astype(jnp.float32)), shape)

    def pull(score: Any, d_bias: Array) -> Any:
        return jax.vjp(score, bias)[1](d_bias)[0]

    if fn.settles is None:
        return every(bias), partial(pull, every)
    settled = (q.low - k.high >= fn.settles) | (k.low - q.high >= fn.settles)  # then all pairs are as the first
    value = lax.cond(settled, lambda: one(bias), lambda: every(bias))
    return value, lambda d_bias: lax.cond(settled, partial(pull, one), partial(pull, every), d_bias)


def unit(form: Form) -> float:
    """What `tile_scores` are to be multiplied with, for a power of two: log2(e) if they are the scores themselves.

    A bias that is linear in its parameters has whatever unit these have.
    """
    plain = form.bias is None or form.bias.linear
    plain = plain and form.scale > 0  # below 0 the highest product is not the highest score
    return LOG2_E * (form.soft_cap or form.scale) if plain else LOG2_E


def tile_scores(form: Form, raw: Array, bias: dict[str, Any], q: Side, k: Side) -> tuple[Array, Array, Any]:
    """Scores in their unit, what of them the soft cap has kept within -1 to 1, and the pull of the bias."""
    scores, pull = raw, None
    if form.soft_cap:
        # By the exponential, which the chip has in hardware.
        scores = 1 - 2 / (1 + jnp.exp2(raw * (2 * LOG2_E * form.scale / form.soft_cap)))
    capped = scores
    if unit(form) == LOG2_E:
        scores *= form.soft_cap or form.scale
    if form.bias is not None:
        value, pull = tile_bias(form, bias, q, k)
        scores += value
    if q.level is not None:
        scores -= jnp.abs(q.level - k.level)
    return scores, capped, pull


def tile_seen(form: Form, shape: Shape, q: Side, k: Side, M: int) -> Array:
    mask = form.mask.left(shape.l, shape.m) if form.stretches == 1 else form.mask
    there = k.place < M if q.segment is None else (q.segment == k.segment) & (k.segment > 0)
    return both(mask.sees(q.at, k.at), there)


def out_kernel(see: Refs, out: Made, lse: Made, *, form: Form, shape: Shape, spans: Walk, M: int):
    """Of one head. q: [L, K]; k: [M, K]; v: [M, V]; out: [l, V]; lse: [l]."""
    l, m = shape[:2]
    (first, here), opening, per = own(see, l), opens(see), unit(form)
    q, bias = see["q"][here, :], params(see, per)
    queries = side(see, "q", first, l, axis=0, per=per)

    def add(j, masked, seen):
        top, total, sum_ = seen
        keys = side(see, "k", j * m, m, axis=1, per=per)
        raw = dot(q, see["k"][pl.ds(j * m, m), :], trans_b=True)
        scores, _, _ = tile_scores(form, raw, bias, queries, keys)
        if masked:
            scores = jnp.where(tile_seen(form, shape, queries, keys, M), scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp2(scores * per - (higher * per)[:, None]), jnp.exp2((top - higher) * per)
        v = see["v"][pl.ds(j * m, m), :]
        sum_ = sum_ * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return higher, total * shrink + jnp.sum(weights, axis=1), sum_

    top, total = jnp.full(l, LOW, jnp.float32), jnp.zeros(l, jnp.float32)
    if "sink" in see:  # a key that has been seen already, with a value of 0, by one of a tile's parts
        top = jnp.where(opening, jnp.full(l, 1.0, jnp.float32) * (see["sink"][...] * (LOG2_E / per)), top)
        total = jnp.where(opening, total + 1, total)
    start = top, total, jnp.zeros(out[0].shape, jnp.float32)
    top, total, sum_ = over(see, spans, add, start)
    total = jnp.where(total > 0, total, 1)
    put(out, sum_ / total[:, None], opening)
    put(lse, (top * per + jnp.log2(total)) / LOG2_E, opening)


def score_gradients(form, scores, per, capped, lse, delta, d_weights, seen):
    """Weights, and the gradients of scores and of raw scores but for the scale."""
    weights = jnp.exp2(scores * per - lse)
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    d_scores = weights * (d_weights - delta)
    return weights, d_scores, d_scores * (1 - capped * capped) if form.soft_cap else d_scores


def queries_kernel(see: Refs, dq: Made, *more, form: Form, shape: Shape, spans: Walk, M: int):
    """Of one head. As `out_kernel`, with dy: [L, V]; lse, delta: [L]. `more`: of the queries' levels, of the bias."""
    l, m = shape[:2]
    (first, here), opening, per = own(see, l), opens(see), unit(form)
    q, dy, bias = see["q"][here, :], see["dy"][here, :], params(see, per)
    lse, delta = see["lse"][here][:, None] * LOG2_E, see["delta"][here][:, None]
    queries = side(see, "q", first, l, axis=0, per=per)

    def add(j, masked, carry):
        sum_, d_level, d_bias = carry
        keys = side(see, "k", j * m, m, axis=1, per=per)
        k = see["k"][pl.ds(j * m, m), :]
        scores, capped, pull = tile_scores(form, dot(q, k, trans_b=True), bias, queries, keys)
        seen = tile_seen(form, shape, queries, keys, M) if masked else None
        d_weights = dot(dy, see["v"][pl.ds(j * m, m), :], trans_b=True)
        _, d_scores, d_raw = score_gradients(form, scores, per, capped, lse, delta, d_weights, seen)
        if d_level is not None:
            d_level -= jnp.sum(d_scores * jnp.sign(queries.level - keys.level), axis=1)
        if d_bias:
            d_bias = jax.tree.map(jnp.add, d_bias, pull(d_scores))
        return sum_ + dot(d_raw.astype(k.dtype), k), d_level, d_bias

    d_level = jnp.zeros(l, jnp.float32) if queries.level is not None else None
    start = jnp.zeros(dq[0].shape, jnp.float32), d_level, jax.tree.map(jnp.zeros_like, bias)
    sum_, d_level, d_bias = over(see, spans, add, start)
    put(dq, sum_ * form.scale, opening)
    if d_level is not None:
        put(more[0], d_level, opening)
    for ref, name in zip(more[d_level is not None :], sorted(d_bias), strict=True):
        value = d_bias[name]
        if isinstance(value, tuple):
            for c, one in enumerate(value):
                ref[c] = one
        else:
            ref[...] = value


def keys_kernel(see: Refs, dk: Made, dv: Made, *more, form: Form, shape: Shape, spans: Walk, M: int):
    """Of one key-value head. q: [L, R, K]; dy: [L, R, V]; lse, delta: [R, L]; k: [M, K]; v: [M, V]."""
    l, m = shape[:2]
    (first, here), opening, per = own(see, m), opens(see), unit(form)
    k, v = see["k"][here, :], see["v"][here, :]
    R = see["q"].shape[1]

    def of_head(r, carry):
        bias = params(see, per, head=(r,))
        keys = side(see, "k", first, m, axis=0, head=(r,), per=per)

        def add(i, masked, carry):
            dk_, dv_, d_level = carry
            at = pl.ds(i * l, l)
            q, dy = see["q"][at, r, :], see["dy"][at, r, :]
            queries = side(see, "q", i * l, l, axis=1, head=(r,), per=per)
            scores, capped, _ = tile_scores(form, dot(k, q, trans_b=True), bias, queries, keys)
            seen = tile_seen(form, shape, queries, keys, M) if masked else None
            d_weights = dot(v, dy, trans_b=True)
            lse, delta = see["lse"][r, at][None, :] * LOG2_E, see["delta"][r, at][None, :]
            weights, d_scores, d_raw = score_gradients(form, scores, per, capped, lse, delta, d_weights, seen)
            if d_level is not None:
                d_level += jnp.sum(d_scores * jnp.sign(queries.level - keys.level), axis=1)
            return dk_ + dot(d_raw.astype(q.dtype), q), dv_ + dot(weights.astype(dy.dtype), dy), d_level

        dk_, dv_ = carry
        d_level = jnp.zeros(m, jnp.float32) if keys.level is not None else None
        dk_, dv_, d_level = over(see, spans, add, (dk_, dv_, d_level))
        if d_level is not None:
            put(more[0], d_level, opening, (r, slice(None)))
        return dk_, dv_

    start = jnp.zeros(dk[0].shape, jnp.float32), jnp.zeros(dv[0].shape, jnp.float32)
    dk_, dv_ = of_head(0, start) if R == 1 else lax.fori_loop(0, R, of_head, start)
    put(dk, dk_ * form.scale, opening)
    put(dv, dv_, opening)
