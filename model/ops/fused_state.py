"""Linear attention in kernels for NVIDIA GPUs: the Q^2 weights of a chunk live and die on the chip.

    h_t = e^{a_t} h_{t-1} + k_t v_t^T        y_t = q_t h_t

Four kernels: `added`, what each chunk adds to the state; `carried`, the states between chunks, a small tile of the
state after another; `outputs`, and for the gradient `gradients`, which take a chunk each, given the states around it.
The backward pass makes the states anew. Letters beside the project's own: K and V channels of keys and of values,
Q tokens of a chunk, M chunks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.pallas.triton import dot
from jax.sharding import PartitionSpec

from model import placement
from model.ops.decays import FORGET, STRONGEST, filled, in_chunks, parts, sums

Array = jax.Array
Refs = dict[str, Any]  # of a kernel's inputs, by name; what a call lacks is not there

TILE = 1024  # numbers of a state that one program carries
ROOM = 227 * 1024  # bytes that a program has on the chip, beside its registers
AHEAD = 8  # chunks whose numbers are fetched before the first is used
PARAMS = {"added": (4, 1), "carried": (4, 1)}  # warps and stages by kernel


def by_chunk(chunk: int) -> tuple[int, int]:
    """Warps and stages of a kernel that holds a chunk's weights: more warps than they fill wait for each other."""
    return (8 if chunk > 64 else 4), 1


class Past(NamedTuple):
    """What log decays and documents come to within chunks, `[B, H, M, Q]` but for the last two; None without them."""

    whole: Array | None = None  # running sums of log decays, in the two parts whose differences are exact
    rest: Array | None = None
    to_token: Array | None = None  # what is left at a token of the state before its chunk
    to_end: Array | None = None  # what is left of a token at the end of its chunk
    total: Array | None = None  # what a chunk leaves of the state before it, [B, H, M]
    documents: Array | None = None  # begun in the chunk so far, [B, M, Q]


def past_of(a: Array | None, documents: Array | None, heads: int, dtype: Any) -> Past:
    """a: [B, H, M, Q]; documents: [B, M, Q]."""
    if a is None and documents is None:
        return Past()
    if a is None:
        first = jnp.repeat((documents == 0)[:, None], heads, axis=1)
        last = jnp.repeat((documents == documents[..., -1:])[:, None], heads, axis=1)
        first, last = first.astype(dtype), last.astype(dtype)
        return Past(to_token=first, to_end=last, total=first[..., -1], documents=documents)
    whole, rest = sums(jnp.stack(parts(a)), jnp.tri(a.shape[-1]))
    to_token, to_end = whole + rest, (whole[..., -1:] - whole) + (rest[..., -1:] - rest)
    if documents is not None:
        here = documents[:, None]
        to_token = jnp.where(here == 0, to_token, FORGET)
        to_end = jnp.where(here == here[..., -1:], to_end, FORGET)
    to_token = jnp.exp(to_token)
    return Past(whole, rest, to_token, jnp.exp(to_end), to_token[..., -1], documents)


# What a program of the grid (heads, chunks, rows) sees of an array of some shape


def tokens_seen(chunk: int, size: int) -> pl.BlockSpec:
    """Of `[B, L, H, size]`."""
    return pl.BlockSpec((None, chunk, None, size), lambda h, m, b: (b, m, h, 0))


def state_seen(K: int, V: int) -> pl.BlockSpec:
    """Of `[B, M, H, K, V]`."""
    return pl.BlockSpec((None, None, None, K, V), lambda h, m, b: (b, m, h, 0, 0))


def past_seen(chunk: int) -> Past:
    token = pl.BlockSpec((None, None, None, chunk), lambda h, m, b: (b, h, m, 0))
    total = pl.BlockSpec((None, None, None), lambda h, m, b: (b, h, m))
    return Past(token, token, token, token, total, pl.BlockSpec((None, None, chunk), lambda h, m, b: (b, m, 0)))


def launch(
    kernel: Callable,
    name: str,
    grid: tuple[int, ...],
    given: dict[str, tuple[Array | None, pl.BlockSpec]],
    made: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    params: tuple[int, int],
    interpret: bool,
    onto: tuple[str, ...] = (),
) -> list[Array]:
    """Runs a kernel on what is given and not None, which it sees by name, and what it makes: anew, or written onto
    arrays that are given, by their names."""
    given = {name: pair for name, pair in given.items() if pair[0] is not None}
    warps, stages = params
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[{name: block for name, (_, block) in given.items()}],
        out_specs=[block for _, block in made],
        out_shape=[shape for shape, _ in made],
        input_output_aliases={sorted(given).index(name): i for i, name in enumerate(onto)},
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )({name: array for name, (array, _) in given.items()})


def scaled(x: Array, by: Any | None) -> Array:
    """The rows of a matrix times a number each, if there are any."""
    return x if by is None else x * by[...][:, None]


def added_kernel(see: Refs, out):
    """`(weight k)^T v`. k: [Q, K]; v: [Q, V]; weight: [Q]."""
    k = see["k"][...]
    out[...] = dot(scaled(k, see.get("weight")).astype(k.dtype), see["v"][...], trans_a=True).astype(out.dtype)


def added(k: Array, v: Array, weight: Array | None, chunk: int, interpret: bool) -> Array:
    """What each chunk adds to the state, `[B, M, H, K, V]` in the tokens' dtype; weight: [B, H, M, Q]."""
    (B, L, H, K), V = k.shape, v.shape[-1]
    given = dict(k=(k, tokens_seen(chunk, K)), v=(v, tokens_seen(chunk, V)), weight=(weight, past_seen(chunk).to_token))
    M = L // chunk
    made = [(jax.ShapeDtypeStruct((B, M, H, K, V), k.dtype), state_seen(K, V))]
    return launch(added_kernel, "state_added", (H, M, B), given, made, PARAMS["added"], interpret)[0]


def carried_kernel(see: Refs, before, end, *, reverse: bool):
    """`h = total h + added` over chunks, for R rows. added, before: [M, R, V]; total: [M] or [M, R]; start: [R, V]."""
    new, total = see["added"], see.get("total")
    M = new.shape[0]

    def left(i):
        return total[i] if len(total.shape) == 1 else total[i, :][:, None]

    def steps(first, h, n):
        places = [M - 1 - (first + i) if reverse else first + i for i in range(n)]
        # All of them are fetched before the first is waited for.
        fetched = [(new[i, :, :].astype(h.dtype), None if total is None else left(i)) for i in places]
        for i, (one, decay) in zip(places, fetched, strict=True):
            before[i, :, :] = h.astype(before.dtype)
            h = one + (h if total is None else decay * h)
        return h

    h = lax.fori_loop(0, M // AHEAD, lambda n, h: steps(n * AHEAD, h, AHEAD), see["start"][...])
    end[...] = steps(M - M % AHEAD, h, M % AHEAD)


def carried(new: Array, total: Array | None, h0: Array, reverse: bool, interpret: bool) -> tuple[Array, Array]:
    """The states before each chunk, as `new`, and after the last; in reverse, from the end.

    new: [B, M, H, K, V]; total: [B, H, M], or [B, H, M, K] where every channel decays by itself.
    """
    B, M, H, K, V = new.shape
    R = min(K, max(1, TILE // V))
    every = pl.BlockSpec((None, M, None, R, V), lambda h, t, b: (b, 0, h, t, 0))
    one = pl.BlockSpec((None, None, R, V), lambda h, t, b: (b, h, t, 0))
    block = pl.BlockSpec((None, None, M), lambda h, t, b: (b, h, 0))
    if total is not None and total.ndim == 4:
        block = pl.BlockSpec((None, None, M, R), lambda h, t, b: (b, h, 0, t))
    given = dict(added=(new, every), total=(total, block), start=(h0, one))
    made = [(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block) for leaf, block in ((new, every), (h0, one))]
    kernel, grid = partial(carried_kernel, reverse=reverse), (H, K // R, B)
    return tuple(launch(kernel, "state_carried", grid, given, made, PARAMS["carried"], interpret))


def sides(n: int) -> tuple[Array, Array]:
    """The row and the column of every place in a square."""
    return tuple(lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))


def weighed(scores: Array, see: Refs) -> Array:
    """Scores at [i, j] times what is left of token j at token i: nothing if it is later, or of another document."""
    row, column = sides(scores.shape[0])
    seen = row >= column
    if "documents" in see:
        documents = see["documents"][...]
        seen = seen & (documents[:, None] == documents[None, :])
    if "whole" not in see:
        return jnp.where(seen, scores, 0)
    whole, rest = see["whole"][...], see["rest"][...]
    gap = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    return scores * jnp.exp(jnp.where(seen, gap, FORGET))


def outputs_kernel(see: Refs, y):
    """One head of one chunk. q, k: [Q, K]; v, y: [Q, V]; before: [K, V]."""
    q, v = see["q"][...], see["v"][...]
    weights = weighed(dot(q, see["k"][...], trans_b=True), see).astype(v.dtype)
    past = scaled(dot(q, see["before"][...]), see.get("to_token"))
    y[...] = (past + dot(weights, v)).astype(y.dtype)


def outputs(q: Array, k: Array, v: Array, before: Array, past: Past, chunk: int, interpret: bool) -> Array:
    (B, L, H, K), V = q.shape, v.shape[-1]
    key, value = tokens_seen(chunk, K), tokens_seen(chunk, V)
    given = dict(q=(q, key), k=(k, key), v=(v, value), before=(before, state_seen(K, V)), **named(past, chunk))
    made = [(jax.ShapeDtypeStruct(v.shape, v.dtype), value)]
    grid = (H, L // chunk, B)
    return launch(outputs_kernel, "state_outputs", grid, given, made, by_chunk(chunk), interpret)[0]


def named(past: Past, chunk: int) -> dict[str, tuple[Array | None, pl.BlockSpec]]:
    return {name: pair for name, *pair in zip(Past._fields, past, past_seen(chunk), strict=True)}


DECAYS = ("inner", "to_token", "to_end", "total")  # the ways by which log decays get something


def gradients_kernel(see: Refs, *made, names: tuple[str, ...]):
    """What one head of one chunk's tokens get. dy: [Q, V]; before, after: [K, V], `after` the later state's gradient.

    The log decays get something by four ways: between tokens, from the state before the chunk to tokens, from tokens to
    the state after it, and from state to state. Each sum is taken as soon as it can be, so that little is held.
    """
    out = dict(zip(names, made, strict=True))
    q, k, dy = see["q"][...], see["k"][...], see["dy"][...]
    if "total" in out:
        kept = jnp.sum(see["before"][...].astype(jnp.float32) * see["after"][...])
        out["total"][...] = see["total"][...] * kept
    d_scores = weighed(dot(dy, see["v"][...], trans_b=True), see)
    past = scaled(dot(dy, see["before"][...], trans_b=True), see.get("to_token"))
    if "to_token" in out:
        out["to_token"][...] = jnp.sum(past * q, axis=1)
    out["q"][...] = (past + dot(d_scores.astype(k.dtype), k)).astype(q.dtype)
    later = scaled(dot(see["v"][...], see["after"][...], trans_b=True), see.get("to_end"))
    if "to_end" in out:
        out["to_end"][...] = jnp.sum(later * k, axis=1)
    out["k"][...] = (later + dot(d_scores.astype(q.dtype), q, trans_a=True)).astype(k.dtype)
    scores = dot(q, k, trans_b=True)
    if "inner" in out:
        # Token t matters to all pairs j < t <= i. Added up, not differences of sums, which would lose small ones.
        row, column = sides(scores.shape[0])
        exact = lax.Precision.HIGHEST if q.dtype == past.dtype else None
        pairs, earlier = (d_scores * scores).astype(q.dtype), (row < column).astype(q.dtype)
        to_t = dot(pairs, earlier, precision=exact)  # [i, t]: the sum over j < t
        out["inner"][...] = jnp.sum(jnp.where(row >= column, to_t, 0), axis=0)
    if "v" in out:
        weights = weighed(scores, see).astype(dy.dtype)
        own = scaled(dot(k, see["after"][...]), see.get("to_end"))
        out["v"][...] = (own + dot(weights, dy, trans_a=True)).astype(dy.dtype)


def gradients(
    q, k, v, before, past: Past, dy, after, chunk: int, interpret: bool, values: bool = True
) -> tuple[Array | None, ...]:
    """dq, dk, dv, if values are asked for, and the gradient of the log decays, `[B, H, M, Q]`, if there are any."""
    (B, L, H, K), V = q.shape, v.shape[-1]
    key, value, state = tokens_seen(chunk, K), tokens_seen(chunk, V), state_seen(K, V)
    given = dict(q=(q, key), k=(k, key), v=(v, value), dy=(dy, value), before=(before, state), after=(after, state))
    made = dict(q=(q, key), k=(k, key)) | (dict(v=(v, value)) if values else {})
    if past.whole is not None:
        block = past_seen(chunk)
        made |= dict.fromkeys(DECAYS[:3], (past.whole, block.whole)) | dict(total=(past.total, block.total))
    outs = [(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block) for leaf, block in made.values()]
    kernel, grid = partial(gradients_kernel, names=tuple(made)), (H, L // chunk, B)
    given |= named(past, chunk)
    outs = launch(kernel, "state_gradients", grid, given, outs, by_chunk(chunk), interpret)
    got = dict(zip(made, outs, strict=True))
    da = None if past.whole is None else decays_got(*(got[name] for name in DECAYS))
    return got["q"], got["k"], got.get("v"), da


def decays_got(d_inner: Array, d_to_token: Array, d_to_end: Array, d_total: Array) -> Array:
    """The gradient of log decays by the four ways that they matter; the last is `[B, H, M]`."""
    order = jnp.tri(d_inner.shape[-1])
    return d_inner + sums(d_to_token, order.T) + sums(d_to_end, order - jnp.eye(len(order))) + d_total[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def fused(q, k, v, a, h0, documents, chunk: int, interpret: bool) -> tuple[Array, Array]:
    """As `fused_state`, for whole chunks: a: [B, H, M, Q]; documents: [B, M, Q], begun in the chunk so far."""
    return fused_forward(q, k, v, a, h0, documents, chunk, interpret)[0]


def fused_forward(q, k, v, a, h0, documents, chunk, interpret):
    past = past_of(a, documents, q.shape[2], h0.dtype)
    before, h = carried(added(k, v, past.to_end, chunk, interpret), past.total, h0, False, interpret)
    return (outputs(q, k, v, before, past, chunk, interpret), h), (q, k, v, a, h0, documents)


def fused_backward(chunk, interpret, saved, g):
    q, k, v, a, h0, documents = saved
    dy, dh = g
    past = past_of(a, documents, q.shape[2], h0.dtype)
    before, _ = carried(added(k, v, past.to_end, chunk, interpret), past.total, h0, False, interpret)
    after, dh0 = carried(added(q, dy, past.to_token, chunk, interpret), past.total, dh, True, interpret)
    dq, dk, dv, da = gradients(q, k, v, before, past, dy, after, chunk, interpret)
    return dq, dk, dv, da, dh0, None


fused.defvjp(fused_forward, fused_backward)


def on_each_device(run: Callable, rows: int, heads: int, tokens: int = 3, states: int = 2) -> Callable:
    """`run` on a device's own rows and heads: of arrays `[B, L, H, ...]`, of others `[B, H, ...]`, and of documents."""
    (r,), (h,) = (placement.spec([name], [size]) for name, size in (("batch", rows), ("heads", heads)))
    token, state = PartitionSpec(r, None, h), PartitionSpec(r, h)
    in_specs = (*[token] * tokens, *[state] * states, PartitionSpec(r))
    return placement.on_each_device(run, in_specs, (token, state))


def fitting(chunk: int, k: Array, v: Array) -> int:
    """The chunk asked for, or the longest whose tokens and states have room on the chip, in the backward pass too."""
    K, V = k.shape[-1], v.shape[-1]
    while chunk > 16 and 2 * (chunk * (K + V) + K * V) * k.dtype.itemsize > ROOM:
        chunk //= 2
    return chunk


def fused_state(
    q: Array,
    k: Array,
    v: Array,
    a: Array | None,
    h0: Array,
    opens: Array | None,
    chunk: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` in v's dtype, and the last state.

    q, k: [B, L, H, K]; v: [B, L, H, V]; a: [B, L, H], log decays, not positive, wide, or None: nothing decays;
    h0: [B, H, K, V], wide; opens: [B, L], true where the past is forgotten. K, V: 16, 32, 64 or 128; chunk: 16 to 128.
    """
    B, L, H = q.shape[:3]
    chunk = fitting(chunk, k, v)
    # Filled up with keys of zero and decays of none, which leave a state as it was.
    q, k, v = (filled(leaf, chunk) for leaf in (q, k, v))
    a = None if a is None else in_chunks(jnp.moveaxis(jnp.maximum(a, STRONGEST), 2, 1), chunk, axis=2)
    documents = None if opens is None else jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), B, H)
    y, h = run(q, k, v, a, h0, documents)
    return y[:, :L], h
