"""The delta rule: a matrix state that forgets, and takes away what it holds in one direction before it writes there.

    h_t = diag(e^{w_t}) h_{t-1} + a_t (b_t^T h_{t-1}) + k_t v_t^T        y_t = q_t^T h_t

Given beta it is that of DeltaNet (https://arxiv.org/abs/2406.06484) and its gated kin (https://arxiv.org/abs/2412.06464,
https://arxiv.org/abs/2510.26692): what the state says of k_t is moved towards v_t,

    h_t = (I - beta_t k_t k_t^T) diag(e^{w_t}) h_{t-1} + beta_t k_t v_t^T

Letters beside the project's own: P channels of a value, Q tokens of a block, M blocks of a chunk. What the tokens of a
block read of each other is a triangular system (the WY form of its product of matrices), whose inverse is made of those
of its halves. The decay between two tokens is that up to a boundary between them times that from there, as in
`model.ops.chunked_channels`: nothing is divided by a decay. The backward pass keeps the inputs and a state a chunk.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model import placement
from model.errors import choose
from model.ops.chunked_channels import meetings
from model.ops.decays import FORGET, in_chunks
from model.ops.fused import SIDES, needs_unmet, picked, refuse
from model.ops.named import running
from model.ops.stretches import of_earlier, of_last, on_stretches, stretches

Array = jax.Array
Tokens = dict[str, Array]  # q, k, v, perhaps w, and beta or a and b; [..., K], of beta and a head's w [...]
BLOCK = {"head": 64, "channel": 16}  # Q, by what decays alone
FEW = 4  # blocks of a chunk that are gone through one by one, M
ROOM = 2**24  # numbers that maps of a chunk's states may take where its blocks are gone through at once

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
times = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def spelt_out(tokens: Tokens, dtype: jax.typing.DTypeLike) -> tuple[Array, Array, Array, Array, Array | None, Array]:
    """q, k, v, w, a, b of the first form, wide, w `[..., 1 or K]`; a is None where it is -k."""
    t = {name: leaf.astype(dtype) for name, leaf in tokens.items()}
    q, k, v, w = t["q"], t["k"], t["v"], log_decays(tokens, dtype)
    if "beta" in t:
        return q, t["beta"][..., None] * k, v, w, None, jnp.exp(w) * k
    return q, k, v, w, t["a"], t["b"]


def log_decays(tokens: Tokens, dtype: jax.typing.DTypeLike) -> Array:
    """`[..., 1 or K]`, wide."""
    q = tokens["q"]
    w = tokens["w"].astype(dtype) if "w" in tokens else jnp.zeros(q.shape[:-1], dtype)
    return w if w.ndim == q.ndim else w[..., None]


def forgetting(tokens: Tokens, keep: Array | None, dtype: jax.typing.DTypeLike) -> Tokens:
    """The tokens with decays that leave nothing of the past, and corrections of none, where it is not kept."""
    if keep is None:
        return tokens
    w = tokens.get("w", jnp.zeros(tokens["q"].shape[:3], dtype))
    tokens = tokens | dict(w=jnp.where(keep.reshape(*keep.shape, *[1] * (w.ndim - 2)), w, FORGET))
    return tokens | (dict(b=jnp.where(keep[..., None, None], tokens["b"], 0)) if "b" in tokens else {})


def sequential(tokens: Tokens, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """One token after another: the definition."""
    tokens = forgetting(tokens, keep, h0.dtype)

    def step(h, token):
        q, k, v, w, a, b = spelt_out(token, h.dtype)
        removed = (-k if a is None else a)[..., None] * einsum("bhk,bhkp->bhp", b, h)[..., None, :]
        h = jnp.exp(w)[..., None] * h + removed + k[..., None] * v[..., None, :]
        return h, einsum("bhk,bhkp->bhp", q, h)

    h, y = lax.scan(step, h0, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tokens))
    return jnp.swapaxes(y, 0, 1), h


@jax.custom_vjp
def inverse(N: Array) -> Array:
    """`(I - N)^-1` for N `[..., Q, Q]` below the diagonal: inverses of halves, and what joins them.

    Powers of N would grow and cancel.
    """
    X = jnp.broadcast_to(jnp.eye(N.shape[-1], dtype=N.dtype), N.shape)
    for joined in meetings(N.shape[-1])[1]:
        X = X + times(times(X, jnp.where(joined, N, 0)), X)
    return X


def inverse_forward(N):
    X = inverse(N)
    return X, X


def inverse_backward(X, g):
    T = jnp.swapaxes(X, -1, -2)
    return (jnp.tril(times(times(T, g), T), k=-1),)


inverse.defvjp(inverse_forward, inverse_backward)


def meeting(w: Array) -> Callable[[Array, Array], Array]:
    """What readers of the state before each token get of what is written at those before it: `[B, H, M, Q, Q]`.

    Both, reader and written, are [B, H, M, Q, K]; w is [B, H, M, Q, 1 or K].
    """
    inside, meets = meetings(w.shape[-2])
    sums = einsum("nij,bhmjk->nbhmik", inside[:-1].astype(w.dtype), w)  # from each token to where it meets others
    if w.shape[-1] == 1:
        pair = jnp.exp(sums + jnp.swapaxes(sums, -1, -2))
        decay = sum(jnp.where(pairs, met, 0) for pairs, met in zip(meets, pair, strict=True))
        return lambda reader, written: einsum("bhmik,bhmjk->bhmij", reader, written) * decay
    rounds = list(zip(meets, jnp.exp(sums), strict=True))
    return lambda reader, written: sum(
        jnp.where(pairs, einsum("bhmik,bhmjk->bhmij", reader * decay, written * decay), 0) for pairs, decay in rounds
    )


def run_chunk(h: Array, tokens: Tokens) -> tuple[Array, Array]:
    """The state after a chunk and its outputs `[B, H, M, Q, P]`; h: [B, H, K, P], tokens: [B, H, M, Q, ...].

    A state may have more columns than there are values; nothing is written to the first ones.
    """
    q, k, v, w, a, b = spelt_out(tokens, h.dtype)
    v = jnp.pad(v, [(0, 0)] * 4 + [(h.shape[-1] - v.shape[-1], 0)])
    Q, M, delta, found = w.shape[-2], w.shape[-3], a is None, k if a is None else a
    met, late = meeting(w), q * jnp.exp(w)

    def seen(written):  # by the token itself too; a CPU's compiler (jax 0.10) gets a sum with what is broadcast wrong
        return jnp.where(np.eye(Q, dtype=bool), jnp.sum(q * written, axis=-1)[..., None], met(late, written))

    order = np.tri(Q, k=-1).astype(w.dtype)
    to_token, to_end = (jnp.exp(einsum(spec, order, w)) for spec in ("ij,bhmjk->bhmik", "ji,bhmjk->bhmik"))
    total = jnp.exp(jnp.sum(w, axis=-2))[..., None]
    # Along `found` tokens write what they read of the past, or with `delta` their value less that: `own + of_past h`
    # in a block that begins with the state h. Else values are written along k besides.
    solve = inverse(-met(b, k) if delta else met(b, a))
    own = times(solve, v if delta else times(met(b, k), v))
    of_past = times(solve, (-b if delta else b) * to_token)
    found_to_end, added = jnp.swapaxes(found * to_end, -1, -2), None
    if not delta:
        added = times(jnp.swapaxes(k * to_end, -1, -2), v)

    def blocks_in_turn(h):
        before = []
        for m in range(M):
            before.append(h)
            said = own[:, :, m] + times(of_past[:, :, m], h)
            h = total[:, :, m] * h + times(found_to_end[:, :, m], said)
            h = h if delta else h + added[:, :, m]
        return jnp.stack(before, axis=2), h

    def blocks_at_once(h):
        """Each maps the state to `A h + c`, and so do all of them up to one."""
        A = jnp.eye(h.shape[2], dtype=h.dtype) * total + times(found_to_end, of_past)
        c = times(found_to_end, own) if delta else times(found_to_end, own) + added
        A, c = lax.associative_scan(composed, (A, c), axis=2)
        after = times(A, h[:, :, None]) + c
        return jnp.concatenate([h[:, :, None], after[:, :, :-1]], axis=2), after[:, :, -1]

    before, h = (blocks_in_turn if M <= FEW else blocks_at_once)(h)
    said = own + times(of_past, before)
    y = times(late * to_token, before) + times(seen(found), said)
    return h, y if delta else y + times(seen(k), v)


def composed(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """The map `h -> A h + c` that is one after another."""
    (A1, c1), (A2, c2) = first, second
    return times(A2, A1), times(A2, c1) + c2


def blocks(L: int, Q: int, h: Array) -> int:
    """Of a chunk. A CPU does best with few; elsewhere many at once are worth the products of their maps."""
    many = FEW if placement.platform() == "cpu" else max(FEW, ROOM // math.prod((*h.shape[:3], h.shape[2])))
    return min(-(-L // Q), many)


def chunks_in_turn(tokens: Tokens, h0: Array) -> tuple[Array, Array]:
    """Outputs and the last state on one device. The backward pass recomputes a chunk at a time."""
    L = tokens["q"].shape[1]
    # Two at least: of one alone there is nothing to sum up.
    Q = min(max(L, 2), BLOCK["channel" if "w" in tokens and tokens["w"].ndim == 4 else "head"])
    M = blocks(L, Q, h0)

    def chunks(x):  # a filled step has k = 0, beta or a = 0 and w = 0, which leaves the state as it was
        tiles = in_chunks(in_chunks(x, M * Q), Q, axis=2)
        return jnp.moveaxis(tiles, (1, 4), (0, 2))  # [n, B, H, M, Q, ...]

    h, y = lax.scan(jax.checkpoint(run_chunk, prevent_cse=False), h0, jax.tree.map(chunks, tokens))
    y = jnp.moveaxis(y, (0, 2), (1, 4))  # [B, n, M, Q, H, P]
    return y.reshape(y.shape[0], -1, *y.shape[4:])[:, :L], h


def chunked(tokens: Tokens, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """Products within a chunk, one chunk after another, and maps of states between devices that share the length."""
    tokens = forgetting(tokens, keep, h0.dtype)
    if stretches(tokens["q"].shape[1]) == 1:
        return chunks_in_turn(tokens, h0)

    def stretch(tokens, h0, share):
        """It does `h -> A h + c` to any state, and so do its outputs; run once, A is what becomes of the identity."""
        K = h0.shape[2]
        empty = jnp.broadcast_to(jnp.eye(K, dtype=h0.dtype), (*h0.shape[:2], K, K)), jnp.zeros_like(h0)
        y, end = chunks_in_turn(tokens, jnp.concatenate(empty, axis=-1))
        A, c = end[..., :K], end[..., K:]
        before = of_earlier(composed, (A, c), empty, share)
        start = times(before[0], h0) + before[1]
        y = y[..., K:] + einsum("blhk,bhkp->blhp", y[..., :K], start)
        return y, of_last(times(A, start) + c, share)

    return on_stretches(stretch, tokens, h0)


def fused(tokens: Tokens, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """The delta rule's products in kernels of their own, on GPUs."""
    refuse("delta_rule", lacking(tokens))
    if general(tokens):
        return fused_general(tokens, h0, keep)
    from model.ops.fused_delta import fused_delta  # here: Pallas takes a second to load, and only GPUs need it

    q, k, v, beta, w = (tokens.get(name) for name in ("q", "k", "v", "beta", "w"))
    opens = None if keep is None else ~keep
    y, h = fused_delta(q.astype(v.dtype), k.astype(v.dtype), v, beta.astype(h0.dtype), w, h0, opens, 64)
    return y.astype(h0.dtype), h


def fused_general(
    tokens: Tokens, h0: Array, keep: Array | None, chunk: int = 32, interpret: bool = False
) -> tuple[Array, Array]:
    """Where channels decay by themselves, or corrections are in other directions than a key's.

    In chunks of 64, half of those of a new KDA decay strongly: with gradient they took 1.8 times as long on an H200.
    """
    from model.ops.fused_dplr import fused_dplr  # here, as above

    q, v, wide = tokens["q"], tokens["v"], h0.dtype
    v = v.astype(wide) if v.dtype == jnp.float16 else v  # which has no room for numbers measured from a middle
    tokens = tokens | dict(v=v, w=jnp.broadcast_to(log_decays(tokens, wide), q.shape))
    tokens |= dict(beta=tokens["beta"].astype(wide)) if "beta" in tokens else {}
    y, h = fused_dplr(tokens, h0, None if keep is None else ~keep, chunk, interpret)
    return y.astype(wide), h


def general(tokens: Tokens) -> bool:
    """Whether a call is for `fused_general`."""
    return "beta" not in tokens or ("w" in tokens and tokens["w"].ndim == 4)


def lacking(tokens: Tokens) -> list[str]:
    """Why the fused kernels cannot serve a call; empty if they can."""
    return needs_unmet(tokens["v"]) + misfits(tokens)


def misfits(tokens: Tokens) -> list[str]:
    sides = {tokens[name].shape[-1] for name in ("k", "v")}
    if not sides - set(SIDES):
        return []
    return [f"heads of {sorted(sides)} channels (it takes {', '.join(map(str, SIDES))})"]


KNOBS = "head_dim, of gated_deltanet by expand too"  # that set the sides of a state


IMPLEMENTATIONS = {"sequential": sequential, "chunked": chunked, "fused": fused}


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    w: Array | None,
    h0: Array,
    keep: Array | None = None,
    *,
    beta: Array | None = None,
    a: Array | None = None,
    b: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, P]` and the last state, both wide, as h0 is.

    q, k: [B, L, H, K]; v: [B, L, H, P]; w: log decays, not above 0, of each head [B, L, H] or each channel
    [B, L, H, K], or none; h0: [B, H, K, P]; keep: [B, L], false where the past is forgotten. Either beta [B, L, H] or
    both a and b [B, L, H, K] are given. A step with k = 0, w = 0 and beta = 0 or a = 0 leaves the state as it was.
    """
    tokens = dict(q=q, k=k, v=v, w=w, beta=beta, a=a, b=b)
    tokens = {name: leaf for name, leaf in tokens.items() if leaf is not None}
    if implementation is None:
        implementation = "sequential" if q.shape[1] == 1 else picked("delta_rule", v, misfits(tokens), KNOBS)
    run = choose("delta_rule implementation", implementation, IMPLEMENTATIONS)
    with running("delta_rule", implementation):
        return run(tokens, h0, None if keep is None else keep.astype(bool))
