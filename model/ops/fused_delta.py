"""The gated delta rule (https://arxiv.org/abs/2406.06484, https://arxiv.org/abs/2412.06464) in kernels for NVIDIA GPUs.

    h_t = (I - beta_t k_t k_t^T) e^{a_t} h_{t-1} + beta_t k_t v_t^T        y_t = q_t h_t

With u_t = beta_t (v_t - e^{a_t} h_{t-1}^T k_t) this is linear attention with values u. Within a chunk they solve
(I + A) u = beta (v - k h), A below its diagonal, h the state before the chunk, all decayed: so u = T beta v - W h with
T = (I + A)^{-1} and W = T beta k. `solved` finds T, W and T beta v in every chunk; `states` runs over the chunks of a
segment, all segments at once, as model/ops/fused_segments.py has it; outputs are those of linear attention. Letters as
in model/ops/fused_state.py; S segments.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops import fused_state as linear
from model.ops.decays import STRONGEST, filled, in_chunks
from model.ops.fused_pairs import meeting
from model.ops.fused_segments import (
    TILE,
    in_turn,
    keys_seen,
    maps_of,
    segment_seen,
    starts_of,
    states_seen,
    values_seen,
)
from model.ops.fused_state import (
    Past,
    Refs,
    by_chunk,
    decays_got,
    fitting,
    launch,
    named,
    on_each_device,
    past_of,
    past_seen,
    scaled,
    sides,
    state_seen,
    tokens_seen,
    weighed,
)

Array = jax.Array


def inverse(A: Array, exact: Any) -> Array:
    """`(I + A)^{-1}` for A below its diagonal: that of spans of 1, 2, 4, ... rows, two joined at a time."""
    Q = A.shape[0]
    row, column = sides(Q)
    eye = (row == column).astype(A.dtype)

    def join(level, T):
        return T - dot(dot(T, jnp.where(meeting(level, row, column), A, 0), precision=exact), T, precision=exact)

    first = eye - jnp.where(meeting(0, row, column), A, 0)
    return lax.fori_loop(1, (Q - 1).bit_length(), join, first)


def below(scores: Array, see: Refs) -> Array:
    """As `weighed`, without a token's own."""
    row, column = sides(scores.shape[0])
    return jnp.where(row > column, weighed(scores, see), 0)


def solved_kernel(see: Refs, W, U, *found):
    """W, [Q, K], T beta v, [Q, V], and T, [Q, Q], unless it is given, of one head of one chunk."""
    k, v = see["k"][...], see["v"][...]
    beta = see["beta"][...]
    if found:
        exact = lax.Precision.HIGHEST if k.dtype == beta.dtype else None
        T = inverse(beta[:, None] * below(dot(k, k, trans_b=True), see), exact).astype(k.dtype)
        found[0][...] = T
    else:
        T = see["T"][...]
    # The columns of T are weighed, not the rows of what it meets, which are longer.
    to_v = T * beta[None, :]
    to_k = to_v * see["to_token"][...][None, :] if "to_token" in see else to_v
    W[...] = dot(to_k.astype(k.dtype), k).astype(W.dtype)
    U[...] = dot(to_v.astype(v.dtype), v).astype(U.dtype)


def solved(k: Array, v: Array, beta: Array, past: Past, T: Array | None, chunk: int, interpret: bool) -> list[Array]:
    """W, as k, T beta v, as v, and T, `[B, L, H, Q]`, unless it is given. beta: [B, H, M, Q]."""
    (B, L, H, K), V = k.shape, v.shape[-1]
    key, value, square = (tokens_seen(chunk, size) for size in (K, V, chunk))
    given = dict(k=(k, key), v=(v, value), T=(T, square), beta=(beta, past_seen(chunk).whole), **named(past, chunk))
    made = [(k.shape, key), (v.shape, value)] + ([((B, L, H, chunk), square)] if T is None else [])
    made = [(jax.ShapeDtypeStruct(shape, k.dtype), block) for shape, block in made]
    return launch(solved_kernel, "delta_solved", (H, L // chunk, B), given, made, by_chunk(chunk), interpret)


def states_kernel(see: Refs, *out, chunk: int, reverse: bool):
    """States over a segment's chunks, for a tile of values; in reverse, their gradients.

    w, k, q: [T, K]; u, dy: [T, V]; to_end, to_token: [T]; total: [M]; start: [K, V]. Out: the states before chunks,
    [M, K, V], what values become, [T, V], and the last state; or that alone.
    """
    *every, end = out
    w, u, total = see["w"], see.get("u"), see.get("total")
    n = w.shape[0] // chunk

    def step(i, h):
        i = n - 1 - i if reverse else i
        tokens = pl.ds(i * chunk, chunk)

        def weighted(x, by):
            """The rows of the smaller factor of a product: those of keys and queries stay as they were fetched."""
            return scaled(x, see[by][tokens] if by in see else None)

        now = h.astype(w.dtype)
        left = h if total is None else total[i] * h
        if reverse:
            new = u[tokens, :] + weighted(dot(see["k"][tokens, :], now), "to_end")
            got = weighted(see["dy"][tokens, :], "to_token").astype(w.dtype)
            after = left + dot(see["q"][tokens, :], got, trans_a=True)
            after -= dot(w[tokens, :], new.astype(w.dtype), trans_a=True)
        else:
            new = -dot(w[tokens, :], now)
            new = new if u is None else new + u[tokens, :]
            after = left + dot(see["k"][tokens, :], weighted(new, "to_end").astype(w.dtype), trans_a=True)
        if every:
            every[0][i, :, :] = now
            every[1][tokens, :] = new.astype(every[1].dtype)
        return after

    end[...] = lax.fori_loop(0, n, step, see["start"][...])


def states(given: dict[str, Array | None], past: Past, start: Array, chunk: int, reverse: bool, every: bool, interpret):
    """The states that segments end with, `[B, S, H, K, V]`; before them, if asked for, those before every chunk,
    `[B, M, H, K, V]`, and u. start: [B, S, H, K, V]; given: w, k, q, u and dy, each `[B, L, H, ...]`.
    """
    (B, S, H, K, V), L, dtype = start.shape, given["w"].shape[1], given["w"].dtype
    R = min(V, TILE)
    key, value, segment = keys_seen(L, S, K), values_seen(L, S, R), segment_seen(S, K, R)
    token = pl.BlockSpec((None, None, L // S), lambda h, t, s: (s // S, h, s % S))
    chunks = pl.BlockSpec((None, None, L // S // chunk), lambda h, t, s: (s // S, h, s % S))
    blocks = dict(w=key, k=key, q=key, u=value, dy=value)
    seen = {name: (leaf, blocks[name]) for name, leaf in given.items()}
    flat = {"to_end": past.to_end, "to_token": past.to_token if reverse else None}
    seen |= {name: (None if leaf is None else leaf.reshape(B, H, L), token) for name, leaf in flat.items()}
    seen |= dict(total=(past.total, chunks), start=(start, segment))
    made = [(jax.ShapeDtypeStruct(start.shape, start.dtype), segment)]
    if every:
        made.insert(0, (jax.ShapeDtypeStruct((B, L, H, V), dtype), value))
        made.insert(0, (jax.ShapeDtypeStruct((B, L // chunk, H, K, V), dtype), states_seen(L // chunk, S, K, R)))
    kernel = partial(states_kernel, chunk=chunk, reverse=reverse)
    return launch(kernel, "delta_states", (H, V // R, B * S), seen, made, in_turn(dtype), interpret)


def pulled_kernel(see: Refs, du):
    """What values get from the outputs of their own chunk. dy, du: [Q, V]."""
    dy = see["dy"][...]
    weights = weighed(dot(see["q"][...], see["k"][...], trans_b=True), see).astype(dy.dtype)
    du[...] = dot(weights, dy, trans_a=True).astype(du.dtype)


def pulled(q: Array, k: Array, dy: Array, past: Past, chunk: int, interpret: bool) -> Array:
    (B, L, H, K), V = k.shape, dy.shape[-1]
    key, value = tokens_seen(chunk, K), tokens_seen(chunk, V)
    given = dict(q=(q, key), k=(k, key), dy=(dy, value), **named(past, chunk))
    made = [(jax.ShapeDtypeStruct(dy.shape, dy.dtype), value)]
    return launch(pulled_kernel, "delta_pulled", (H, L // chunk, B), given, made, by_chunk(chunk), interpret)[0]


def keys_kernel(see: Refs, dk_all, dv, d_beta, *d_past):
    """What keys, values, beta and decays get from the values u of one head of one chunk, given what these get, du.

    As u = T beta (v - k h), beta (v - k h) gets E = T^T du, and A gets -E u^T. T: [Q, Q]; before: [K, V].
    """
    k, v, beta = see["k"][...], see["v"][...], see["beta"][...]
    narrow, wide = k.dtype, beta.dtype
    E = dot(see["T"][...], see["du"][...], trans_a=True)
    dv[...] = (E * beta[:, None]).astype(dv.dtype)
    E = E.astype(narrow)
    to_keys = scaled(-dot(E, see["before"][...], trans_b=True), see.get("to_token"))
    scores = below(dot(k, k, trans_b=True), see)
    dA = -dot(E, see["u"][...], trans_b=True)
    by_key = jnp.sum(to_keys * k, axis=1)
    d_beta[...] = jnp.sum(E.astype(wide) * v, axis=1) + by_key + jnp.sum(dA * scores, axis=1)
    d_scores = (below(dA, see) * beta[:, None]).astype(narrow)
    got = see["dk"][...] + to_keys * beta[:, None] + dot(d_scores, k) + dot(d_scores, k, trans_a=True)
    dk_all[...] = got.astype(dk_all.dtype)
    if d_past:
        d_inner, d_to_token = d_past
        d_to_token[...] = by_key * beta
        # As in linear attention: token t matters to all pairs j < t <= i.
        row, column = sides(scores.shape[0])
        exact = lax.Precision.HIGHEST if narrow == wide else None
        pairs = (dA * scores * beta[:, None]).astype(narrow)
        to_t = dot(pairs, (row < column).astype(narrow), precision=exact)
        d_inner[...] = jnp.sum(jnp.where(row >= column, to_t, 0), axis=0)


def keys(k, v, beta, T, u, du, before, dk, past: Past, chunk: int, interpret: bool) -> list[Array]:
    """All that k gets, dv, d_beta, and of the log decays what they get between tokens and from the state before."""
    (B, L, H, K), V = k.shape, v.shape[-1]
    key, value, square = (tokens_seen(chunk, size) for size in (K, V, chunk))
    token = past_seen(chunk).whole
    given = dict(k=(k, key), v=(v, value), beta=(beta, token), T=(T, square), u=(u, value), du=(du, value))
    given |= dict(before=(before, state_seen(K, V)), dk=(dk, key), **named(past, chunk))
    made = [(k, key), (v, value), (beta, token)] + ([] if past.whole is None else [(beta, token)] * 2)
    made = [(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block) for leaf, block in made]
    return launch(keys_kernel, "delta_keys", (H, L // chunk, B), given, made, by_chunk(chunk), interpret)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def fused(q, k, v, beta, a, h0, documents, chunk: int, interpret: bool) -> tuple[Array, Array]:
    """As `fused_delta`, for whole chunks: beta, a: [B, H, M, Q]; documents: [B, M, Q], begun in the chunk so far."""
    return fused_forward(q, k, v, beta, a, h0, documents, chunk, interpret)[0]


def fused_forward(q, k, v, beta, a, h0, documents, chunk, interpret):
    past = past_of(a, documents, q.shape[2], h0.dtype)
    w, u, T = solved(k, v, beta, past, None, chunk, interpret)
    run = partial(states, past=past, chunk=chunk, reverse=False, interpret=interpret)
    maps = maps_of(partial(run, dict(w=w, k=k), every=False), h0, q.shape[1] // chunk)
    starts = starts_of(partial(run, dict(w=w, k=k, u=u), every=False), maps, h0)
    before, u, ends = run(dict(w=w, k=k, u=u), start=starts, every=True)
    y = linear.outputs(q, k, u, before, past, chunk, interpret)
    return (y, ends[:, -1]), (q, k, v, beta, a, documents, T, starts, maps)


def fused_backward(chunk, interpret, saved, g):
    q, k, v, beta, a, documents, T, starts, maps = saved
    dy, dh = g
    past = past_of(a, documents, q.shape[2], starts.dtype)
    w, u = solved(k, v, beta, past, T, chunk, interpret)
    before, u, _ = states(dict(w=w, k=k, u=u), past, starts, chunk, False, True, interpret)
    given = dict(w=w, k=k, q=q, u=pulled(q, k, dy, past, chunk, interpret), dy=dy)
    run = partial(states, given, past, chunk=chunk, reverse=True, interpret=interpret)
    ends = starts_of(partial(run, every=False), maps, dh, reverse=True)
    after, du, firsts = run(start=ends, every=True)
    dq, dk, _, da = linear.gradients(q, k, u, before, past, dy, after, chunk, interpret, values=False)
    dk, dv, d_beta, *d_past = keys(k, v, beta, T, u, du, before, dk, past, chunk, interpret)
    if d_past:
        da += decays_got(*d_past, jnp.zeros_like(beta), jnp.zeros_like(past.total))
    return dq, dk, dv, d_beta, da, firsts[:, 0], None


fused.defvjp(fused_forward, fused_backward)


def fused_delta(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    a: Array | None,
    h0: Array,
    opens: Array | None,
    chunk: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` in v's dtype, and the last state.

    q, k: [B, L, H, K]; v: [B, L, H, V]; beta: [B, L, H], wide; a: [B, L, H], log decays, not positive, wide, or None;
    h0: [B, H, K, V], wide; opens: [B, L], true where the past is forgotten. K, V: 16, 32, 64 or 128; chunk: 16 to 64.
    """
    B, L, H = q.shape[:3]
    chunk = fitting(chunk, k, v)
    # Filled up with keys of zero and decays of none, which leave a state as it was.
    q, k, v = (filled(leaf, chunk) for leaf in (q, k, v))
    beta = in_chunks(jnp.moveaxis(beta, 2, 1), chunk, axis=2)
    a = None if a is None else in_chunks(jnp.moveaxis(jnp.maximum(a, STRONGEST), 2, 1), chunk, axis=2)
    documents = None if opens is None else jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), B, H, states=3)
    y, h = run(q, k, v, beta, a, h0, documents)
    return y[:, :L], h
