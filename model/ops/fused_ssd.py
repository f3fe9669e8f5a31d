"""Mamba-2's matrix form in kernels for NVIDIA GPUs: the Q^2 weights of a chunk live and die on the chip.

Four kernels, and small sums around them. `states` carries a state over the chunks of a segment; all segments run at
once, and a first pass without outputs finds the state that each begins with. The others take a chunk each, given the
states around it: `outputs`, and for the gradient `tokens` and `maps`. Letters as in model/ops/ssd.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.pallas.triton import dot
from jax.sharding import PartitionSpec

from model import placement
from model.ops.decays import FORGET, carry, filled, in_chunks, parts, sums

Array = jax.Array

PROGRAMS = 256  # enough to fill a large GPU
PARAMS = {  # warps and stages: the fastest of those tried on an H200
    "outputs": triton.CompilerParams(num_warps=4, num_stages=1),
    "tokens": triton.CompilerParams(num_warps=4, num_stages=1),
    "maps": triton.CompilerParams(num_warps=4, num_stages=2),
}


class Decays(NamedTuple):
    """What the log decays of tokens come to within their chunks; `[B, H, M, Q]` but for the last two."""

    whole: Array  # running sums, in the two parts whose differences are exact
    rest: Array
    to_token: Array  # what is left at a token of the state before its chunk
    to_end: Array  # what is left of a token at the end of its chunk
    documents: Array  # begun in the chunk so far, [B, M, Q]
    total: Array  # log, [B, H, M]


def decays(a: Array, documents: Array) -> Decays:
    """a: [B, H, M, Q]; documents: [B, M, Q]."""
    here = documents[:, None]
    whole, rest = sums(jnp.stack(parts(a)), jnp.tri(a.shape[-1]))
    to_token = jnp.where(here == 0, whole + rest, FORGET)
    to_end = (whole[..., -1:] - whole) + (rest[..., -1:] - rest)
    to_end = jnp.where(here == here[..., -1:], to_end, FORGET)
    return Decays(whole, rest, jnp.exp(to_token), jnp.exp(to_end), documents, to_token[..., -1])


class Blocks(NamedTuple):
    """What a program of the grid (heads, chunks, rows) sees of arrays, by their shape."""

    head: pl.BlockSpec  # [B, L, H, P]
    group: pl.BlockSpec  # [B, L, G, N]
    token: pl.BlockSpec  # [B, H, M, Q]
    chunk: pl.BlockSpec  # [B, H, M]
    state: pl.BlockSpec  # [B, M, H, P, N]
    documents: pl.BlockSpec  # [B, M, Q]


def block_specs(x: Array, k: Array, chunk: int, heads: int | None = None) -> Blocks:
    """One chunk and one head, whose axis is left out, or several heads of a group."""
    (H, P), (G, N), Q, n = x.shape[2:], k.shape[2:], chunk, heads
    return Blocks(
        head=pl.BlockSpec((None, Q, n, P), lambda h, m, b: (b, m, h, 0)),
        group=pl.BlockSpec((None, Q, None, N), lambda h, m, b: (b, m, h * (n or 1) * G // H, 0)),
        token=pl.BlockSpec((None, n, None, Q), lambda h, m, b: (b, h, m, 0)),
        chunk=pl.BlockSpec((None, n, None), lambda h, m, b: (b, h, m)),
        state=pl.BlockSpec((None, None, n, P, N), lambda h, m, b: (b, m, h, 0, 0)),
        documents=pl.BlockSpec((None, None, Q), lambda h, m, b: (b, m, 0)),
    )


def states_kernel(x, k, weight, decay, start, *out, chunk: int, reverse: bool):
    """`h = decay h + (weight x)^T k` over a segment's chunks. x: [T, P]; k: [T, N]; weight: [T]; decay: [T / chunk]."""
    *before, end = out
    n = decay.shape[0]

    def step(i, h):
        i = n - 1 - i if reverse else i
        for every in before:
            every[i] = h.astype(every.dtype)
        tokens = pl.ds(i * chunk, chunk)
        u = (x[tokens, :] * weight[tokens][:, None]).astype(k.dtype)
        return decay[i] * h + dot(u, k[tokens, :], trans_a=True)

    end[...] = lax.fori_loop(0, n, step, start[...])


def carry_states(
    x: Array,
    k: Array,
    weight: Array,
    total: Array,
    starts: Array,
    chunk: int,
    reverse: bool,
    interpret: bool,
    every: bool,
) -> list[Array]:
    """The states that segments end with, `[B, S, H, P, N]`, and before them those before every chunk, if asked for.

    x: [B, L, H, P]; k: [B, L, G, N]; weight: [B, H, L]; total: [B, H, M], log; starts: [B, S, H, P, N].
    """
    (B, L, H, P), (G, N), M, S = x.shape, k.shape[2:], total.shape[-1], starts.shape[1]
    segment = pl.BlockSpec((None, None, None, P, N), lambda h, s, b: (b, s, h, 0, 0))
    specs, shapes = [segment], [jax.ShapeDtypeStruct(starts.shape, starts.dtype)]
    if every:
        specs.insert(0, pl.BlockSpec((None, M // S, None, P, N), lambda h, s, b: (b, s, h, 0, 0)))
        shapes.insert(0, jax.ShapeDtypeStruct((B, M, H, P, N), x.dtype))
    return pl.pallas_call(
        partial(states_kernel, chunk=chunk, reverse=reverse),
        grid=(H, S, B),
        in_specs=[
            pl.BlockSpec((None, L // S, None, P), lambda h, s, b: (b, s, h, 0)),
            pl.BlockSpec((None, L // S, None, N), lambda h, s, b: (b, s, h * G // H, 0)),
            pl.BlockSpec((None, None, L // S), lambda h, s, b: (b, h, s)),
            pl.BlockSpec((None, None, M // S), lambda h, s, b: (b, h, s)),
            segment,
        ],
        out_specs=specs,
        out_shape=shapes,
        # Stages: four chunks of narrow numbers wait on the chip, or two of wide ones, which take the same room.
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=8 // x.dtype.itemsize),
        interpret=interpret,
        name="ssd_states",
    )(x, k, weight, jnp.exp(total), starts)


def states(x, k, weight, total, starts, chunk: int, reverse: bool, interpret: bool) -> tuple[Array, Array]:
    """The states before each chunk, `[B, M, H, P, N]` in x's dtype, and after the last; in reverse, from the end."""
    before, ends = carry_states(x, k, weight, total, starts, chunk, reverse, interpret, every=True)
    return before, ends[:, 0 if reverse else -1]


def segment_starts(x, k, weight, total, h0, chunk: int, reverse: bool, interpret: bool) -> Array:
    """The state that each segment of the length begins with, `[B, S, H, P, N]`; in reverse, that it ends with."""
    (B, H, P, N), M = h0.shape, total.shape[-1]
    S = segments(B * H, M)
    if S == 1:
        return h0[:, None]
    zeros = jnp.zeros((B, S, H, P, N), h0.dtype)
    (ends,) = carry_states(x, k, weight, total, zeros, chunk, reverse, interpret, every=False)
    log_decay = jnp.moveaxis(total.reshape(B, H, S, -1).sum(axis=-1), 1, 2)
    turn = slice(None, None, -1 if reverse else 1)
    starts, _ = carry(log_decay[:, turn], ends[:, turn].reshape(B, S, H, P * N), h0.reshape(B, H, P * N))
    return starts.reshape(ends.shape)[:, turn]


def segments(rows: int, chunks: int) -> int:
    """How many parts of the length are worked on at once: a divisor of the number of chunks."""
    wanted = min(chunks, -(-PROGRAMS // rows))
    return next(n for n in range(wanted, 0, -1) if chunks % n == 0)


def outputs_kernel(x, B, C, dt, before, whole, rest, to_token, documents, y):
    """One head of one chunk. x, y: [Q, P]; B, C: [Q, N]; before: [P, N]; the others: [Q]."""
    decay = weights(whole[...], rest[...], documents[...])
    W = dot(C[...], B[...], trans_b=True) * decay * dt[...][None, :]
    past = dot(C[...], before[...], trans_b=True) * to_token[...][:, None]
    y[...] = (dot(W.astype(x.dtype), x[...]) + past).astype(y.dtype)


def weights(whole: Array, rest: Array, documents: Array, reverse: bool = False) -> Array:
    """How much of token j is left at token i, at [i, j]; in reverse at [j, i]."""
    row, column = sides(whole.size)
    seen = ((row <= column) if reverse else (row >= column)) & (documents[:, None] == documents[None, :])
    gap = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    return jnp.exp(jnp.where(seen, -gap if reverse else gap, FORGET))


def sides(n: int) -> tuple[Array, Array]:
    """The row and the column of every place in a square."""
    return tuple(lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))


def outputs(x: Array, dt: Array, B: Array, C: Array, before: Array, d: Decays, interpret: bool) -> Array:
    M, Q = dt.shape[2:]
    see = block_specs(x, B, Q)
    return pl.pallas_call(
        outputs_kernel,
        grid=(x.shape[2], M, x.shape[0]),
        in_specs=[see.head, see.group, see.group, see.token, see.state, *[see.token] * 3, see.documents],
        out_specs=see.head,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=PARAMS["outputs"],
        interpret=interpret,
        name="ssd_outputs",
    )(x, B, C, dt, before, d.whole, d.rest, d.to_token, d.documents)


def tokens_kernel(
    x, B, C, dt, before, whole, rest, to_token, to_end, decay, documents, dy, dh,
    dx, d_dt, d_inner, d_to_token, d_to_end, d_total,
):  # fmt: skip
    """What one head of one chunk's tokens and log decays get.

    x, dy, dx: [Q, P]; B, C: [Q, N]; before, dh: [P, N]; decay, d_total: []; the others: [Q]. dh is the gradient of the
    state after the chunk. The log decays get something by four ways: between tokens, from the state before the chunk
    to tokens, from tokens to the state after it, and from state to state.
    """
    x, dy, h, dh, dt = x[...], dy[...], before[...], dh[...], dt[...]
    W = dot(B[...], C[...], trans_b=True) * weights(whole[...], rest[...], documents[...], reverse=True)  # [j, i]
    later = dot(B[...], dh, trans_b=True) * to_end[...][:, None]
    du = dot(W.astype(dy.dtype), dy) + later
    dx[...] = (du * dt[:, None]).astype(dx.dtype)
    d_dt[...] = jnp.sum(du * x, axis=1)
    d_to_end[...] = jnp.sum(later * x, axis=1) * dt
    d_to_token[...] = jnp.sum(dot(C[...], h, trans_b=True) * dy, axis=1) * to_token[...]
    d_total[...] = decay[...] * jnp.sum(h.astype(dt.dtype) * dh)
    # Token k matters to all pairs j < k <= i. Added up, not differences of sums, which would lose small ones.
    pairs = dot(x, dy, trans_b=True) * W * dt[:, None]
    row, column = sides(dt.size)
    exact = lax.Precision.HIGHEST if x.dtype == dt.dtype else None
    to_k = dot((row > column).astype(x.dtype), pairs.astype(x.dtype), precision=exact)  # [k, i]: the sum over j < k
    d_inner[...] = jnp.sum(jnp.where(row <= column, to_k, 0), axis=1)


def maps_kernel(left, right, weight, state, other, dt, whole, rest, documents, out, *, reverse: bool):
    """What C gets from some heads of its group in one chunk, or B, which is the same with time reversed.

    left, right: [Q, heads, P], dy and x; weight: [heads, Q]; state: [heads, P, N]; other, out: [Q, N].
    """
    Q, heads = other.shape[0], dt.shape[0]

    def head(r, found):
        scores, past = found
        a, b = left[:, r, :], right[:, r, :]
        dt_r = dt[r, :][:, None] if reverse else dt[r, :][None, :]
        scores += dot(a, b, trans_b=True) * weights(whole[r, :], rest[r, :], documents[...], reverse) * dt_r
        past += dot((a * weight[r, :][:, None]).astype(a.dtype), state[r])
        return scores, past

    zeros = jnp.zeros((Q, Q), dt.dtype), jnp.zeros(other.shape, dt.dtype)
    scores, past = lax.fori_loop(0, heads, head, zeros)
    out[...] = past + dot(scores.astype(other.dtype), other[...])


def tokens(x, dt, B, C, before, d: Decays, dy, dh, interpret: bool) -> tuple[Array, Array, Array]:
    """dx, and the gradients of dt and of the log decays, `[B, H, M, Q]`."""
    M, Q = dt.shape[2:]
    see = block_specs(x, B, Q)
    made = [(see.head, x), *[(see.token, dt)] * 4, (see.chunk, d.total)]
    dx, d_dt, d_inner, d_to_token, d_to_end, d_total = pl.pallas_call(
        tokens_kernel,
        grid=(x.shape[2], M, x.shape[0]),
        in_specs=[
            *[see.head, see.group, see.group, see.token, see.state],
            *[see.token] * 4,
            *[see.chunk, see.documents, see.head, see.state],
        ],
        out_specs=[block for block, _ in made],
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in made],
        compiler_params=PARAMS["tokens"],
        interpret=interpret,
        name="ssd_tokens",
    )(x, B, C, dt, before, d.whole, d.rest, d.to_token, d.to_end, jnp.exp(d.total), d.documents, dy, dh)
    da = d_inner + sums(d_to_token, jnp.tri(Q).T) + sums(d_to_end, jnp.tri(Q, k=-1)) + d_total[..., None]
    return dx, d_dt, da


def maps(left, right, weight, state, other, dt, d: Decays, reverse: bool, interpret: bool) -> Array:
    """The gradient of C, or in reverse of B, `[B, L, G, N]`."""
    (rows, L, H, _), (G, N), (M, Q) = left.shape, other.shape[2:], dt.shape[2:]
    heads = H // G
    while heads % 2 == 0 and rows * M * (H // heads) < PROGRAMS:
        heads //= 2
    see = block_specs(left, other, Q, heads)
    out = pl.pallas_call(
        partial(maps_kernel, reverse=reverse),
        grid=(H // heads, M, rows),
        in_specs=[see.head, see.head, see.token, see.state, see.group, *[see.token] * 3, see.documents],
        out_specs=pl.BlockSpec((None, Q, None, N), lambda h, m, b: (b, m, h, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, L, H // heads, N), dt.dtype),
        compiler_params=PARAMS["maps"],
        interpret=interpret,
        name="ssd_maps",
    )(left, right, weight, state, other, dt, d.whole, d.rest, d.documents)
    return out.reshape(rows, L, G, -1, N).sum(axis=3).astype(other.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def fused(
    x: Array, dt: Array, a: Array, B: Array, C: Array, h0: Array, documents: Array, chunk: int, interpret: bool = False
) -> tuple[Array, Array]:
    """As `fused_ssd`, for whole chunks: dt, a: [B, H, M, Q]; documents: [B, M, Q], begun in the chunk so far."""
    return fused_forward(x, dt, a, B, C, h0, documents, chunk, interpret)[0]


def flat(leaf: Array) -> Array:
    return leaf.reshape(*leaf.shape[:2], -1)


def fused_forward(x, dt, a, B, C, h0, documents, chunk, interpret):
    d = decays(a, documents)
    starts = segment_starts(x, B, flat(dt * d.to_end), d.total, h0, chunk, False, interpret)
    before, h = states(x, B, flat(dt * d.to_end), d.total, starts, chunk, False, interpret)
    y = outputs(x, dt, B, C, before, d, interpret)
    return (y, h), (x, dt, a, B, C, documents, starts)


def fused_backward(chunk, interpret, saved, g):
    x, dt, a, B, C, documents, starts = saved
    dy, dh = g
    d = decays(a, documents)
    by_end, by_token = dt * d.to_end, d.to_token
    before, _ = states(x, B, flat(by_end), d.total, starts, chunk, False, interpret)
    ends = segment_starts(dy, C, flat(by_token), d.total, dh, chunk, True, interpret)
    after, dh0 = states(dy, C, flat(by_token), d.total, ends, chunk, True, interpret)
    dx, d_dt, da = tokens(x, dt, B, C, before, d, dy, after, interpret)
    dC = maps(dy, x, by_token, before, B, dt, d, False, interpret)
    dB = maps(x, dy, by_end, after, C, dt, d, True, interpret)
    return dx, d_dt, da, dB, dC, dh0, None


fused.defvjp(fused_forward, fused_backward)


def on_each_device(run: Callable, rows: int, heads: int, groups: int) -> Callable:
    """`run` on a device's own rows and heads; groups of heads that devices cannot share keep the heads together."""
    inner = "inner" if groups == 1 or placement.shards("inner", groups) == placement.shards("inner") else None
    sizes = (("batch", rows), (inner, heads), (inner, groups))
    (r,), (h,), (g,) = (placement.spec([name], [size]) for name, size in sizes)
    token, state, pair = PartitionSpec(r, None, h), PartitionSpec(r, h), PartitionSpec(r, None, g)
    in_specs = (token, state, state, pair, pair, state, PartitionSpec(r))
    return placement.on_each_device(run, in_specs, (token, state))


def fused_ssd(
    x: Array,
    dt: Array,
    a: Array,
    B: Array,
    C: Array,
    h0: Array,
    opens: Array | None,
    chunk: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Outputs and last state, as `ssd` has them."""
    rows, L, heads = x.shape[:3]
    # Filled up with steps of size 0, which leave a state as it was.
    dt, a = (in_chunks(jnp.moveaxis(leaf, 2, 1), chunk, axis=2) for leaf in (dt, a))
    x, B, C = (filled(leaf, chunk) for leaf in (x, B, C))
    if opens is None:
        documents = jnp.zeros((rows, *dt.shape[2:]), jnp.int32)
    else:
        documents = jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), rows, heads, B.shape[2])
    y, h = run(x, dt, a, B, C, h0, documents)
    return y[:, :L], h
