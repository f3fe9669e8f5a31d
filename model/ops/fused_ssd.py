"""Mamba-2's matrix form in kernels for NVIDIA GPUs: the Q^2 weights of a chunk live and die on the chip.

Three kernels, and small sums around them. `states` carries a state over the chunks of a segment; all segments run at
once, and a first pass without outputs finds the state that each begins with. `outputs` and `gradients` take a chunk
each, given the states around it. Letters as in model/ops/ssd.py.
"""

import math
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

from model.ops.ssd import FORGET, carry, cut, parts, sums

Array = jax.Array

PROGRAMS = 512  # enough to fill a large GPU
PARAMS = {  # (warps, stages), the fastest of those tried on an H200
    "states": (4, 3),
    "outputs": (4, 1),
    "gradients": (8, 1),
}
ROWS, HEADS = ("data", "fsdp"), ("tensor",)  # the mesh axes that share out batch and heads


def params(kernel: str) -> triton.CompilerParams:
    warps, stages = PARAMS[kernel]
    return triton.CompilerParams(num_warps=warps, num_stages=stages)


class Decays(NamedTuple):
    """What the log decays of tokens come to within their chunks; `[B, H, M, Q]` but for the last two."""

    whole: Array  # running sums, in the two parts whose differences are exact
    rest: Array
    to_token: Array  # what is left at a token of the state before its chunk
    to_end: Array  # what is left of a token at the end of its chunk
    documents: Array  # begun in the chunk so far, [B, M, Q]
    total: Array  # log, [B, H, M]


def decays(a: Array, opens: Array) -> Decays:
    """a: [B, H, M, Q]; opens: [B, M, Q]."""
    order = jnp.tri(a.shape[-1], dtype=bool)
    documents = jnp.cumsum(opens, axis=-1, dtype=jnp.int32)
    here = documents[:, None]
    to_token = jnp.where(here == 0, sums(a, order), FORGET)
    to_end = jnp.where(here == here[..., -1:], sums(a, ~order), FORGET)
    whole, rest = (sums(part, order) for part in parts(a))
    return Decays(whole, rest, jnp.exp(to_token), jnp.exp(to_end), documents, to_token[..., -1])


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


def states(
    x: Array, k: Array, weight: Array, total: Array, h0: Array, chunk: int, reverse: bool, interpret: bool
) -> tuple[Array, Array]:
    """The states before each chunk, `[B, M, H, P, N]` in x's dtype, and after the last; in reverse, from the end.

    x: [B, L, H, P]; k: [B, L, G, N]; weight: [B, H, L]; total: [B, H, M], log; h0: [B, H, P, N].
    """
    (B, L, H, P), (G, N), M = x.shape, k.shape[2:], total.shape[-1]
    S = segments(B * H, M)
    T = L // S
    per_head = pl.BlockSpec((None, None, None, P, N), lambda h, s, b: (b, s, h, 0, 0))
    ends = (per_head, jax.ShapeDtypeStruct((B, S, H, P, N), h0.dtype))
    every = (
        pl.BlockSpec((None, M // S, None, P, N), lambda h, s, b: (b, s, h, 0, 0)),
        jax.ShapeDtypeStruct((B, M, H, P, N), x.dtype),
    )

    def run(start, *out):
        specs, shapes = zip(*out, strict=True)
        return pl.pallas_call(
            partial(states_kernel, chunk=chunk, reverse=reverse),
            grid=(H, S, B),
            in_specs=[
                pl.BlockSpec((None, T, None, P), lambda h, s, b: (b, s, h, 0)),
                pl.BlockSpec((None, T, None, N), lambda h, s, b: (b, s, h * G // H, 0)),
                pl.BlockSpec((None, None, T), lambda h, s, b: (b, h, s)),
                pl.BlockSpec((None, None, M // S), lambda h, s, b: (b, h, s)),
                per_head,
            ],
            out_specs=specs,
            out_shape=shapes,
            compiler_params=params("states"),
            interpret=interpret,
            name="ssd_states",
        )(x, k, weight, jnp.exp(total), start)

    start = h0[:, None]
    if S > 1:
        (end,) = run(jnp.zeros(ends[1].shape, h0.dtype), ends)
        log_decay = jnp.moveaxis(total.reshape(B, H, S, -1).sum(axis=-1), 1, 2)
        turn = slice(None, None, -1 if reverse else 1)
        start, _ = carry(log_decay[:, turn], end[:, turn].reshape(B, S, H, P * N), h0.reshape(B, H, P * N))
        start = start.reshape(end.shape)[:, turn]
    before, end = run(start, every, ends)
    return before, end[:, 0 if reverse else -1]


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


def weights(whole: Array, rest: Array, documents: Array) -> Array:
    """How much of token j is left at token i, at [i, j]."""
    i, j = (lax.broadcasted_iota(jnp.int32, (whole.size, whole.size), axis) for axis in (0, 1))
    seen = (i >= j) & (documents[:, None] == documents[None, :])
    gap = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    return jnp.exp(jnp.where(seen, gap, FORGET))


def outputs(x: Array, dt: Array, B: Array, C: Array, before: Array, d: Decays, interpret: bool) -> Array:
    rows, L, H, P = x.shape
    G, N = B.shape[2:]
    Q = d.whole.shape[-1]
    per_head = pl.BlockSpec((None, Q, None, P), lambda h, m, b: (b, m, h, 0))
    per_group = pl.BlockSpec((None, Q, None, N), lambda h, m, b: (b, m, h * G // H, 0))
    per_token = pl.BlockSpec((None, None, None, Q), lambda h, m, b: (b, h, m, 0))
    return pl.pallas_call(
        outputs_kernel,
        grid=(H, L // Q, rows),
        in_specs=[
            per_head,
            per_group,
            per_group,
            per_token,
            pl.BlockSpec((None, None, None, P, N), lambda h, m, b: (b, m, h, 0, 0)),
            per_token,
            per_token,
            per_token,
            pl.BlockSpec((None, None, Q), lambda h, m, b: (b, m, 0)),
        ],
        out_specs=per_head,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=params("outputs"),
        interpret=interpret,
        name="ssd_outputs",
    )(x, B, C, dt, before, d.whole, d.rest, d.to_token, d.documents)


def gradients_kernel(
    x, B, C, dt, before, whole, rest, to_token, to_end, decay, documents, dy, dh,
    dx, dB, dC, d_dt, d_inner, d_to_token, d_to_end, d_total,
):  # fmt: skip
    """Some heads of a group in one chunk, one after another.

    x, dy, dx: [Q, heads, P]; B, C, dB, dC: [Q, N]; before, dh: [heads, P, N]; d_total, decay: [heads]; documents: [Q];
    the others: [heads, Q]. dh is the gradient of the state after the chunk. d_inner, d_to_token, d_to_end and d_total
    are what the log decays get by the four ways that they matter.
    """
    Q, narrow = B.shape[0], B.dtype
    B, C, documents = B[...], C[...], documents[...]
    S = dot(C, B, trans_b=True)
    i, j = (lax.broadcasted_iota(jnp.int32, (Q, Q), axis) for axis in (0, 1))

    def head(r, sums):
        dS, dB, dC = sums
        x_r, dy_r, h, dh_r = x[:, r, :], dy[:, r, :], before[r], dh[r]
        dt_r, from_before, until_end = dt[r, :], to_token[r, :], to_end[r, :]
        kept = weights(whole[r, :], rest[r, :], documents)
        dW = dot(dy_r, x_r, trans_b=True) * kept * dt_r[None, :]  # also of S
        # Token k matters to all pairs j < k <= i. Added up, not differences of sums, which would lose small ones.
        between = dot((dW * S).astype(narrow), (i < j).astype(narrow))  # [i, k]: the sum over j < k
        d_inner[r, :] = jnp.sum(jnp.where(i >= j, between, 0), axis=0)

        du = dot((S * kept).astype(narrow), dy_r, trans_a=True)
        du += dot(B, dh_r, trans_b=True) * until_end[:, None]
        dx[:, r, :] = (du * dt_r[:, None]).astype(dx.dtype)
        d_dt[r, :] = jnp.sum(du * x_r, axis=1)

        dC_r = dot(dy_r, h) * from_before[:, None]
        dB_r = dot(x_r, dh_r) * (until_end * dt_r)[:, None]
        d_to_token[r, :] = jnp.sum(dC_r * C, axis=1)
        d_to_end[r, :] = jnp.sum(dB_r * B, axis=1)
        d_total[r] = decay[r] * jnp.sum(h.astype(dt.dtype) * dh_r)
        return dS + dW, dB + dB_r, dC + dC_r

    zeros = jnp.zeros(B.shape, dt.dtype)
    dS, dB_all, dC_all = lax.fori_loop(0, dt.shape[0], head, (jnp.zeros((Q, Q), dt.dtype), zeros, zeros))
    dS = dS.astype(narrow)
    dB[...] = dB_all + dot(dS, C, trans_a=True)
    dC[...] = dC_all + dot(dS, B)


def gradients(x, dt, B, C, before, d: Decays, dy, dh, interpret: bool) -> tuple[Array, ...]:
    """dx; dB and dC `[B, L, G, N]`, wide; and of dt and the log decays, `[B, H, M, Q]`."""
    rows, L, H, P = x.shape
    G, N = B.shape[2:]
    Q = d.whole.shape[-1]
    M = L // Q
    heads = H // G
    while heads % 2 == 0 and rows * M * (H // heads) < PROGRAMS:
        heads //= 2
    f = dt.dtype
    per_head = pl.BlockSpec((None, Q, heads, P), lambda h, m, b: (b, m, h, 0))
    per_group = pl.BlockSpec((None, Q, None, N), lambda h, m, b: (b, m, h * heads * G // H, 0))
    per_token = pl.BlockSpec((None, heads, None, Q), lambda h, m, b: (b, h, m, 0))
    per_chunk = pl.BlockSpec((None, heads, None), lambda h, m, b: (b, h, m))
    state = pl.BlockSpec((None, None, heads, P, N), lambda h, m, b: (b, m, h, 0, 0))
    documents = pl.BlockSpec((None, None, Q), lambda h, m, b: (b, m, 0))
    shared = pl.BlockSpec((None, Q, None, N), lambda h, m, b: (b, m, h, 0))
    token_shape = jax.ShapeDtypeStruct(dt.shape, f)
    shared_shape = jax.ShapeDtypeStruct((rows, L, H // heads, N), f)
    dx, dB, dC, d_dt, d_inner, d_to_token, d_to_end, d_total = pl.pallas_call(
        gradients_kernel,
        grid=(H // heads, M, rows),
        in_specs=[
            per_head,
            *[per_group] * 2,
            per_token,
            state,
            *[per_token] * 4,
            per_chunk,
            documents,
            per_head,
            state,
        ],
        out_specs=[per_head, shared, shared, *[per_token] * 4, per_chunk],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *[shared_shape] * 2,
            *[token_shape] * 4,
            jax.ShapeDtypeStruct((rows, H, M), f),
        ],
        compiler_params=params("gradients"),
        interpret=interpret,
        name="ssd_gradients",
    )(x, B, C, dt, before, d.whole, d.rest, d.to_token, d.to_end, jnp.exp(d.total), d.documents, dy, dh)

    order = jnp.tri(Q, dtype=bool)
    da = d_inner + sums(d_to_token, order.T) + sums(d_to_end, jnp.tri(Q, k=-1)) + d_total[..., None]
    dB, dC = (leaf.reshape(rows, L, G, -1, N).sum(axis=3) for leaf in (dB, dC))
    return dx, d_dt, da, dB, dC


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def fused(
    x: Array, dt: Array, a: Array, B: Array, C: Array, h0: Array, opens: Array, chunk: int, interpret: bool = False
) -> tuple[Array, Array]:
    """As `fused_ssd`, for whole chunks: dt, a: [B, H, M, Q]; opens: [B, M, Q]."""
    return fused_forward(x, dt, a, B, C, h0, opens, chunk, interpret)[0]


def flat(leaf: Array) -> Array:
    return leaf.reshape(*leaf.shape[:2], -1)


def fused_forward(x, dt, a, B, C, h0, opens, chunk, interpret):
    d = decays(a, opens)
    before, h = states(x, B, flat(dt * d.to_end), d.total, h0, chunk, False, interpret)
    y = outputs(x, dt, B, C, before, d, interpret)
    return (y, h), (x, dt, a, B, C, h0, opens)


def fused_backward(chunk, interpret, saved, g):
    x, dt, a, B, C, h0, opens = saved
    dy, dh = g
    d = decays(a, opens)
    before, _ = states(x, B, flat(dt * d.to_end), d.total, h0, chunk, False, interpret)
    after, dh0 = states(dy, C, flat(d.to_token), d.total, dh, chunk, True, interpret)
    dx, d_dt, da, dB, dC = gradients(x, dt, B, C, before, d, dy, after, interpret)
    return dx, d_dt, da, dB.astype(B.dtype), dC.astype(C.dtype), dh0, None


fused.defvjp(fused_forward, fused_backward)


def on_each_device(run: Callable, rows: int, heads: int, groups: int) -> Callable:
    """`run` on a device's own rows and heads: the compiler, which cannot look into kernels, would gather them all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run

    def share(names, *sizes):  # those that the mesh has, if they divide all sizes
        axes = tuple(name for name in names if name in mesh.shape)
        return axes if all(size % math.prod(mesh.shape[axis] for axis in axes) == 0 for size in sizes) else None

    r, h = share(ROWS, rows), share(HEADS, heads, *[groups] * (groups > 1))
    token, state, pair = (
        PartitionSpec(r, None, h),
        PartitionSpec(r, h),
        PartitionSpec(r, None, h if groups > 1 else None),
    )
    return jax.shard_map(
        run,
        in_specs=(token, state, state, pair, pair, state, PartitionSpec(r)),
        out_specs=(token, state),
        check_vma=False,
    )


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
    if opens is None:
        opens = jnp.zeros((rows, L), bool)
    # Filled up with steps of size 0, which leave a state as it was.
    dt, a = (cut(jnp.moveaxis(leaf, 2, 1), chunk, axis=2) for leaf in (dt, a))
    x, B, C = (cut(leaf, chunk).reshape(rows, -1, *leaf.shape[2:]) for leaf in (x, B, C))
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), rows, heads, B.shape[2])
    y, h = run(x, dt, a, B, C, h0, cut(opens, chunk))
    return y[:, :L], h
