"""Linear attention whose channels decay by themselves, in kernels for NVIDIA GPUs.

    h_t = diag(e^{w_t}) h_{t-1} + k_t v_t^T        y_t = q_t h_t

Kernels and letters as in model/ops/fused_state.py. The decay between two tokens of a chunk enters a matrix product as
two factors, one of each token. Where the chunk as a whole decays little, both are measured from its middle, as one of
them may then exceed 1: one product serves all pairs. Else spans of 1, 2, 4, ... tokens are joined in twos and measured
from where they meet, as in model/ops/wkv.py: no factor exceeds 1, and nothing is divided by a decay.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops.decays import STRONGEST, in_chunks
from model.ops.fused_state import Refs, carried, launch, on_each_device, sides, state_seen, tokens_seen

Array = jax.Array

LITTLE = 40.0  # of log decay between the middle of a chunk and its ends: two factors of e^40 can be multiplied
PARAMS = {  # warps and stages by kernel
    "added": (4, 1),
    "outputs": (8, 1),
    "gradients": (8, 1),
}


def summed(seen: Array, x: Array, dtype: Any) -> Array:
    """For each token the sum of wide numbers over those that it sees: a product, exact enough for tokens of a dtype."""
    if dtype == x.dtype:
        return dot(seen.astype(dtype), x, precision=lax.Precision.HIGHEST)
    high = x.astype(dtype)
    low = (x - high).astype(dtype)
    seen = seen.astype(dtype)
    return dot(seen, high) + dot(seen, low)


def to_tokens(w: Array, see: Refs, dtype: Any) -> tuple[Array, Array]:
    """Log decays from before the chunk to its tokens, and what is left there of the state before it, [Q, K]."""
    row, column = sides(w.shape[0])
    sums = summed(row >= column, w, dtype)
    left = jnp.exp(sums)
    return sums, left if "documents" not in see else jnp.where(see["documents"][...][:, None] == 0, left, 0)


def to_ends(w: Array, see: Refs, dtype: Any) -> Array:
    """What is left of tokens at the end of the chunk, [Q, K]."""
    row, column = sides(w.shape[0])
    left = jnp.exp(summed(row < column, w, dtype))
    return left if "documents" not in see else jnp.where(see["last"][...][:, None] != 0, left, 0)


def added_kernel(see: Refs, out, *total, reverse: bool):
    """`(left k)^T v`, what a chunk adds to the state after it, and what it leaves of that before; in reverse, of q."""
    k, w = see["k"][...], see["w"][...].astype(jnp.float32)
    left = to_tokens(w, see, k.dtype)[1] if reverse else to_ends(w, see, k.dtype)
    out[...] = dot((k * left).astype(k.dtype), see["v"][...], trans_a=True).astype(out.dtype)
    for every in total:
        kept = jnp.exp(jnp.sum(w, axis=0))
        every[...] = kept if "documents" not in see else jnp.where(see["none"][...] != 0, kept, 0)


def added(k, v, w, documents, chunk: int, reverse: bool, interpret: bool) -> list[Array]:
    """As in fused_state, and unless in reverse what chunks leave of a state, `[B, H, M, K]`."""
    (B, L, H, K), V = k.shape, v.shape[-1]
    M = L // chunk
    given = dict(k=(k, tokens_seen(chunk, K)), v=(v, tokens_seen(chunk, V)), w=(w, tokens_seen(chunk, K)))
    made = [(jax.ShapeDtypeStruct((B, M, H, K, V), k.dtype), state_seen(K, V))]
    if not reverse:
        block = pl.BlockSpec((None, None, None, K), lambda h, m, b: (b, h, m, 0))
        made.append((jax.ShapeDtypeStruct((B, H, M, K), jnp.float32), block))
    kernel, grid = partial(added_kernel, reverse=reverse), (H, M, B)
    return launch(kernel, "channels_added", grid, given | cuts(documents, chunk), made, PARAMS["added"], interpret)


def cuts(documents: Array | None, chunk: int) -> dict[str, tuple[Array, pl.BlockSpec]]:
    """The documents of tokens, which of them the chunk ends with, and whether none begins in it."""
    if documents is None:
        return {}
    token = pl.BlockSpec((None, None, chunk), lambda h, m, b: (b, m, 0))
    last = (documents == documents[..., -1:]).astype(jnp.int32)
    none = (documents[..., -1] == 0).astype(jnp.int32)
    return dict(
        documents=(documents, token),
        last=(last, token),
        none=(none, pl.BlockSpec((None, None), lambda h, m, b: (b, m))),
    )


def same_document(see: Refs, Q: int) -> Array:
    """Whether tokens i and j are of one document, at [i, j], j not after i."""
    row, column = sides(Q)
    if "documents" not in see:
        return row >= column
    documents = see["documents"][...]
    return (row >= column) & (documents[:, None] == documents[None, :])


def between(level: Any, token: Array, other: Array) -> Array:
    """Whether another token lies between a token and where its span of 2^level meets its neighbour."""
    place = (((token >> (level + 1)) << 1) | 1) << level
    earlier, later = (token < other) & (other < place), (place <= other) & (other <= token)
    return earlier | later


def meeting(level: Any, i: Array, j: Array) -> Array:
    """Whether token i is of a span of 2^level that meets that of token j, the earlier one."""
    return (i >> (level + 1) == j >> (level + 1)) & ((i >> level) & 1 == 1) & ((j >> level) & 1 == 0)


def from_middle(sums: Array, w: Array) -> tuple[Array, Array]:
    """Log decays from the chunk's middle to tokens, above 0 for those before it; and whether they are little."""
    half = lax.broadcasted_iota(jnp.int32, w.shape, 0) < w.shape[0] // 2
    s = sums - jnp.sum(jnp.where(half, w, 0), axis=0)[None, :]
    return s, jnp.max(jnp.abs(s)) <= LITTLE


def weights_of(q: Array, k: Array, w: Array, sums: Array) -> Array:
    """What tokens j < i weigh at tokens i, at [i, j]; elsewhere anything finite or not."""
    s, little = from_middle(sums, w)
    Q = q.shape[0]
    row, column = sides(Q)

    def at_once():
        return dot((q * jnp.exp(s)).astype(q.dtype), (k * jnp.exp(-s)).astype(k.dtype), trans_b=True)

    def by_halves():
        def step(level, weights):
            pairs, decay = meeting(level, row, column), jnp.exp(summed(between(level, row, column), w, q.dtype))
            met = dot((q * decay).astype(q.dtype), (k * decay).astype(k.dtype), trans_b=True)
            return weights + jnp.where(pairs, met, 0)

        return lax.fori_loop(0, (Q - 1).bit_length(), step, jnp.zeros((Q, Q), w.dtype))

    return lax.cond(little, at_once, by_halves)


def with_itself(q: Array, k: Array, weights: Array, seen: Array) -> Array:
    """The weights of earlier tokens that are seen, and a token's own."""
    row, column = sides(q.shape[0])
    own = jnp.sum(q.astype(weights.dtype) * k, axis=1)
    return jnp.where(row == column, own[:, None], jnp.where(seen, weights, 0))


def outputs_kernel(see: Refs, y):
    """One head of one chunk. q, k, w: [Q, K]; v, y: [Q, V]; before: [K, V]."""
    q, k, v, w = see["q"][...], see["k"][...], see["v"][...], see["w"][...].astype(jnp.float32)
    sums, left = to_tokens(w, see, q.dtype)
    past = dot((q * left).astype(q.dtype), see["before"][...])
    weights = with_itself(q, k, weights_of(q, k, w, sums), same_document(see, len(q)))
    y[...] = (past + dot(weights.astype(v.dtype), v)).astype(y.dtype)


def outputs(q, k, v, w, before, documents, chunk: int, interpret: bool) -> Array:
    (B, L, H, K), V = q.shape, v.shape[-1]
    key, value = tokens_seen(chunk, K), tokens_seen(chunk, V)
    given = dict(q=(q, key), k=(k, key), v=(v, value), w=(w, key), before=(before, state_seen(K, V)))
    made = [(jax.ShapeDtypeStruct(v.shape, v.dtype), value)]
    grid = (H, L // chunk, B)
    given |= cuts(documents, chunk)
    return launch(outputs_kernel, "channels_outputs", grid, given, made, PARAMS["outputs"], interpret)[0]


def pairs_got(q: Array, k: Array, w: Array, sums: Array, d_scores: Array, got: Array) -> tuple[Array, ...]:
    """Of pairs of tokens j < i: the weights, and what q, k and the decays get; the decays also the sums of later `got`.

    d_scores: what the scores get, at [i, j], zero but for such pairs.
    """
    s, little = from_middle(sums, w)
    Q, wide, narrow = q.shape[0], w.dtype, q.dtype
    row, column = sides(Q)

    def at_once():
        in_q, in_k = jnp.exp(s), jnp.exp(-s)
        scaled_q, scaled_k = (q * in_q).astype(narrow), (k * in_k).astype(narrow)
        weights = dot(scaled_q, scaled_k, trans_b=True)
        dq = in_q * dot(d_scores.astype(narrow), scaled_k)
        dk = in_k * dot(d_scores.astype(narrow), scaled_q, trans_a=True)
        # Pairs with i at a token or later, less those with j there too.
        return weights, dq, dk, summed(row <= column, got + q * dq - k * dk, narrow)

    def by_halves():
        def step(level, found):
            weights, dq, dk, dw = found
            pairs, decay = meeting(level, row, column), jnp.exp(summed(between(level, row, column), w, narrow))
            scaled_q, scaled_k = (q * decay).astype(narrow), (k * decay).astype(narrow)
            here = jnp.where(pairs, d_scores, 0).astype(narrow)
            to_q, to_k = decay * dot(here, scaled_k), decay * dot(here, scaled_q, trans_a=True)
            weights += jnp.where(pairs, dot(scaled_q, scaled_k, trans_b=True), 0)
            dw += summed(between(level, column, row), q * to_q + k * to_k, narrow)
            return weights, dq + to_q, dk + to_k, dw

        none = jnp.zeros(w.shape, wide)
        start = jnp.zeros((Q, Q), wide), none, none, summed(row <= column, got, narrow)
        return lax.fori_loop(0, (Q - 1).bit_length(), step, start)

    return lax.cond(little, at_once, by_halves)


def gradients_kernel(see: Refs, dq, dk, dv, dw):
    """What one head of one chunk's tokens get. dy: [Q, V]; before, after: [K, V], `after` the gradient of the later."""
    q, k, w, dy = see["q"][...], see["k"][...], see["w"][...].astype(jnp.float32), see["dy"][...]
    Q, narrow = q.shape[0], q.dtype
    row, column = sides(Q)
    seen = same_document(see, Q)
    sums, left = to_tokens(w, see, narrow)
    to_end = to_ends(w, see, narrow)
    past = left * dot(dy, see["before"][...], trans_b=True)
    later = to_end * dot(see["v"][...], see["after"][...], trans_b=True)
    d_scores = jnp.where(seen, dot(dy, see["v"][...], trans_b=True), 0)
    own = jnp.sum(jnp.where(row == column, d_scores, 0), axis=1)[:, None]
    d_scores = jnp.where(row > column, d_scores, 0)
    weights, to_q, to_k, to_w = pairs_got(q, k, w, sums, d_scores, past * q)
    dq[...] = (past + to_q + own * k).astype(dq.dtype)
    dk[...] = (later + to_k + own * q).astype(dk.dtype)
    kept = jnp.exp(jnp.sum(w, axis=0)) * jnp.sum(see["before"][...].astype(w.dtype) * see["after"][...], axis=1)
    if "documents" in see:
        kept = jnp.where(see["none"][...] != 0, kept, 0)
    dw[...] = (to_w + summed(row > column, later * k, narrow) + kept[None, :]).astype(dw.dtype)
    weights = with_itself(q, k, weights, seen).astype(dy.dtype)
    dv[...] = (dot((k * to_end).astype(narrow), see["after"][...]) + dot(weights, dy, trans_a=True)).astype(dv.dtype)


def gradients(q, k, v, w, before, documents, dy, after, chunk: int, interpret: bool) -> list[Array]:
    """dq, dk, dv and dw."""
    (B, L, H, K), V = q.shape, v.shape[-1]
    key, value, state = tokens_seen(chunk, K), tokens_seen(chunk, V), state_seen(K, V)
    given = dict(q=(q, key), k=(k, key), v=(v, value), w=(w, key), dy=(dy, value))
    given |= dict(before=(before, state), after=(after, state)) | cuts(documents, chunk)
    made = [(q, key), (k, key), (v, value), (w, key)]
    made = [(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block) for leaf, block in made]
    grid = (H, L // chunk, B)
    return launch(gradients_kernel, "channels_gradients", grid, given, made, PARAMS["gradients"], interpret)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def fused(q, k, v, w, h0, documents, chunk: int, interpret: bool) -> tuple[Array, Array]:
    """As `fused_channels`, for whole chunks; documents: [B, M, Q], begun in the chunk so far."""
    return fused_forward(q, k, v, w, h0, documents, chunk, interpret)[0]


def fused_forward(q, k, v, w, h0, documents, chunk, interpret):
    new, total = added(k, v, w, documents, chunk, False, interpret)
    before, h = carried(new, total, h0, False, interpret)
    return (outputs(q, k, v, w, before, documents, chunk, interpret), h), (q, k, v, w, h0, documents)


def fused_backward(chunk, interpret, saved, g):
    q, k, v, w, h0, documents = saved
    dy, dh = g
    new, total = added(k, v, w, documents, chunk, False, interpret)
    before, _ = carried(new, total, h0, False, interpret)
    (new,) = added(q, dy, w, documents, chunk, True, interpret)
    after, dh0 = carried(new, total, dh, True, interpret)
    dq, dk, dv, dw = gradients(q, k, v, w, before, documents, dy, after, chunk, interpret)
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
    w = jnp.maximum(w, STRONGEST)
    # Filled up with keys of zero and decays of none, which leave a state as it was.
    q, k, v, w = (in_chunks(leaf, chunk).reshape(B, -1, *leaf.shape[2:]) for leaf in (q, k, v, w))
    documents = None if opens is None else jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), B, H, tokens=4, states=1)
    y, h = run(q, k, v, w, h0, documents)
    return y[:, :L], h
