"""One query a row to a filled part of a cache, in kernels for NVIDIA GPUs (https://arxiv.org/abs/2311.01282).

The keys of a row are shared out over programs, each of which has all the heads of a key-value head and leaves an output
of its own, unnormalised; a second kernel adds those up. Nothing is read behind what is filled. Letters beside the
project's own: S parts of the keys, m keys of a tile, r heads of a tile. Scores are in units of log 2.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops.decode_attention import parts_of
from model.ops.dense_attention import LOW
from model.ops.flash_kernels import LOG2_E, Side, side
from model.ops.fused_state import Refs, launch
from model.ops.mask import both
from model.ops.scores import Form, Operands

Array = jax.Array
ROWS = 16  # the fewest that a tensor core multiplies
TILE = {2: 64, 4: 32}  # keys, by the bytes of a number


def part_kernel(see: Refs, out, top, total, *, form: Form, keys: int, m: int, M: int):
    """Of one part of one key-value head's keys. q: [r, K]; k: [M, K]; v: [M, V]; out: [R, V]; top, total: [R]."""
    q, first, filled = see["q"][...], see["first"][...], see["filled"][...]
    at, mine = see["q_positions"][0], see["q_segments"][0] if "q_segments" in see else None
    params = {name: of_heads(ref) for name, ref in see["bias"].items()} if "bias" in see else {}

    def add(j, carry):
        top, total, sum_ = carry
        start = jnp.minimum(j * m, M - m)  # the last tile may begin within the one before it
        k: Side = side(see, "k", start, m, axis=1)
        scores = dot(q, see["k"][pl.ds(start, m), :], trans_b=True) * form.scale
        if form.soft_cap:
            scores = form.soft_cap * (1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2_E / form.soft_cap))))
        if form.bias is not None:
            scores += form.bias.score(params, at.astype(jnp.float32), k.at.astype(jnp.float32))
        there = (k.place >= j * m) & (k.place < filled)
        if mine is not None:
            there &= (k.segment == mine) & (k.segment > 0)
        scores = jnp.where(both(form.mask.sees(at, k.at), there), scores * LOG2_E, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(top - higher)
        v = see["v"][pl.ds(start, m), :]
        sum_ = sum_ * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return higher, total * shrink + jnp.sum(weights, axis=1), sum_

    (R, V), r = out.shape, q.shape[0]
    empty = jnp.full(r, LOW, jnp.float32), jnp.zeros(r, jnp.float32), jnp.zeros((r, V), jnp.float32)
    end = jnp.minimum(filled, jnp.minimum(first + keys, M))
    found = lax.fori_loop(first // m, jnp.maximum(end + m - 1, first) // m, add, empty)
    row = lax.iota(jnp.int32, r)
    for i in range(R):  # only those that are heads: the others are most of the tile, as a rule
        top[i], total[i] = (jnp.sum(jnp.where(row == i, x, 0)) for x in found[:2])
        out[i, :] = jnp.sum(jnp.where((row == i)[:, None], found[2], 0), axis=0)


def of_heads(ref) -> Array | tuple[Array, ...]:
    """A bias's parameters for the heads of a tile, `[r, 1]`, or several of those."""
    if len(ref.shape) == 1:
        return ref[...][:, None]
    return tuple(ref[c, :][:, None] for c in range(ref.shape[0]))


def whole_kernel(see: Refs, out, lse):
    """All parts of one head. parts: [S, V]; tops, totals: [S]; sink: []; out: [V]; lse: []."""
    tops = see["tops"][...]
    top = jnp.max(tops)
    if "sink" in see:
        top = jnp.maximum(top, see["sink"][...] * LOG2_E)
    share = jnp.exp2(tops - top)  # of parts that have seen nothing the total is 0
    total = jnp.sum(see["totals"][...] * share)
    if "sink" in see:
        total += jnp.exp2(see["sink"][...] * LOG2_E - top)
    total = jnp.where(total > 0, total, 1)
    out[...] = (jnp.sum(see["parts"][...] * share[:, None], axis=0) / total).astype(out.dtype)
    lse[...] = (top + jnp.log2(total)) / LOG2_E


def flash_decode(form: Form, o: Operands, interpret: bool = False) -> tuple[Array, Array]:
    """Output `[B, 1, G, R, V]` and log-sum-exp `[B, 1, G, R]`."""
    (B, _, G, R, K), (M, V), m = o.q.shape, o.v.shape[1::2], TILE[o.q.dtype.itemsize]
    r, (S, keys) = max(ROWS, pl.next_power_of_2(R)), parts_of(M, B * G)

    def per_row(x: Array | None) -> tuple[Array | None, pl.BlockSpec | None]:
        if x is None:
            return None, None
        return x, pl.BlockSpec((None, x.shape[1]), lambda s, g, b, one=x.shape[0] == 1: (0 if one else b, 0))

    def tokens(x: Array) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec((None, M, None, x.shape[-1]), lambda s, g, b: (b, 0, g, 0))

    given = dict(
        q=(
            jnp.pad(o.q[:, 0], ((0, 0), (0, 0), (0, r - R), (0, 0))),
            pl.BlockSpec((None, None, r, K), lambda s, g, b: (b, g, 0, 0)),
        ),
        k=tokens(o.k),
        v=tokens(o.v),
        q_positions=per_row(o.q_positions),
        k_positions=per_row(o.k_positions),
        q_segments=per_row(o.q_segments if o.k_segments is not None else None),
        k_segments=per_row(o.k_segments),
        first=(jnp.arange(S, dtype=jnp.int32) * keys, pl.BlockSpec((None,), lambda s, g, b: (s,))),
        filled=(o.k_filled.astype(jnp.int32)[None], pl.BlockSpec((None,), lambda s, g, b: (0,))),
    )
    if form.bias is not None:
        params = {name: x.astype(jnp.float32).reshape(*x.shape[:-1], G, R) for name, x in o.bias.items()}
        params = {name: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, r - R)]) for name, x in params.items()}
        given["bias"] = (params, {name: heads_of(x) for name, x in params.items()})

    def of_part(*shape: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        block = pl.BlockSpec((None, None, None, *shape), lambda s, g, b: (b, g, s, *[0] * len(shape)))
        return jax.ShapeDtypeStruct((B, G, S, *shape), jnp.float32), block

    kernel = partial(part_kernel, form=form, keys=keys, m=m, M=M)
    made = [of_part(R, V), of_part(R), of_part(R)]
    parts, tops, totals = launch(kernel, "decode_parts", (S, G, B), given, made, (4, 3), interpret)
    by_head = pl.BlockSpec((None, None, S, None), lambda h, g, b: (b, g, 0, h))
    given = dict(
        parts=(parts, pl.BlockSpec((None, None, S, None, V), lambda h, g, b: (b, g, 0, h, 0))),
        tops=(tops, by_head),
        totals=(totals, by_head),
        sink=(
            None if o.sinks is None else o.sinks.astype(jnp.float32),
            pl.BlockSpec((None, None), lambda h, g, b: (g, h)),
        ),
    )
    made = [
        (jax.ShapeDtypeStruct((B, G, R, V), o.v.dtype), pl.BlockSpec((None,) * 3 + (V,), lambda h, g, b: (b, g, h, 0))),
        (jax.ShapeDtypeStruct((B, G, R), jnp.float32), pl.BlockSpec((None,) * 3, lambda h, g, b: (b, g, h))),
    ]
    out, lse = launch(whole_kernel, "decode_whole", (R, G, B), given, made, (1, 1), interpret)
    return out[:, None], lse[:, None]


def heads_of(x: Array) -> pl.BlockSpec:
    """Those of a program's key-value head, of `[G, r]` or `[n, G, r]`."""
    return pl.BlockSpec((*x.shape[:-2], None, x.shape[-1]), lambda s, g, b: (*[0] * (x.ndim - 2), g, 0))
