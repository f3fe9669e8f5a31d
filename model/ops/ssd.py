"""Mamba-2's state-space duality (https://arxiv.org/abs/2405.21060): one recurrence, as a loop and as matrix products.

    h_t = keep_t exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t

Letters beside the project's own: G groups of R heads that share B and C, P channels of a head, Q tokens of a chunk,
M chunks. The matrix form holds Q^2 weights per head and chunk and one state per chunk, never one per token.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.errors import choose
from model.ops.decays import FORGET, STRONGEST, carry, in_chunks, parts, sums
from model.ops.fused import SIDES, needs_unmet, picked, refuse
from model.ops.named import running
from model.ops.stretches import handed_on, on_stretches, stretches

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def contract(spec: str, x: Array, y: Array, dtype: Any) -> Array:
    """An einsum of two arrays of one dtype into another, summed wide; its gradients are such products too."""
    return jnp.einsum(spec, x, y, preferred_element_type=dtype)


def contract_forward(spec, x, y, dtype):
    return contract(spec, x, y, dtype), (x, y)


def contract_backward(spec, dtype, saved, g):
    x, y = saved
    left, right, out = spec.replace("->", ",").split(",")
    g = g.astype(x.dtype)  # a wide cotangent would make the product and its operands wide, at twice the cost
    return jnp.einsum(f"{out},{right}->{left}", g, y), jnp.einsum(f"{left},{out}->{right}", x, g)


contract.defvjp(contract_forward, contract_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gaps(a: Array, dtype: Any) -> Array:
    """The sum of log decays after token j up to token i, at [i, j] of `[..., Q, Q]`, meaningless for j > i.

    By differences of running sums: those of multiples of STEP are exact, and those of the rest are small.
    """
    whole, rest = (sums(part, jnp.tri(a.shape[-1])) for part in parts(a))
    return (whole[..., :, None] - whole[..., None, :]) + (rest[..., :, None] - rest[..., None, :])


def gaps_forward(a, dtype):
    return gaps(a, dtype), None


def gaps_backward(dtype, _, g):
    """Token k is in the gaps from before it to it or later; here no differences are taken, which would lose them."""
    order = jnp.tri(g.shape[-1], k=-1, dtype=dtype)  # [k, j]: j before k
    precision = lax.Precision.HIGHEST if dtype == g.dtype else None
    from_before = jnp.einsum("...ij,kj->...ik", g.astype(dtype), order, precision=precision)
    return (jnp.sum(jnp.tril(from_before.astype(g.dtype)), axis=-2),)


gaps.defvjp(gaps_forward, gaps_backward)


@jax.custom_vjp
def for_heads(scores: Array, decays: Array) -> Array:
    """The scores of a group, `[B, M, G, Q, Q]`, times the decays of each of its heads, `[B, M, G, R, Q, Q]`."""
    return scores[:, :, :, None] * decays


def for_heads_forward(scores, decays):
    return for_heads(scores, decays), (scores, decays)


def for_heads_backward(saved, g):
    """Heads are added up one by one: a CPU takes several times as long for a sum along such an axis."""
    scores, decays = saved
    d_scores = g * decays
    return sum(d_scores[:, :, :, r] for r in range(g.shape[3])), g * scores[:, :, :, None]


for_heads.defvjp(for_heads_forward, for_heads_backward)


def sequential(x: Array, dt: Array, a: Array, B: Array, C: Array, h0: Array, opens: Array | None, chunk: int | None):
    """One token after another: the definition."""
    if opens is not None:
        a = jnp.where(opens[..., None], FORGET, a)

    def step(h, token):
        u, a, B, C = token
        h = jnp.exp(a)[..., None, None] * h + jnp.einsum("bgrp,bgn->bgrpn", u, B)
        return h, jnp.einsum("bgrpn,bgn->bgrp", h, C)

    G = B.shape[2]
    tokens = (grouped(dt[..., None] * x, G), grouped(a, G), B, C)
    tokens = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1).astype(a.dtype), tokens)
    h, y = lax.scan(step, grouped(h0, G, axis=1), tokens)
    return jnp.swapaxes(y, 0, 1).reshape(x.shape).astype(x.dtype), h.reshape(h0.shape)


def chunked(
    x: Array, dt: Array | None, a: Array, B: Array, C: Array, h0: Array, opens: Array | None, chunk: int | None
):
    """Products within chunks; states carried from chunk to chunk and, where devices share the length, between these.

    dt multiplies x; None: it is 1.
    """
    if stretches(x.shape[1]) == 1:
        return products(x, dt, a, B, C, h0, opens, chunk)

    def stretch(tokens, h0, share):
        x, dt, a, B, C, opens = tokens
        _, end = products(x, dt, a, B, C, jnp.zeros_like(h0), opens, chunk)
        decay = jnp.exp(jnp.sum(a if opens is None else jnp.where(opens[..., None], FORGET, a), axis=1))
        start, last = handed_on(decay[..., None, None], end, h0, share)
        return products(x, dt, a, B, C, start, opens, chunk)[0], last

    return on_stretches(stretch, (x, dt, a, B, C, opens), h0)


@partial(jax.checkpoint, static_argnums=7)
def products(
    x: Array, dt: Array | None, a: Array, B: Array, C: Array, h0: Array, opens: Array | None, chunk: int | None
):
    """Chunks and the states between them, on one device. Only the inputs are kept for the gradient."""
    shape, L, G, f = x.shape, x.shape[1], B.shape[2], a.dtype
    Q = min(chunk or 128, L)
    u = x if dt is None else (dt[..., None] * x).astype(x.dtype)
    # Filled up with a = 0, u = 0, which leaves a state as it was. Heads before tokens, as products want them.
    x, a, B, C = (in_chunks(leaf, Q) for leaf in (grouped(u, G), grouped(a, G), B, C))
    x, a = jnp.moveaxis(x, 2, 4), jnp.moveaxis(a, 2, 4)  # [B, M, G, R, Q, P] and [B, M, G, R, Q]
    B, C = jnp.moveaxis(B, 2, 3), jnp.moveaxis(C, 2, 3)  # [B, M, G, Q, N]
    order = jnp.tri(Q, dtype=bool)  # [i, j]: token j is not after token i
    to_token, to_end = sums(a, order), sums(a, ~order)
    if opens is not None:
        begun = jnp.cumsum(in_chunks(opens, Q), axis=-1)  # documents of the chunk so far
        documents = begun[:, :, None, None]  # [B, M, 1, 1, Q]
        order = order & (documents[..., None] == documents[..., None, :])
        to_token = jnp.where(documents == 0, to_token, FORGET)
        to_end = jnp.where(documents == documents[..., -1:], to_end, FORGET)

    scores = contract("bmgin,bmgjn->bmgij", C, B, f)
    weights = for_heads(scores, jnp.exp(jnp.where(order, gaps(a, x.dtype), FORGET)))
    y = contract("bmgrij,bmgrjp->bmgrip", weights.astype(x.dtype), x, x.dtype)

    added = contract("bmgrjp,bmgjn->bmgrpn", (x * jnp.exp(to_end)[..., None]).astype(x.dtype), B, f)
    total = to_token[..., -1]
    b, m, g, r, p, n = added.shape
    before, h = carry(total.reshape(b, m, g * r), added.reshape(b, m, g * r, p * n), h0.reshape(b, g * r, p * n))
    before = before.reshape(added.shape).astype(x.dtype)
    y = y + contract("bmgin,bmgrpn->bmgrip", C, before, x.dtype) * jnp.exp(to_token)[..., None]
    y = jnp.moveaxis(y.astype(x.dtype), 4, 2)
    return y.reshape(b, m * Q, g * r, p)[:, :L].reshape(shape), h.reshape(h0.shape)


def grouped(leaf: Array, groups: int, axis: int = 2) -> Array:
    """The axis of heads as groups and the heads of a group."""
    return leaf.reshape(*leaf.shape[:axis], groups, -1, *leaf.shape[axis + 1 :])


def fused(x: Array, dt: Array, a: Array, B: Array, C: Array, h0: Array, opens: Array | None, chunk: int | None):
    """The same products in kernels of their own, on GPUs.

    With gradient on an H200 in float32, 8 rows of 2,048 tokens, 32 heads of 64 channels with 128 numbers each: 4.7 ms
    where `chunked` took 4.8, in less than half the memory, and compiled in 10 s instead of 26. On shorter rows both
    were 2e-3 to 3e-3 from the loop, values and gradients: TF32.
    """
    refuse("ssd", lacking(x, B))
    from model.ops import fused_ssd  # here: Pallas takes a second to load, and only GPUs need it

    return fused_ssd.fused_ssd(x, dt, a, B, C, h0, opens, chunk or 64)


def lacking(x: Array, B: Array) -> list[str]:
    """Why the fused kernels cannot serve a call; empty if they can."""
    return needs_unmet(x) + misfits(x, B)


def misfits(x: Array, B: Array) -> list[str]:
    P, N = x.shape[-1], B.shape[-1]
    if P in SIDES and N in SIDES:
        return []
    return [f"{P} channels of a head with {N} numbers each (it takes {', '.join(map(str, SIDES))} of both)"]


KNOBS = "head_dim and state, of luna by n_heads and packed"  # that set the sides of a state


IMPLEMENTATIONS = {"sequential": sequential, "chunked": chunked, "fused": fused}


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    h0: Array,
    keep: Array | None = None,
    *,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, P]` in x's dtype, and the last state.

    x: [B, L, H, P]; dt: [B, L, H]; A: [H], negative; B, C: [B, L, G, N] with G dividing H; h0: [B, H, P, N];
    keep: [B, L], false where the past is forgotten. A step with dt = 0 leaves the state as it was. dt, A and h0 are
    wide; x, B and C may be narrow, and are then multiplied so. chunk: tokens whose weights are held together.
    """
    if implementation is None:
        implementation = "sequential" if x.shape[1] == 1 else picked("ssd", x, misfits(x, B), KNOBS)
    run = choose("ssd implementation", implementation, IMPLEMENTATIONS)
    a = jnp.maximum(dt * A, STRONGEST)
    opens = None if keep is None else ~keep.astype(bool)
    with running("ssd", implementation):
        return run(x, dt, a, B.astype(x.dtype), C.astype(x.dtype), h0, opens, chunk)
