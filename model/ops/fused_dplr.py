"""The delta rule of channels that decay by themselves, in kernels for NVIDIA GPUs: diagonal plus low rank.

    h_t = diag(e^{w_t}) h_{t-1} + a_t (b_t^T h_{t-1}) + k_t v_t^T        y_t = q_t^T h_t

or, given beta in place of a and b, h_t = (I - beta_t k_t k_t^T) diag(e^{w_t}) h_{t-1} + beta_t k_t v_t^T. Then a is
beta k, b is -e^w k, and as v is written along a, there is no k beside. With q and b times what is left at the token of
the state before the chunk, a and k times what is left of them at its end, and s the log decays of the whole chunk, the
tokens of one that begins with h find u = T (b h + P v), and

    y = q h + R u + G v        h' = e^s h + a^T u + k^T v        T = (I - N)^{-1}

N and P are what b reads of what earlier tokens of the chunk write along a and k, R and G what q does, its own token's
too; with no k, P is the identity and G nothing. `paired` finds T, R, P and G whatever the decays, as
model/ops/fused_dplr_pairs.py has it; `solved` T b and T P v; `states` goes over the chunks of segments, as in
model/ops/fused_segments.py. Gradients of states run through the same kernel from the end, with e = T^T du for u.
Letters as in model/ops/fused_state.py; S segments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops.decays import STRONGEST, filled, in_chunks
from model.ops.fused_dplr_pairs import (
    gradient_at_once,
    gradient_by_halves,
    pairs_at_once,
    pairs_by_halves,
    to_edge,
    token,
)
from model.ops.fused_pairs import ONE, cuts, from_middle, in_two, whole
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
from model.ops.fused_state import Refs, by_chunk, fitting, launch, on_each_device, sides, state_seen, tokens_seen

Array = jax.Array
Tokens = dict[str, Array]


class Scaled(NamedTuple):
    """Tokens as states see them, narrow, [B, L, H, K] and v [B, L, H, V]; k may be None."""

    q: Array
    k: Array | None
    v: Array
    a: Array
    b: Array
    total: Array  # what chunks leave of the states before them, [B, M, H, K], wide
    strong: Array  # which chunks decay strongly, [B, H, M]
    m: Array  # log decays from the middles of chunks to after tokens, [B, L, H, K], wide


class Pairs(NamedTuple):
    """What tokens read of each other, narrow, [B, L, H, Q]; no P and G where there is no k."""

    T: Array
    R: Array
    P: Array | None = None
    G: Array | None = None


class Found(NamedTuple):
    """What the backward pass takes over."""

    pairs: Pairs  # held, as those of chunks that decay strongly are dear to find
    starts: Array  # the states that segments begin with, [B, S, H, K, V]
    maps: Array | None  # what they make of a state, [B, S, H, K, K], where there are several


# Kernels of one head of one chunk. q, k, a, b, w: [Q, K]; v, y, dy, u, e: [Q, V]; T, R, P, G: [Q, Q];
# before, after: [K, V].


def scaled_kernel(see: Refs, total, strong, m, *made, names: tuple[str, ...]):
    """What is left of the state before a chunk, [1, K], whether the chunk decays strongly, log decays from its middle,
    and scaled tokens, by name.

    All is found before any is stored: after that, what names share would be fetched and summed again.
    """
    narrow = made[0].dtype
    found = [(token(name, see) * to_edge(name, see, narrow)).astype(narrow) for name in names]
    w = see["w"][...]
    middle = from_middle(w, sides(len(w))[0] + 1, narrow)
    left, strong[...] = whole(w, see)
    total[...] = left[None, :]
    m[...] = middle
    for out, numbers in zip(made, found, strict=True):
        out[...] = numbers


def solved_kernel(see: Refs, W, own):
    """T b and T P v."""
    T, v = see["T"][...], see["v"][...]
    W[...] = dot(T, see["b"][...]).astype(W.dtype)
    v = dot(see["P"][...], v).astype(v.dtype) if "P" in see else v
    own[...] = dot(T, v).astype(own.dtype)


def outputs_kernel(see: Refs, y):
    out = dot(see["q"][...], see["before"][...]) + dot(see["R"][...], see["u"][...])
    y[...] = (out + dot(see["G"][...], see["v"][...]) if "G" in see else out).astype(y.dtype)


def pulled_kernel(see: Refs, D, own):
    """T^T a and T^T R^T dy."""
    T = see["T"][...]
    D[...] = dot(T, see["a"][...], trans_a=True).astype(D.dtype)
    du = dot(see["R"][...], see["dy"][...], trans_a=True).astype(T.dtype)
    own[...] = dot(T, du, trans_a=True).astype(own.dtype)


def values_kernel(see: Refs, dv):
    """What values get that are written along k."""
    got = dot(see["P"][...], see["e"][...], trans_a=True) + dot(see["G"][...], see["dy"][...], trans_a=True)
    dv[...] = (dot(see["k"][...], see["after"][...]) + got).astype(dv.dtype)


def on_chunks(
    name: str,
    kernels: Callable | tuple[Callable, Callable],
    given: dict[str, Array | None],
    made: list[jax.ShapeDtypeStruct],
    documents: Array | None,
    chunk: int,
    interpret: bool,
    strong: Array | None = None,
    params: tuple[int, int] | None = None,
) -> list[Array]:
    """A kernel run on heads of chunks, or two, by whether these decay strongly; by name given tokens, `[B, L, H, ...]`,
    and then states, `[B, M, H, ...]`. params: warps and stages, if not those of most."""

    def seen(leaf):
        if leaf.ndim == 3:
            return ONE
        return tokens_seen(chunk, leaf.shape[-1]) if leaf.ndim == 4 else state_seen(*leaf.shape[-2:])

    B, L, H, _ = next(iter(given.values())).shape
    given = {name: (leaf, seen(leaf)) for name, leaf in given.items() if leaf is not None}
    given |= cuts(documents, chunk)
    made = [(shape, seen(shape)) for shape in made]
    params = params or by_chunk(chunk)
    if strong is not None:
        return in_two(kernels, f"dplr_{name}", given, made, strong, params, interpret)
    return launch(kernels, f"dplr_{name}", (H, L // chunk, B), given, made, params, interpret)


def states_kernel(see: Refs, *out, chunk: int, reverse: bool):
    """States over a segment's chunks, for a tile of values.

    w, a, k: [L, K]; u, v: [L, V]; total: [M, K]; start: [K, V]. Out: the states before chunks, [M, K, V], what tokens
    find, [L, V], and the last state; or that alone.
    """
    *every, end = out
    w, a = see["w"], see["a"]
    M, narrow = w.shape[0] // chunk, w.dtype

    def step(i, h):
        i = M - 1 - i if reverse else i
        tokens = pl.ds(i * chunk, chunk)
        now = h.astype(narrow)
        new = dot(w[tokens, :], now)
        new = (new + see["u"][tokens, :] if "u" in see else new).astype(narrow)
        if every:
            every[0][i, :, :] = now
            every[1][tokens, :] = new
        added = dot(a[tokens, :], new, trans_a=True)
        if "k" in see:
            added += dot(see["k"][tokens, :], see["v"][tokens, :], trans_a=True)
        return see["total"][i, :][:, None] * h + added

    end[...] = lax.fori_loop(0, M, step, see["start"][...])


def states(given: Tokens, total, start, reverse: bool, every: bool, chunk: int, interpret: bool) -> list[Array]:
    """The states that segments end with, `[B, S, H, K, V]`, as start; before them, if asked for, those before chunks,
    `[B, M, H, K, V]`, and what tokens find, `[B, L, H, V]`.

    In reverse: their gradients, from the end. given: w, a, k, u and v; total: [B, M, H, K].
    """
    (B, S, H, K, V), (_, L, _, _), dtype = start.shape, given["w"].shape, given["w"].dtype
    M, R = L // chunk, min(V, TILE)
    key, value, segment = keys_seen(L, S, K), values_seen(L, S, R), segment_seen(S, K, R)
    blocks = dict(w=key, a=key, k=key, u=value, v=value)
    seen = {name: (leaf, blocks[name]) for name, leaf in given.items()}
    seen |= dict(total=(total, keys_seen(M, S, K)), start=(start, segment))
    made = [((B, M, H, K, V), dtype, states_seen(M, S, K, R)), ((B, L, H, V), dtype, value)] if every else []
    made += [(start.shape, start.dtype, segment)]
    made = [(jax.ShapeDtypeStruct(shape, dtype), block) for shape, dtype, block in made]
    kernel = partial(states_kernel, chunk=chunk, reverse=reverse)
    return launch(kernel, "dplr_states", (H, V // R, B * S), seen, made, in_turn(dtype), interpret)


def shape_of(x: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def unscaled(tokens: Tokens) -> Tokens:
    """What scaled tokens are made of; given beta, [B, L, H, 1], that is a key for a and b, and there is no k beside."""
    if "beta" not in tokens:
        return {name: tokens[name] for name in "qkabw"}
    return dict(q=tokens["q"], w=tokens["w"], key=tokens["k"], beta=tokens["beta"][..., None])


def scaled(tokens: Tokens, run: Callable) -> Scaled:
    v, w = tokens["v"], tokens["w"]
    B, M, H, K = w.shape[0], w.shape[1] // run.keywords["chunk"], *w.shape[2:]
    names = ("q", "a", "b") if "beta" in tokens else ("q", "a", "b", "k")
    made = [jax.ShapeDtypeStruct((B, M, H, 1, K), w.dtype), jax.ShapeDtypeStruct((B, H, M), jnp.int32), shape_of(w)]
    made += [shape_of(w, v.dtype)] * len(names)
    total, strong, m, *found = run("scaled", partial(scaled_kernel, names=names), unscaled(tokens), made)
    found = dict(k=None) | dict(zip(names, found, strict=True))
    return Scaled(**found, v=v, total=total[:, :, :, 0], strong=strong, m=m)


def paired(tokens: Tokens, x: Scaled, run: Callable) -> Pairs:
    v, chunk = tokens["v"], run.keywords["chunk"]
    made = [jax.ShapeDtypeStruct((*v.shape[:3], chunk), v.dtype)] * (2 if "beta" in tokens else 4)
    kernels, given = (pairs_at_once, pairs_by_halves), unscaled(tokens) | dict(m=x.m)
    # Few warps: what is solved is of Q by Q numbers.
    return Pairs(*run("pairs", kernels, given, made, strong=x.strong, params=(chunk // 16, 1)))


def solved(x: Scaled, pairs: Pairs, run: Callable) -> Tokens:
    """What `states` takes: T b, T P v, and what is written."""
    W, own = run("solved", solved_kernel, dict(b=x.b, v=x.v, T=pairs.T, P=pairs.P), [shape_of(x.b), shape_of(x.v)])
    return dict(w=W, a=x.a, u=own, **values_of(x))


def values_of(x: Scaled) -> Tokens:
    """What is written beside what tokens find."""
    return {} if x.k is None else dict(k=x.k, v=x.v)


def documents_of(opens: Array | None, chunk: int) -> Array | None:
    """How many documents have begun in the chunk so far, `[B, M, Q]`."""
    return None if opens is None else jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def fused(tokens: Tokens, h0, opens, chunk: int, interpret: bool) -> tuple[Array, Array]:
    """As `fused_dplr`, for whole chunks."""
    return fused_forward(tokens, h0, opens, chunk, interpret)[0]


def fused_forward(tokens, h0, opens, chunk, interpret):
    run = partial(on_chunks, documents=documents_of(opens, chunk), chunk=chunk, interpret=interpret)
    x = scaled(tokens, run)
    pairs = paired(tokens, x, run)
    given = solved(x, pairs, run)
    onward = partial(states, total=x.total, reverse=False, chunk=chunk, interpret=interpret)
    maps = maps_of(partial(onward, dict(w=given["w"], a=x.a), every=False), h0, x.total.shape[1])
    starts = starts_of(partial(onward, given, every=False), maps, h0)
    before, u, ends = onward(given, start=starts, every=True)
    given = dict(q=x.q, u=u, before=before, R=pairs.R, G=pairs.G, v=x.v)
    (y,) = run("outputs", outputs_kernel, given, [shape_of(x.v)])
    return (y, ends[:, -1]), (tokens, opens, Found(pairs, starts, maps))


def fused_backward(chunk, interpret, saved, g):
    tokens, opens, (pairs, starts, maps) = saved
    dy, dh = g
    run = partial(on_chunks, documents=documents_of(opens, chunk), chunk=chunk, interpret=interpret)
    x = scaled(tokens, run)
    through = partial(states, total=x.total, chunk=chunk, interpret=interpret)
    before, u, _ = through(solved(x, pairs, run), start=starts, reverse=False, every=True)
    given = dict(a=x.a, dy=dy, T=pairs.T, R=pairs.R)
    D, own = run("pulled", pulled_kernel, given, [shape_of(x.a), shape_of(dy)])
    back = partial(through, dict(w=D, a=x.b, u=own, k=x.q, v=dy), reverse=True)
    lasts = starts_of(partial(back, every=False), maps, dh, reverse=True)
    after, e, firsts = back(start=lasts, every=True)
    given = unscaled(tokens) | dict(m=x.m, u=u, v=x.v, dy=dy, e=e, before=before, after=after)

    def gradient(name: str, last: bool = False, **got: Array) -> list[Array]:
        made = [shape_of(tokens.get(name, tokens["k"])), shape_of(tokens["w"])]
        made += [shape_of(given["beta"])] if "dk" in got else []
        kernels = partial(gradient_at_once, name=name, last=last), partial(gradient_by_halves, name=name)
        return run(f"gradient_{name}", kernels, given | got, made, strong=x.strong)

    dq, dw = gradient("q")
    if "beta" in tokens:
        db, dw = gradient("b", dw=dw)
        dk, dw, d_beta = gradient("a", last=True, dw=dw, dk=db)
        return dict(q=dq, k=dk, v=e, w=dw, beta=d_beta[..., 0]), firsts[:, 0], None
    da, dw = gradient("a", dw=dw)
    dk, dw = gradient("k", dw=dw)
    db, dw = gradient("b", last=True, dw=dw)
    given = dict(k=x.k, e=e, dy=dy, after=after, P=pairs.P, G=pairs.G)
    (dv,) = run("gradient_v", values_kernel, given, [shape_of(x.v)])
    return dict(q=dq, k=dk, v=dv, w=dw, a=da, b=db), firsts[:, 0], None


fused.defvjp(fused_forward, fused_backward)


def fused_dplr(
    tokens: Tokens, h0: Array, opens: Array | None, chunk: int, interpret: bool = False
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` in v's dtype, and the last state.

    tokens: q, k, [B, L, H, K]; v: [B, L, H, V], bfloat16 or float32; w: [B, L, H, K], log decays, not positive, wide;
    and a and b, as k, or beta, [B, L, H], wide. h0: [B, H, K, V], wide; opens: [B, L], true where the past is
    forgotten. K, V: 16, 32, 64 or 128; chunk: 16 to 64.
    """
    q, v, w = (tokens[name] for name in "qvw")
    B, L, H = q.shape[:3]
    chunk = fitting(chunk, q.astype(v.dtype), v)
    w = jnp.maximum(w, STRONGEST)
    w = w if opens is None else jnp.where(opens[..., None, None], 0, w)  # there is nothing that could decay
    # Filled up with tokens of zero and decays of none, which leave a state as it was.
    tokens = {name: filled(leaf, chunk) for name, leaf in (tokens | dict(w=w)).items()}
    opens = None if opens is None else filled(opens, chunk)
    run = on_each_device(partial(fused, chunk=chunk, interpret=interpret), B, H, tokens=1, states=1)
    y, h = run(tokens, h0, opens)
    return y[:, :L], h
