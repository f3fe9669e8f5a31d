"""Linear attention whose channels decay by themselves, in kernels for NVIDIA GPUs.

    h_t = diag(e^{w_t}) h_{t-1} + k_t v_t^T        y_t = q_t h_t

Kernels and letters as in model/ops/fused_state.py. What tokens of a chunk read of each other is found at once where the
chunk decays little, else by halves, as in model/ops/fused_pairs.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops.decays import STRONGEST, filled, in_chunks
from model.ops.fused_pairs import (
    ONE,
    between,
    cuts,
    from_middle,
    halves,
    in_two,
    kept_got,
    meeting,
    rows,
    same_document,
    summed,
    whole,
)
from model.ops.fused_state import (
    Refs,
    by_chunk,
    carried,
    fitting,
    launch,
    on_each_device,
    sides,
    state_seen,
    tokens_seen,
)

Array = jax.Array


def decays(see: Refs) -> Array:
    """The chunk's log decays, [Q, K]."""
    return jnp.maximum(see["w"][...].astype(jnp.float32), STRONGEST)


def to_tokens(w: Array, see: Refs, dtype: Any) -> Array:
    """What is left at tokens of the state before the chunk, [Q, K]."""
    row, column = sides(w.shape[0])
    return rows(jnp.exp(summed(row >= column, w, dtype)), see, "first")


def to_ends(w: Array, see: Refs, dtype: Any) -> Array:
    """What is left of tokens at the end of the chunk, [Q, K]."""
    row, column = sides(w.shape[0])
    return rows(jnp.exp(summed(row < column, w, dtype)), see, "last")


def added_kernel(see: Refs, out, *kept, reverse: bool):
    """`(left k)^T v`, what a chunk adds to the state after it; in reverse, of q. Else also what it leaves of the state
    before it, and whether it decays strongly."""
    k, w = see["k"][...], decays(see)
    left = (to_tokens if reverse else to_ends)(w, see, k.dtype)
    out[...] = dot((k * left).astype(k.dtype), see["v"][...], trans_a=True).astype(out.dtype)
    if kept:
        total, strong = kept
        total[...], strong[...] = whole(w, see)


def added(k, v, w, documents, chunk: int, reverse: bool, interpret: bool) -> list[Array]:
    """As in fused_state, and unless in reverse what chunks leave of a state, `[B, H, M, K]`, and which of them decay
    strongly, `[B, H, M]`."""
    (B, L, H, K), V = k.shape, v.shape[-1]
    M = L // chunk
    given = dict(k=(k, tokens_seen(chunk, K)), v=(v, tokens_seen(chunk, V)), w=(w, tokens_seen(chunk, K)))
    made = [(jax.ShapeDtypeStruct((B, M, H, K, V), k.dtype), state_seen(K, V))]
    if not reverse:
        block = pl.BlockSpec((None, None, None, K), lambda h, m, b: (b, h, m, 0))
        made += [
            (jax.ShapeDtypeStruct((B, H, M, K), jnp.float32), block),
            (jax.ShapeDtypeStruct((B, H, M), jnp.int32), ONE),
        ]
    kernel, grid = partial(added_kernel, reverse=reverse), (H, M, B)
    return launch(kernel, "channels_added", grid, given | cuts(documents, chunk), made, by_chunk(chunk), interpret)


def little_decays(see: Refs) -> tuple[Array, Array, Array]:
    """Log decays from the chunk's middle to after tokens, [Q, K], and of its halves, [K]."""
    w = decays(see)
    return from_middle(w, sides(len(w))[0] + 1, see["q"].dtype), *halves(w)


def outputs_at_once(see: Refs, y):
    """One head of one chunk. q, k, w: [Q, K]; v, y: [Q, V]; before: [K, V]."""
    narrow, v = see["q"].dtype, see["v"][...]
    s, first, _ = little_decays(see)
    scaled_q, scaled_k = (see["q"][...] * jnp.exp(s)).astype(narrow), (see["k"][...] * jnp.exp(-s)).astype(narrow)
    weights = jnp.where(same_document(see, len(s)), dot(scaled_q, scaled_k, trans_b=True), 0)
    past = rows(dot((scaled_q * jnp.exp(first)[None, :]).astype(narrow), see["before"][...]), see, "first")
    y[...] = (past + dot(weights.astype(v.dtype), v)).astype(y.dtype)


def outputs_by_halves(see: Refs, y):
    q, k, v, w = see["q"][...], see["k"][...], see["v"][...], decays(see)
    Q, narrow = q.shape[0], q.dtype
    row, column = sides(Q)
    seen = same_document(see, Q)

    def step(level, weights):
        pairs, decay = meeting(level, row, column), jnp.exp(summed(between(level, row, column), w, narrow))
        met = dot((q * decay).astype(narrow), (k * decay).astype(narrow), trans_b=True)
        return weights + jnp.where(pairs & seen, met, 0)

    own = jnp.sum(q.astype(w.dtype) * k, axis=1)[:, None]
    weights = lax.fori_loop(0, (Q - 1).bit_length(), step, jnp.where(row == column, own, 0))
    past = dot((q * to_tokens(w, see, narrow)).astype(narrow), see["before"][...])
    y[...] = (past + dot(weights.astype(v.dtype), v)).astype(y.dtype)


def outputs(q, k, v, w, before, documents, strong, chunk: int, interpret: bool) -> Array:
    K, V = k.shape[-1], v.shape[-1]
    key, value = tokens_seen(chunk, K), tokens_seen(chunk, V)
    given = dict(q=(q, key), k=(k, key), v=(v, value), w=(w, key), before=(before, state_seen(K, V)))
    made = [(jax.ShapeDtypeStruct(v.shape, v.dtype), value)]
    kernels = outputs_at_once, outputs_by_halves
    given |= cuts(documents, chunk)
    return in_two(kernels, "channels_outputs", given, made, strong, by_chunk(chunk), interpret)[0]


def scores_got(see: Refs) -> tuple[Array, Array]:
    """What scores of tokens j < i get, at [i, j], and what those of a token with itself do, [Q, 1]."""
    row, column = sides(see["q"].shape[0])
    got = dot(see["dy"][...], see["v"][...], trans_b=True)
    own = jnp.sum(jnp.where(row == column, got, 0), axis=1)[:, None]
    return jnp.where(same_document(see, len(row)) & (row > column), got, 0), own


# What one head of one chunk's tokens get. dy: [Q, V]; before, after: [K, V], `after` the gradient of the later state.
# Two kernels, as all would not fit in the registers: of queries and values, then of keys and decays, which take dq.


def queries_at_once(see: Refs, dq, dv):
    """Linear attention of scaled tokens."""
    narrow, (s, first, second) = see["q"].dtype, little_decays(see)
    in_q = jnp.exp(s)
    scaled_q, scaled_k = (see["q"][...] * in_q).astype(narrow), (see["k"][...] * jnp.exp(-s)).astype(narrow)
    weights = jnp.where(same_document(see, len(s)), dot(scaled_q, scaled_k, trans_b=True), 0).astype(narrow)
    to_end = jnp.exp(second)[None, :]
    to_v = rows(dot((scaled_k * to_end).astype(narrow), see["after"][...]), see, "last")
    dv[...] = (to_v + dot(weights, see["dy"][...], trans_a=True)).astype(dv.dtype)
    d_scores, own = scores_got(see)
    past = rows(dot(see["dy"][...], see["before"][...], trans_b=True), see, "first") * jnp.exp(first)[None, :]
    to_q = in_q * (past + dot(d_scores.astype(narrow), scaled_k))
    dq[...] = (to_q + own * see["k"][...]).astype(dq.dtype)


def keys_at_once(see: Refs, dk, dw):
    narrow, (s, first, second) = see["q"].dtype, little_decays(see)
    row, column = sides(s.shape[0])
    in_k, kept = jnp.exp(-s), kept_got(see, first + second)
    d_scores, own = scores_got(see)
    scaled_q = (see["q"][...] * jnp.exp(s)).astype(narrow)
    later = rows(dot(see["v"][...], see["after"][...], trans_b=True), see, "last") * jnp.exp(second)[None, :]
    every = jnp.sum(see["k"][...] * in_k * later, axis=0) + kept
    to_k = in_k * (later + dot(d_scores.astype(narrow), scaled_q, trans_a=True))
    dk[...] = (to_k + own * see["q"][...]).astype(dk.dtype)
    # Pairs with i at a token or later, less those with j there too; so with the state after the chunk.
    q, k = see["q"][...], see["k"][...]
    got = q * (see["dq"][...] - own * k) - k * to_k
    put_decays(dw, see, summed(row <= column, got, narrow) + every[None, :])


def queries_by_halves(see: Refs, dq, dv):
    q, k, dy, w = see["q"][...], see["k"][...], see["dy"][...], decays(see)
    Q, narrow = q.shape[0], q.dtype
    row, column = sides(Q)
    d_scores, own = scores_got(see)

    def step(level, found):
        weights, dq = found
        pairs, decay = meeting(level, row, column), jnp.exp(summed(between(level, row, column), w, narrow))
        scaled_q, scaled_k = (q * decay).astype(narrow), (k * decay).astype(narrow)
        weights += jnp.where(pairs, dot(scaled_q, scaled_k, trans_b=True), 0)
        return weights, dq + decay * dot(jnp.where(pairs, d_scores, 0).astype(narrow), scaled_k)

    itself = jnp.where(row == column, jnp.sum(q.astype(w.dtype) * k, axis=1)[:, None], 0)
    start = itself, jnp.zeros(w.shape, w.dtype)
    weights, to_q = lax.fori_loop(0, (Q - 1).bit_length(), step, start)
    past = to_tokens(w, see, narrow) * dot(dy, see["before"][...], trans_b=True)
    dq[...] = (past + to_q + own * k).astype(dq.dtype)
    weights = jnp.where(same_document(see, Q), weights, 0).astype(narrow)
    later = dot((k * to_ends(w, see, narrow)).astype(narrow), see["after"][...])
    dv[...] = (later + dot(weights, dy, trans_a=True)).astype(dv.dtype)


def keys_by_halves(see: Refs, dk, dw):
    """The decays get sums of what pairs of tokens give, never differences, which would lose small ones."""
    q, k, w = see["q"][...], see["k"][...], decays(see)
    Q, narrow = q.shape[0], q.dtype
    row, column = sides(Q)
    d_scores, own = scores_got(see)

    def step(level, found):
        dk, dw = found
        pairs, decay = meeting(level, row, column), jnp.exp(summed(between(level, row, column), w, narrow))
        here = jnp.where(pairs, d_scores, 0).astype(narrow)
        to_q = decay * dot(here, (k * decay).astype(narrow))
        to_k = decay * dot(here, (q * decay).astype(narrow), trans_a=True)
        return dk + to_k, dw + summed(between(level, column, row), q * to_q + k * to_k, narrow)

    none = jnp.zeros(w.shape, w.dtype)
    to_k, to_w = lax.fori_loop(0, (Q - 1).bit_length(), step, (none, none))
    past = to_tokens(w, see, narrow) * dot(see["dy"][...], see["before"][...], trans_b=True)
    later = to_ends(w, see, narrow) * dot(see["v"][...], see["after"][...], trans_b=True)
    dk[...] = (later + to_k + own * q).astype(dk.dtype)
    to_w += summed(row <= column, past * q, narrow) + summed(row > column, later * k, narrow)
    put_decays(dw, see, to_w + kept_got(see, jnp.sum(w, axis=0))[None, :])


def put_decays(dw, see: Refs, got: Array) -> None:
    dw[...] = jnp.where(see["w"][...] > STRONGEST, got, 0).astype(dw.dtype)


def gradients(q, k, v, w, before, documents, strong, dy, after, chunk: int, interpret: bool) -> tuple[Array, ...]:
    """dq, dk, dv and dw."""
    K, V = k.shape[-1], v.shape[-1]
    key, value, state = tokens_seen(chunk, K), tokens_seen(chunk, V), state_seen(K, V)
    given = dict(q=(q, key), k=(k, key), v=(v, value), w=(w, key), dy=(dy, value))
    given |= dict(before=(before, state), after=(after, state)) | cuts(documents, chunk)

    def run(kernels, name, *made):
        made = [(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block) for leaf, block in made]
        return in_two(kernels, f"channels_{name}", given, made, strong, by_chunk(chunk), interpret)

    dq, dv = run((queries_at_once, queries_by_halves), "queries", (q, key), (v, value))
    given["dq"] = (dq, key)
    dk, dw = run((keys_at_once, keys_by_halves), "keys", (k, key), (w, key))
    return dq, dk, dv, dw


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def fused(q, k, v, w, h0, documents, chunk: int, interpret: bool) -> tuple[Array, Array]:
    """As `fused_channels`, for whole chunks; documents: [B, M, Q], begun in the chunk so far."""
    return fused_forward(q, k, v, w, h0, documents, chunk, interpret)[0]


def fused_forward(q, k, v, w, h0, documents, chunk, interpret):
    new, total, strong = added(k, v, w, documents, chunk, False, interpret)
    before, h = carried(new, total, h0, False, interpret)
    return (outputs(q, k, v, w, before, documents, strong, chunk, interpret), h), (q, k, v, w, h0, documents)


def fused_backward(chunk, interpret, saved, g):
    q, k, v, w, h0, documents = saved
    dy, dh = g
    new, total, strong = added(k, v, w, documents, chunk, False, interpret)
    before, _ = carried(new, total, h0, False, interpret)
    (new,) = added(q, dy, w, documents, chunk, True, interpret)
    after, dh0 = carried(new, total, dh, True, interpret)
    dq, dk, dv, dw = gradients(q, k, v, w, before, documents, strong, dy, after, chunk, interpret)
    return dq, dk, dv, dw, dh0, None


fused.defvjp(fused_forward, fused_backward)


def fused_channels(
    q: Array, k: Array, v: Array, w: Array, h0: Array, opens: Array | None, chunk: int, interpret: bool = False
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` in v's dtype, and the last state.

    q, k: [B, L, H, K]; v: [B, L, H, V]; w: [B, L, H, K], log decays, not positive; h0: [B, H, K, V], wide;
    opens: [B, L], true where the past is forgotten. K, V: 16, 32, 64 or 128; chunk: 16 to 128; bfloat16 or float32.
    """
    B, L, H = q.shape[:3]
    chunk = fitting(chunk, k, v)
    # Filled up with keys of zero and decays of none, which leave a state as it was.
    q, k, v, w = (filled(leaf, chunk) for leaf in (q, k, v, w))
    documents = None if opens is None else jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), B, H, tokens=4, states=1)
    y, h = run(q, k, v, w, h0, documents)
    return y[:, :L], h
