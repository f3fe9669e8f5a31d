"""The delta rule of channels that decay by themselves, in kernels for NVIDIA GPUs: diagonal plus low rank.

    h_t = diag(e^{w_t}) h_{t-1} + a_t (b_t^T h_{t-1}) + k_t v_t^T        y_t = q_t^T h_t

or, given beta in place of a and b, h_t = (I - beta_t k_t k_t^T) diag(e^{w_t}) h_{t-1} + beta_t k_t v_t^T. Then a is
beta k, b is -e^w k, and as v is written along a, there is no k beside. Decays are measured from the middle of a chunk.
With q and b times what is left of it at the token, k and a divided by that, and the state likewise, nothing decays any
more; in a chunk that begins with h the tokens then find u = T (b h + P v), and

    y = q h + R u + G v        h' = h + a^T u + k^T v        T = (I - N)^{-1}

with N = b a^T and P = b k^T below their diagonals, R = q a^T and G = q k^T with them; with no k, P is the identity and
G nothing. `solved` finds T, T b and T P v in every chunk; `states` goes over the chunks of segments, as in
model/ops/fused_segments.py. Gradients of states run through the same kernel from the end, with E = T^T du for u. All
that needs chunks that decay little: a call with any other is left to products that take any decay. Letters as in
model/ops/fused_state.py; S segments.
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
from model.ops.fused_channels import LITTLE, cuts, from_middle, halves, rows, same_document, summed
from model.ops.fused_delta import inverse
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

# What is beside a name in what tokens add to states, a u^T + k v^T, and to their gradients, q dy^T + b e^T.
BESIDE = dict(a="u", k="v", q="dy", b="e")
READ = ("q", "dy", "b", "e")  # of the state before; the others write, and see the gradient of the later state


class Scaled(NamedTuple):
    """Tokens as measured from the middle of their chunks, narrow, [B, L, H, K] and v [B, L, H, V]; k may be None."""

    q: Array
    k: Array | None
    v: Array
    a: Array
    b: Array
    begins: Array  # what states are scaled by as a chunk begins, [B, M, H, K], wide
    ends: Array  # and as it ends


class Found(NamedTuple):
    """What the backward pass takes over."""

    T: Array  # [B, L, H, Q]
    starts: Array  # the states that segments begin with, [B, S, H, K, V]
    maps: Array | None  # what they make of a state, [B, S, H, K, K], where there are several


# Kernels of one head of one chunk. q, k, a, b, w: [Q, K]; v, y, dy, u, e: [Q, V]; T: [Q, Q]; before, after: [K, V].


def with_own(name: str, see: Refs) -> int:
    """1 where tokens of a name are scaled by their own decay too, else 0.

    b reads the state before that; given beta, b has that decay itself.
    """
    return 0 if name == "b" and "beta" not in see else 1


def unscaled(name: str, see: Refs) -> Array:
    if "beta" not in see or name == "q":
        return see[name][...]
    return see["beta"][...] * see["key"][...] if name == "a" else -see["key"][...]


def to_scale(name: str, see: Refs, narrow: Any) -> Array:
    """The logs of what tokens of a name are multiplied by: decays from the chunk's middle, or towards it."""
    row, _ = sides(see["w"].shape[0])
    s = from_middle(see["w"][...], row + with_own(name, see), narrow)
    return s if name in READ else -s


def scaled_kernel(see: Refs, *made, names: tuple[str, ...]):
    """What scales states as a chunk begins and ends, [1, K], and scaled tokens, by name.

    All is found before any is stored: after that, what names share would be fetched and summed again.
    """
    narrow = made[-1].dtype
    found = [jnp.exp(half)[None, :] for half in halves(see["w"][...])]
    found += [(unscaled(name, see) * jnp.exp(to_scale(name, see, narrow))).astype(narrow) for name in names]
    for out, numbers in zip(made, found, strict=True):
        out[...] = numbers


def product(see: Refs, reader: str, written: str) -> Array:
    """What tokens read of what those before them write, [Q, Q]; only queries see what their own token does."""
    row, column = sides(see[reader].shape[0])
    seen = same_document(see, len(row))
    seen = seen if reader in ("q", "dy") else seen & (row > column)
    met = dot(see[reader][...], see[written][...], trans_b=True)
    return jnp.where(seen, met, 0).astype(see[reader].dtype)


def of_state(see: Refs, name: str) -> Array:
    """What tokens read of the state before the chunk; or, of the later state's gradient, what they write gets."""
    state, seen = ("before", "first") if name in READ else ("after", "last")
    return rows(dot(see[name][...], see[state][...], trans_b=name not in BESIDE), see, seen)


def of_tokens(see: Refs, name: str) -> Array:
    """Likewise, of the tokens of the chunk: what is beside the names that they meet."""
    reads, got = name in READ, 0
    for pair in BESIDE.items():
        met, beside = pair if name in BESIDE else pair[::-1]
        if met in see and (met in READ) != reads:
            weights = product(see, name, met) if reads else product(see, met, name)
            got += dot(weights, see[beside][...], trans_a=not reads)
    return got


def solved_kernel(see: Refs, W, own, *found):
    """T b of tokens that see the state before, T P v, and T, unless it is given."""
    b, v = see["b"][...], see["v"][...]
    if found:
        row, column = sides(len(b))
        seen = same_document(see, len(b)) & (row > column)
        N = jnp.where(seen, dot(b, see["a"][...], trans_b=True), 0)
        exact = lax.Precision.HIGHEST if b.dtype == N.dtype else None
        T = inverse(-N, exact).astype(b.dtype)
        found[0][...] = T
    else:
        T = see["T"][...]
    W[...] = dot(T, rows(b, see, "first")).astype(W.dtype)
    v = dot(product(see, "b", "k"), v).astype(v.dtype) if "k" in see else v
    own[...] = dot(T, v).astype(own.dtype)


def values_kernel(see: Refs, out, *, name: str):
    """Outputs, by q; what values get, by k."""
    out[...] = (of_state(see, name) + of_tokens(see, name)).astype(out.dtype)


def pulled_kernel(see: Refs, D, own):
    """T^T a of tokens that the state after sees, and T^T R^T dy."""
    T = see["T"][...]
    D[...] = dot(T, rows(see["a"][...], see, "last"), trans_a=True).astype(D.dtype)
    du = dot(product(see, "q", "a"), see["dy"][...], trans_a=True).astype(T.dtype)
    own[...] = dot(T, du, trans_a=True).astype(own.dtype)


def gradient_kernel(see: Refs, d, dw, *d_beta, name: str):
    """What tokens of a name get, and log decays by them, on top of what these have got by other names.

    One name a launch, and what is summed up elsewhere fetched last: the registers hold no more. Given beta, keys get
    what b gets and then what a gets.
    """
    narrow, wide = see[name].dtype, dw.dtype
    row, column = sides(see[name].shape[0])
    # All decays of the chunk are in the state after it, so they get that, times what it gets: the first launch takes
    # what is left of the state before, the others what their tokens write.
    to_all = jnp.zeros(dw.shape[1:], wide)
    if "dw" not in see:
        kept = jnp.sum(see["before"][...].astype(wide) * see["after"][...], axis=1)
        to_all = kept if "documents" not in see else jnp.where(see["none"][...] != 0, kept, 0)
    got = of_state(see, BESIDE[name])
    if name not in READ:
        to_all += jnp.sum(got * see[name][...], axis=0)
    got += of_tokens(see, BESIDE[name])
    to_token = got * jnp.exp(to_scale(name, see, narrow))
    if d_beta:
        d_beta[0][...] = jnp.sum(to_token * see["key"][...], axis=1)[:, None]
        to_token = see["dk"][...] + see["beta"][...] * to_token
    elif name == "b" and "beta" in see:
        to_token = -to_token
    d[...] = to_token.astype(d.dtype)
    # All decays up to a token are in what it is multiplied or divided by.
    total = summed(row < column + with_own(name, see), got * see[name][...], narrow)
    total = (total if name in READ else -total) + to_all[None, :]
    dw[...] = total + see["dw"][...] if "dw" in see else total


def on_chunks(name: str, kernel: Callable, given: dict, made: list, documents, chunk: int, interpret: bool) -> list:
    """A kernel run on heads of chunks, by name given tokens, `[B, L, H, ...]`, and then states, `[B, M, H, ...]`."""

    def seen(leaf):
        return tokens_seen(chunk, leaf.shape[-1]) if leaf.ndim == 4 else state_seen(*leaf.shape[-2:])

    B, L, H, _ = next(iter(given.values())).shape
    given = {name: (leaf, seen(leaf)) for name, leaf in given.items() if leaf is not None}
    given |= cuts(documents, chunk)
    made = [(shape, seen(shape)) for shape in made]
    return launch(kernel, f"dplr_{name}", (H, L // chunk, B), given, made, by_chunk(chunk), interpret)


def states_kernel(see: Refs, *out, chunk: int, reverse: bool):
    """States over a segment's chunks, for a tile of values: scaled as a chunk begins, and again as it ends.

    w, a, k: [L, K]; u, v: [L, V]; seen: [L]; kept: [M]; begins, ends: [M, K]; start: [K, V]. Out: the scaled states of
    chunks, [M, K, V], what tokens find, [L, V], and the last state; or that alone.
    """
    *every, end = out
    w, a = see["w"], see["a"]
    M, narrow = w.shape[0] // chunk, w.dtype

    def step(i, h):
        i = M - 1 - i if reverse else i
        tokens = pl.ds(i * chunk, chunk)

        def written(x):
            return (x * see["seen"][tokens][:, None]).astype(narrow) if "seen" in see else x.astype(narrow)

        h *= see["begins"][i, :][:, None]
        now = h.astype(narrow)
        new = dot(w[tokens, :], now)
        new = new + see["u"][tokens, :] if "u" in see else new
        if every:
            every[0][i, :, :] = now
            every[1][tokens, :] = new.astype(narrow)
        added = dot(a[tokens, :], written(new), trans_a=True)
        if "k" in see:
            added += dot(see["k"][tokens, :], written(see["v"][tokens, :]), trans_a=True)
        left = see["kept"][i] * h if "kept" in see else h
        return see["ends"][i, :][:, None] * (left + added)

    end[...] = lax.fori_loop(0, M, step, see["start"][...])


def states(given: Tokens, begins, ends, start, reverse: bool, every: bool, documents, chunk: int, interpret) -> list:
    """The states that segments end with, `[B, S, H, K, V]`, as start; before them, if asked for, the scaled states of
    chunks, `[B, M, H, K, V]`, and what tokens find, `[B, L, H, V]`.

    In reverse: their gradients, from the end. given: w, a, k, u and v; begins, ends: [B, M, H, K].
    """
    (B, S, H, K, V), (_, L, _, _), dtype = start.shape, given["w"].shape, given["w"].dtype
    M, R = L // chunk, min(V, TILE)
    key, value, scale, segment = keys_seen(L, S, K), values_seen(L, S, R), keys_seen(M, S, K), segment_seen(S, K, R)
    blocks = dict(w=key, a=key, k=key, u=value, v=value)
    seen = {name: (leaf, blocks[name]) for name, leaf in given.items()}
    seen |= dict(begins=(begins, scale), ends=(ends, scale), start=(start, segment))
    if documents is not None:
        # The state before a chunk meets its first document, that after it the last.
        met = documents == (0 if reverse else documents[..., -1:])
        flat = dict(seen=met.reshape(B, L).astype(dtype), kept=(documents[..., -1] == 0).astype(start.dtype))
        for name, leaf in flat.items():
            seen[name] = leaf, pl.BlockSpec((None, leaf.shape[1] // S), lambda h, t, s: (s // S, s % S))
    made = [((B, M, H, K, V), dtype, states_seen(M, S, K, R)), ((B, L, H, V), dtype, value)] if every else []
    made += [(start.shape, start.dtype, segment)]
    made = [(jax.ShapeDtypeStruct(shape, dtype), block) for shape, dtype, block in made]
    kernel = partial(states_kernel, chunk=chunk, reverse=reverse)
    return launch(kernel, "dplr_states", (H, V // R, B * S), seen, made, in_turn(dtype), interpret)


def shape_of(x: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def keys_of(tokens: Tokens) -> dict[str, Array]:
    """What a and b are made of where they are not given; beta: [B, L, H, 1]."""
    return dict(key=tokens["k"], beta=tokens["beta"][..., None]) if "beta" in tokens else {}


def scaled(tokens: Tokens, run: Callable) -> Scaled:
    v, w, keys = tokens["v"], tokens["w"], keys_of(tokens)
    B, M, H, K = w.shape[0], w.shape[1] // run.keywords["chunk"], *w.shape[2:]
    names = ("q", "a", "b") if keys else ("q", "a", "b", "k")
    given = dict(q=tokens["q"], w=w) | (keys or {name: tokens[name] for name in names})
    made = [jax.ShapeDtypeStruct((B, M, H, 1, K), w.dtype)] * 2 + [shape_of(w, v.dtype)] * len(names)
    begins, ends, *found = run("scaled", partial(scaled_kernel, names=names), given, made)
    found = dict(k=None) | dict(zip(names, found, strict=True))
    return Scaled(**found, v=v, begins=begins[:, :, :, 0], ends=ends[:, :, :, 0])


def values_of(x: Scaled) -> dict[str, Array]:
    """What is written beside what tokens find."""
    return {} if x.k is None else dict(k=x.k, v=x.v)


def solved(x: Scaled, T: Array | None, run: Callable) -> list[Array]:
    """T b, T P v, and T, unless it is given."""
    B, L, H, _ = x.a.shape
    made = [shape_of(x.b), shape_of(x.v)]
    made += [jax.ShapeDtypeStruct((B, L, H, run.keywords["chunk"]), x.b.dtype)] if T is None else []
    return run("solved", solved_kernel, dict(a=x.a, b=x.b, k=x.k, v=x.v, T=T), made)


def by_kernels(tokens: Tokens, h0, opens, chunk: int, interpret: bool) -> tuple[Array, Array, Found]:
    """Outputs, the last state, and what the backward pass is not to find again."""
    run = partial(on_chunks, documents=documents_of(opens, chunk), chunk=chunk, interpret=interpret)
    x = scaled(tokens, run)
    W, own, T = solved(x, None, run)
    given = dict(w=W, a=x.a, u=own, **values_of(x))
    onward = partial(states, begins=x.begins, ends=x.ends, reverse=False, **run.keywords)
    maps = maps_of(partial(onward, dict(w=W, a=x.a), every=False), h0, W.shape[1] // chunk)
    starts = starts_of(partial(onward, given, every=False), maps, h0)
    before, u, ends = onward(given, start=starts, every=True)
    given = dict(q=x.q, a=x.a, u=u, before=before, **values_of(x))
    (y,) = run("outputs", partial(values_kernel, name="q"), given, [shape_of(x.v)])
    return y, ends[:, -1], Found(T, starts, maps)


def back_by_kernels(tokens: Tokens, h0, opens, found: Found, dy, dh, chunk: int, interpret) -> tuple[Tokens, Array]:
    """What tokens and h0 get."""
    T, starts, maps = found
    run = partial(on_chunks, documents=documents_of(opens, chunk), chunk=chunk, interpret=interpret)
    x = scaled(tokens, run)
    W, own = solved(x, T, run)
    given = dict(w=W, a=x.a, u=own, **values_of(x))
    before, u, _ = states(given, x.begins, x.ends, starts, reverse=False, every=True, **run.keywords)
    D, own = run("pulled", pulled_kernel, dict(q=x.q, a=x.a, dy=dy, T=T), [shape_of(x.a), shape_of(dy)])
    given = dict(w=D, a=x.b, u=own, k=x.q, v=dy)
    back = partial(states, given, begins=x.ends, ends=x.begins, reverse=True, **run.keywords)
    lasts = starts_of(partial(back, every=False), maps, dh, reverse=True)
    after, e, firsts = back(start=lasts, every=True)
    w, k, keys = tokens["w"], tokens["k"], keys_of(tokens)
    given = dict(q=x.q, a=x.a, b=x.b, w=w, u=u, dy=dy, e=e, before=before, after=after, **values_of(x), **keys)

    def gradient(name: str, **got: Array) -> list[Array]:
        made = [shape_of(tokens.get(name, k)), shape_of(w)] + ([shape_of(keys["beta"])] if "dk" in got else [])
        return run(f"gradient_{name}", partial(gradient_kernel, name=name), given | got, made)

    dq, dw = gradient("q")
    db, dw = gradient("b", dw=dw)
    if keys:
        dk, dw, d_beta = gradient("a", dw=dw, dk=db)
        return dict(q=dq, k=dk, v=e, w=dw, beta=d_beta[..., 0]), firsts[:, 0]
    da, dw = gradient("a", dw=dw)
    dk, dw = gradient("k", dw=dw)
    (dv,) = run("gradient_v", partial(values_kernel, name="k"), given, [shape_of(x.v)])
    return dict(q=dq, k=dk, v=dv, w=dw, a=da, b=db), firsts[:, 0]


def documents_of(opens: Array | None, chunk: int) -> Array | None:
    """How many documents have begun in the chunk so far, `[B, M, Q]`."""
    return None if opens is None else jnp.cumsum(in_chunks(opens, chunk), axis=-1, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def fused(tokens: Tokens, h0, opens, otherwise: Callable, chunk: int, interpret: bool) -> tuple[Array, Array]:
    """As `fused_dplr`, for whole chunks."""
    return fused_forward(tokens, h0, opens, otherwise, chunk, interpret)[0]


def fused_forward(tokens, h0, opens, otherwise, chunk, interpret):
    little = jnp.min(jnp.sum(in_chunks(tokens["w"], chunk // 2), axis=2)) >= -LITTLE
    kernels = partial(by_kernels, chunk=chunk, interpret=interpret)

    def instead(*given):
        *_, found = jax.eval_shape(kernels, *given)
        return *otherwise(*given), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found)

    y, h, found = lax.cond(little, kernels, instead, tokens, h0, opens)
    return (y, h), (tokens, h0, opens, found, little)


def fused_backward(otherwise, chunk, interpret, saved, g):
    *given, little = saved

    def instead(tokens, h0, opens, found, *g):
        return jax.vjp(partial(otherwise, opens=opens), tokens, h0)[1](g)

    kernels = partial(back_by_kernels, chunk=chunk, interpret=interpret)
    return *lax.cond(little, kernels, instead, *given, *g), None


fused.defvjp(fused_forward, fused_backward)


def fused_dplr(
    tokens: Tokens, h0: Array, opens: Array | None, otherwise: Callable, chunk: int, interpret: bool = False
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` in v's dtype, and the last state.

    tokens: q, k, [B, L, H, K]; v: [B, L, H, V], bfloat16 or float32; w: [B, L, H, K], log decays, not positive, wide;
    and a and b, as k, or beta, [B, L, H], wide. h0: [B, H, K, V], wide; opens: [B, L], true where the past is
    forgotten; otherwise: what finds both of tokens, h0 and opens where a chunk decays strongly. K, V: 16, 32, 64 or
    128; chunk: 16 to 64.
    """
    q, v, w = (tokens[name] for name in "qvw")
    B, L, H = q.shape[:3]
    chunk = fitting(chunk, q.astype(v.dtype), v)
    w = jnp.maximum(w, STRONGEST)
    w = w if opens is None else jnp.where(opens[..., None, None], 0, w)  # there is nothing that could decay
    # Filled up with tokens of zero and decays of none, which leave a state as it was.
    tokens = {name: filled(leaf, chunk) for name, leaf in (tokens | dict(w=w)).items()}
    opens = None if opens is None else filled(opens, chunk)
    fixed = dict(otherwise=otherwise, chunk=chunk, interpret=interpret)
    y, h = on_each_device(partial(fused, **fixed), B, H, tokens=1, states=1)(tokens, h0, opens)
    return y[:, :L], h
