"""Attention to chosen blocks in kernels for NVIDIA GPUs: a block is read once for many of the queries that chose it.

A pair is a query and one block that it chose. Pairs are sorted by block, as tokens are by expert in a mixture of
experts. `chosen_out` gives each pair of a tile an output of its own, with the log of the sum of its weights, by which a
query's pairs are added up; `chosen_queries` does the same for their gradient. `chosen_keys` goes through a chunk of the
list and adds up what each block in it gets; where a block's pairs go on into the next chunk, that keeps its part apart,
and `chosen_joined` adds those up, in one order. The number of programs is that of tiles and chunks, whatever is chosen.
Letters beside the project's own: n blocks a query, P pairs, T pairs of a tile, S of a chunk, C chunks, m keys that a
program has at a time. Scores are in units of log 2.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.pallas.triton import dot

from model.ops.chosen import Form, Learned, Places
from model.ops.dense_attention import LOW
from model.ops.flash_kernels import LOG2_E
from model.ops.fused_state import Refs, launch

Array = jax.Array
ROWS = {2: 64, 4: 32}  # of a tile, and keys at a time, by the bytes of a number
TILES = 16  # of a chunk, or more where blocks are long


class Call(NamedTuple):
    """What is known of a call when it is traced."""

    P: int  # pairs
    n: int  # of a query
    R: int  # heads that share a query's choice
    size: int  # of a block
    end: int  # keys of all rows and groups: the first of no block
    scale: float
    rows: int  # of a tile, one for each head of a pair
    m: int

    @property
    def heads(self) -> int:
        """Rows that a pair takes."""
        return pl.next_power_of_2(self.R)

    @property
    def T(self) -> int:
        return self.rows // self.heads

    @property
    def S(self) -> int:
        return max(TILES * self.T, 2 * self.size)

    @property
    def C(self) -> int:
        return pl.cdiv(self.P, self.S)


class Sorted(NamedTuple):
    """The list of pairs, and behind them some that are none."""

    first: Array  # [C S + T] the first key of their blocks, among those of all rows and groups
    pair: Array  # [C S + T] which they are, of all as they lie; P: none
    reach: Array  # [P] how far beyond its block's first key each sees, as they lie


def call_of(form: Form, q: Array, k: Array, n: int) -> Call:
    (B, L, G, R, _), M, rows = q.shape, k.shape[1], ROWS[q.dtype.itemsize]
    most, m = max(rows, pl.next_power_of_2(R)), min(rows, form.size)
    return Call(B * L * G * n, n, R, form.size, B * G * (M + form.size), form.scale, most, m)


def sorted_pairs(call: Call, chosen: Array, index: Array) -> Sorted:
    """chosen: [B, L, G, n]; index: [B, L]."""
    B, _, G, _ = chosen.shape
    row = jnp.arange(B * G, dtype=jnp.int32).reshape(B, 1, G, 1) * (call.end // (B * G))
    first = jnp.where(chosen >= 0, chosen + row, call.end).reshape(-1)
    # One list, of all rows and groups.
    first, pair = lax.sort((first, jnp.arange(call.P, dtype=jnp.int32)), num_keys=1, is_stable=True)
    more = (0, call.C * call.S + call.T - call.P)
    first, pair = (jnp.pad(x, more, constant_values=none) for x, none in ((first, call.end), (pair, call.P)))
    return Sorted(first, pair, (index[:, :, None, None] - chosen).reshape(-1))


def blocks_in(call: Call, first: Array, size: int) -> Array:
    """How many blocks there are in every `size` pairs of the list."""
    parts = first[: call.C * call.S].reshape(-1, size)
    new = jnp.pad(parts[:, 1:] != parts[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    return jnp.sum(new & (parts < call.end), axis=1, dtype=jnp.int32)


class Rows(NamedTuple):
    """The heads of a tile's pairs."""

    place: Array  # in the list
    first: Array
    reach: Array
    query: Array  # which of all queries' heads
    there: Array
    own: Array  # where what is the pair's own lies; behind all others where it is none


def rows_of(see: Refs, at: Array, call: Call) -> Rows:
    """Of the T pairs from a place of the list on."""
    row = lax.iota(jnp.int32, call.rows)
    place, head = at + lax.div(row, jnp.int32(call.heads)), lax.rem(row, jnp.int32(call.heads))
    pair = see["pair"][place]
    there = (pair < call.P) & (head < call.R)
    own = jnp.where(there, pair * call.R + head, call.P * call.R + row)
    pair, head = jnp.minimum(pair, call.P - 1), jnp.minimum(head, call.R - 1)
    query = lax.div(pair, jnp.int32(call.n)) * call.R + head
    return Rows(place, see["first"][place], see["reach"][pair], query, there, own)


def over_blocks(see: Refs, rows: Rows, call: Call, step: Any, start: Any) -> Any:
    """`step(keys, seen, carry)` over the keys of all blocks in a tile, m at a time.

    A row sees those of one block alone, so that all of them share a carry.
    """

    def of_block(_, carry):
        first, carry = carry

        def of_part(i, carry):
            ahead = i * call.m + lax.iota(jnp.int32, call.m)
            seen = (rows.first == first)[:, None] & (ahead[None, :] <= rows.reach[:, None])
            return step(pl.ds(first + i * call.m, call.m), seen, carry)

        carry = lax.fori_loop(0, call.size // call.m, of_part, carry)
        return jnp.min(jnp.where(rows.first > first, rows.first, call.end)), carry

    return lax.fori_loop(0, see["blocks"][...], of_block, (jnp.min(rows.first), start))[1]


def out_kernel(see: Refs, out, lse, *, call: Call):
    """q: [L R, K]; k: [M, K]; v: [M, V], of all rows and groups; out: [P R + rows, V]; lse: [P R + rows]."""
    rows = rows_of(see, pl.program_id(0) * call.T, call)
    q = see["q"][rows.query, :]

    def add(keys, seen, carry):
        top, total, sum_ = carry
        scores = dot(q, see["k"][keys, :], trans_b=True) * (call.scale * LOG2_E)
        scores = jnp.where(seen, scores, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(top - higher)
        v = see["v"][keys, :]
        sum_ = sum_ * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return higher, total * shrink + jnp.sum(weights, axis=1), sum_

    empty = jnp.full(call.rows, LOW, jnp.float32), jnp.zeros(call.rows, jnp.float32)
    start = *empty, jnp.zeros((call.rows, out.shape[-1]), jnp.float32)
    top, total, sum_ = over_blocks(see, rows, call, add, start)
    total = jnp.where(total > 0, total, 1)
    out[rows.own, :] = (sum_ / total[:, None]).astype(out.dtype)
    lse[rows.own] = (top + jnp.log2(total)) / LOG2_E


def queries_kernel(see: Refs, dq, *, call: Call):
    """As above, with dy: [L R, V]; lse, delta: [L R], of a query's pairs together; dq: [P R + rows, K]."""
    rows = rows_of(see, pl.program_id(0) * call.T, call)
    q, dy = see["q"][rows.query, :], see["dy"][rows.query, :]
    lse, delta = see["lse"][rows.query][:, None], see["delta"][rows.query][:, None]

    def add(keys, seen, sum_):
        k = see["k"][keys, :]
        weights = weights_of(dot(q, k, trans_b=True), lse, seen, call)
        d_scores = weights * (dot(dy, see["v"][keys, :], trans_b=True) - delta) * call.scale
        return sum_ + dot(d_scores.astype(k.dtype), k)

    sum_ = over_blocks(see, rows, call, add, jnp.zeros((call.rows, dq.shape[-1]), jnp.float32))
    dq[rows.own, :] = sum_.astype(dq.dtype)


def weights_of(scores: Array, lse: Array, seen: Array, call: Call) -> Array:
    return jnp.where(seen, jnp.exp2(scores * (call.scale * LOG2_E) - lse * LOG2_E), 0)


def keys_kernel(see: Refs, dk, dv, more_k, more_v, *, call: Call):
    """What m keys of every block in a chunk get, onto zeros; of a block that has begun before it, in `more`: [m, K]."""
    chunk, part = pl.program_id(0), pl.program_id(1) * call.m
    listed = see["first"][pl.ds(chunk * call.S, call.S)]
    ahead = part + lax.iota(jnp.int32, call.m)[:, None]

    def of_block(b, carry):
        first, at = carry
        end = at + jnp.sum((listed == first).astype(jnp.int32), dtype=jnp.int32)
        keys = pl.ds(first + part, call.m)
        k, v = see["k"][keys, :], see["v"][keys, :]

        def add(t, carry):
            dk_, dv_ = carry
            rows = rows_of(see, at + t * call.T, call)
            seen = (rows.there & (rows.place < end))[None, :] & (ahead <= rows.reach[None, :])
            q, dy = see["q"][rows.query, :], see["dy"][rows.query, :]
            weights = weights_of(dot(k, q, trans_b=True), see["lse"][rows.query][None, :], seen, call)
            delta = see["delta"][rows.query][None, :]
            d_scores = weights * (dot(v, dy, trans_b=True) - delta) * call.scale
            return dk_ + dot(d_scores.astype(q.dtype), q), dv_ + dot(weights.astype(dy.dtype), dy)

        start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        sums = lax.fori_loop(0, lax.div(end - at + call.T - 1, jnp.int32(call.T)), add, start)
        apart = (b == 0) & (see["goes_on"][...] > 0)
        for sum_, ref, more in zip(sums, (dk, dv), (more_k, more_v), strict=True):
            # A block that is not whole has others' keys behind it, to which it gives nothing.
            triton.store(ref.at[keys, :], sum_, mask=(sum_ != 0) & ~apart)
            triton.store(more.at[:, :], sum_, mask=jnp.broadcast_to(apart, sum_.shape))
        return jnp.min(jnp.where(listed > first, listed, call.end)), end

    lax.fori_loop(0, see["blocks"][...], of_block, (jnp.min(listed), chunk * call.S))


def joined_kernel(see: Refs, dk, dv, *, call: Call):
    """Adds to m keys of a block what chunks after its first had apart; more: [C, size, K]; slots: [], how many."""
    chunk, part = pl.program_id(0), pl.program_id(1) * call.m
    keys = pl.ds(jnp.minimum(see["first"][chunk * call.S], call.end - call.size) + part, call.m)
    for ref, more in ((dk, see["more_k"]), (dv, see["more_v"])):

        def add(i, sum_, more=more):
            return sum_ + more[chunk + i, pl.ds(part, call.m), :]

        start = jnp.zeros((call.m, ref.shape[-1]), jnp.float32)
        sum_ = lax.fori_loop(0, see["slots"][...], add, start)
        triton.store(ref.at[keys, :], ref[keys, :] + sum_, mask=sum_ != 0)


def whole(x: Array) -> tuple[Array, pl.BlockSpec]:
    """For every program to look into."""
    return x, pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def one(x: Array) -> tuple[Array, pl.BlockSpec]:
    """Of `[programs]`, or of chunks."""
    return x, pl.BlockSpec((None,), lambda i, *_: (i,))


def made_whole(*shape: int, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    return jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def warps(*xs: Array) -> tuple[int, int]:
    """And stages."""
    return (8 if max(x.shape[-1] for x in xs) > 64 else 4), 1


def flat(x: Array) -> Array:
    """`[..., K]` as `[rows, K]`."""
    return x.reshape(-1, x.shape[-1])


def heads_first(x: Array, size: int) -> Array:
    """`[B, M, G, K]` as `[B G (M + size), K]`: the last block may not be whole."""
    return flat(jnp.moveaxis(jnp.pad(x, [(0, 0), (0, size), (0, 0), (0, 0)]), 1, 2))


def heads_last(x: Array, like: Array) -> Array:
    """The reverse of it."""
    B, M, G, K = like.shape
    return jnp.moveaxis(x.reshape(B, G, -1, K)[:, :, :M], 1, 2).astype(like.dtype)


def by_pair(call: Call, x: Array, shape: tuple[int, ...]) -> Array:
    """What kernels made for pairs as `[B, L, G, n, R, K]`; shape: that of queries."""
    return x[: call.P * call.R].reshape(*shape[:3], call.n, call.R, x.shape[-1])


def given_of(call: Call, pairs: Sorted, q: Array, k: Array, v: Array) -> dict[str, Any]:
    """What all kernels look into, but for what is a program's own."""
    given = {name: whole(x) for name, x in pairs._asdict().items()}
    return given | dict(q=whole(flat(q)), k=whole(heads_first(k, call.size)), v=whole(heads_first(v, call.size)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused(form: Form, interpret: bool, q: Array, k: Array, v: Array, chosen: Array, index: Array) -> Array:
    return fused_forward(form, interpret, q, k, v, chosen, index)[0]


def fused_forward(form, interpret, q, k, v, chosen, index):
    call = call_of(form, q, k, chosen.shape[-1])
    pairs = sorted_pairs(call, chosen, index)
    lengths = call.P * call.R + call.rows, v.shape[-1]
    made = [made_whole(*lengths, dtype=v.dtype), made_whole(lengths[0])]
    given = given_of(call, pairs, q, k, v) | dict(blocks=one(blocks_in(call, pairs.first, call.T)))
    grid, run = (pl.cdiv(call.P, call.T),), partial(out_kernel, call=call)
    out, lse = launch(run, "chosen_out", grid, given, made, warps(k, v), interpret)
    out, lse = by_pair(call, out, q.shape), by_pair(call, lse[:, None], q.shape)
    top = jnp.max(lse, axis=3, keepdims=True)
    share = jnp.exp(lse - top)
    total = jnp.sum(share, axis=3)
    y = (jnp.sum(share * out, axis=3) / total).astype(v.dtype)
    return y, (q, k, v, pairs, y, (top[:, :, :, 0] + jnp.log(total))[..., 0])


def fused_backward(form, interpret, kept, dy):
    q, k, v, pairs, y, lse = kept
    call = call_of(form, q, k, pairs.reach.size // (q.shape[0] * q.shape[1] * q.shape[2]))
    delta = jnp.sum(dy.astype(jnp.float32) * y, axis=-1)
    given = given_of(call, pairs, q, k, v)
    given |= dict(dy=whole(flat(dy)), lse=whole(lse.reshape(-1)), delta=whole(delta.reshape(-1)))
    own = dict(blocks=one(blocks_in(call, pairs.first, call.T)))
    made = [made_whole(call.P * call.R + call.rows, q.shape[-1], dtype=q.dtype)]
    grid, run = (pl.cdiv(call.P, call.T),), partial(queries_kernel, call=call)
    (dq,) = launch(run, "chosen_queries", grid, given | own, made, warps(k, v), interpret)
    dq = jnp.sum(by_pair(call, dq, q.shape), axis=3, dtype=jnp.float32).astype(q.dtype)
    dk, dv = keys(call, given, pairs, interpret)
    return dq, *(heads_last(d, like) for d, like in ((dk, k), (dv, v))), None, None


def keys(call: Call, given: dict[str, Any], pairs: Sorted, interpret: bool) -> list[Array]:
    """What all keys and values get, as `heads_first` has them, wide."""
    grid, (k, v) = (call.C, call.size // call.m), (given[name][0] for name in "kv")
    start = pairs.first[: call.C * call.S : call.S]  # the first of each chunk, and whether it has begun before
    last = jnp.pad(pairs.first[call.S - 1 : call.C * call.S - 1 : call.S], (1, 0), constant_values=-1)
    goes_on = (start == last) & (start < call.end)
    again = jnp.pad(goes_on[:-1] & (start[:-1] == start[1:]), (1, 0))  # in the chunk before too
    number = jnp.sum(start[None] <= start[:, None], axis=1, dtype=jnp.int32) - jnp.arange(call.C, dtype=jnp.int32)
    slots = jnp.where(goes_on & ~again, number, 0)

    def apart(x: Array) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        made = jax.ShapeDtypeStruct((call.C, call.size, x.shape[-1]), jnp.float32)
        return made, pl.BlockSpec((None, call.m, x.shape[-1]), lambda c, i: (c, i, 0))

    blocks = blocks_in(call, pairs.first, call.S)
    given = given | dict(blocks=one(blocks), goes_on=one(goes_on.astype(jnp.int32)))
    given |= dict(dk=whole(jnp.zeros(k.shape, jnp.float32)), dv=whole(jnp.zeros(v.shape, jnp.float32)))
    made = [made_whole(*k.shape), made_whole(*v.shape)]
    run = partial(keys_kernel, call=call)
    both = [*made, apart(k), apart(v)]
    dk, dv, *more = launch(run, "chosen_keys", grid, given, both, warps(k, v), interpret, onto=("dk", "dv"))
    if call.C == 1:
        return [dk, dv]
    given = dict(first=whole(pairs.first), slots=one(slots), dk=whole(dk), dv=whole(dv))
    given |= dict(more_k=whole(more[0]), more_v=whole(more[1]))
    run = partial(joined_kernel, call=call)
    return launch(run, "chosen_joined", grid, given, made, warps(k, v), interpret, onto=("dk", "dv"))


fused.defvjp(fused_forward, fused_backward)


def attend(form: Form, o: Learned, where: Places, interpret: bool = False) -> Array:
    """As `model.ops.chosen.attend` of tokens in order and no bias; `interpret` runs it anywhere, slowly.

    Blocks of `size`, a power of two from 16 on, are the same or share no key that a query sees. K, V: 16 to 128.
    """
    q, k = (x.astype(o.v.dtype) for x in (o.q, o.k))
    return fused(form, interpret, q, k, o.v, where.chosen, where.index)
