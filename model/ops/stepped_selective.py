"""Mamba's scan one token after another, for CPUs: what a token needs stays in the cache, and channels lie side by side.

States are [B, N, E] here: a sum over N is then one of rows of channels, where it would be one of 16 neighbours. They
are not kept for the gradient, which makes those of a chunk anew: that costs less than a loop over layers takes to copy
them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Tokens = tuple[Array, Array, Array, Array, Array]  # x, dt: [..., B, E]; B, C: [..., B, N]; keep: [..., B]

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def stepped_selective(
    x: Array, dt: Array, A: Array, B: Array, C: Array, h0: Array, keep: Array | None, chunk: int
) -> tuple[Array, Array]:
    """As `model.ops.scan.selective_scan`."""
    L = x.shape[1]
    keep = jnp.ones(x.shape[:2], dt.dtype) if keep is None else keep.astype(dt.dtype)
    tokens = tuple(jnp.swapaxes(leaf, 0, 1) for leaf in (x, dt, B, C, keep))
    A, h0 = A.T, jnp.swapaxes(h0, 1, 2)
    if L <= chunk:
        y, h = walk(tokens, A, h0)
    else:
        n = -(-L // chunk)

        def in_chunks(leaf: Array, rest: int) -> Array:  # [L, ...] -> [n, chunk, ...]
            leaf = jnp.pad(leaf, [(0, n * chunk - L)] + [(0, 0)] * (leaf.ndim - 1), constant_values=rest)
            return leaf.reshape(n, chunk, *leaf.shape[1:])

        chunks = tuple(map(in_chunks, tokens, (0, 0, 0, 0, 1)))  # steps of length 0, which keep the state

        def body(h: Array, tokens: Tokens) -> tuple[Array, Array]:
            y, h = walk(tokens, A, h)
            return h, y

        h, y = lax.scan(body, h0, chunks)
        y = y.reshape(n * chunk, *y.shape[2:])[:L]
    return jnp.swapaxes(y, 0, 1).astype(x.dtype), jnp.swapaxes(h, 1, 2)


def decay(dt: Array, A: Array, keep: Array) -> Array:
    return jnp.exp(dt[:, None, :] * A) * keep[:, None, None]


def step(h: Array, token: Tokens, A: Array) -> Array:
    """The next state, [B, N, E]."""
    x, dt, B, _, keep = token
    return decay(dt, A, keep) * h + (dt * x)[:, None, :] * B[:, :, None]


@jax.custom_vjp
def walk(tokens: Tokens, A: Array, h0: Array) -> tuple[Array, Array]:
    """Outputs [L, B, E] and the last state; A: [N, E]."""

    def read(h, token):
        h = step(h, token, A)
        return h, einsum("bne,bn->be", h, token[3])

    h, y = lax.scan(read, h0, tokens)
    return y, h


def walk_forward(tokens, A, h0):
    return walk(tokens, A, h0), (tokens, A, h0)


def walk_backward(saved, g):
    tokens, A, h0 = saved
    g_y, g_h = g
    _, before = lax.scan(lambda h, token: (step(h, token, A), h), h0, tokens)

    def back(carry, token):
        g_h, d_A = carry
        (x, dt, B, C, keep), g_y, before = token
        u, a = dt * x, decay(dt, A, keep)
        g_h = g_h + g_y[:, None, :] * C[:, :, None]
        kept = a * before
        d_rate = g_h * kept  # of dt A
        # One row of channels after another: a sum over the axis would first have A copied for every row of the batch.
        d_dt = sum(d_rate[:, n] * A[n] for n in range(A.shape[0]))
        d_u = einsum("bne,bn->be", g_h, B)
        d_B = einsum("bne,be->bn", g_h, u)
        d_C = einsum("bne,be->bn", kept + u[:, None, :] * B[:, :, None], g_y)
        # A's is added up over the batch at the end, for the same reason.
        return (a * g_h, d_A + d_rate * dt[:, None, :]), (d_u * dt, d_dt + d_u * x, d_B, d_C)

    (g_h, d_A), (d_x, d_dt, d_B, d_C) = lax.scan(back, (g_h, jnp.zeros_like(g_h)), (tokens, g_y, before), reverse=True)
    grads = (d_x, d_dt, d_B, d_C, jnp.zeros_like(tokens[4]))
    return tuple(g.astype(leaf.dtype) for g, leaf in zip(grads, tokens, strict=True)), d_A.sum(axis=0), g_h


walk.defvjp(walk_forward, walk_backward)
