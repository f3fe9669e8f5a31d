"""Mamba's scan one token after another, for CPUs: what a token needs stays in the cache, and channels lie side by side.

States are [B, N, E] here: a sum over N is then one of rows of channels, where it would be one of 16 neighbours. They
are not kept for the gradient, which makes those of a chunk anew, and its decays once for all that asks for them: that
costs less than a loop over layers takes to copy them. Chunks are short, so that these stay in the cache too.
"""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.polynomial import Chebyshev, Polynomial

Array = jax.Array
Tokens = tuple[Array, Array, Array, Array, Array]  # x, dt: [..., B, E]; B, C: [..., B, N]; keep: [..., B]
KEEP = 4  # where among them

LOG2_E = math.log2(math.e)
# 2^r for r from -1/2 to 1/2, highest power first, within 4e-9; in float32 1 at 0: a step of length 0 loses nothing.
POWER = Chebyshev.interpolate(np.exp2, 6, domain=(-0.5, 0.5)).convert(kind=Polynomial).coef[::-1].tolist()

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def stepped_selective(
    x: Array, dt: Array, A: Array, B: Array, C: Array, h0: Array, keep: Array | None, chunk: int
) -> tuple[Array, Array]:
    """As `model.ops.scan.selective_scan`."""
    keep = jnp.ones(x.shape[:2], dt.dtype) if keep is None else keep.astype(dt.dtype)
    return scan(chunk, (x, dt, B, C, keep), A, h0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scan(chunk: int, tokens: Tokens, A: Array, h0: Array) -> tuple[Array, Array]:
    """Tokens are [B, L, ...] here, and [L, B, ...] below."""
    return scan_forward(chunk, tokens, A, h0)[0]


def scan_forward(chunk, tokens, A, h0):
    def body(h, tokens):
        y, last = read(tokens, A.T, h)
        return last, (y, h)

    h, (y, starts) = lax.scan(body, jnp.swapaxes(h0, 1, 2), in_chunks(tokens, chunk))
    # Tokens are kept as they came: other parts of a layer keep them too.
    return (joined(y, tokens[0]), jnp.swapaxes(h, 1, 2)), (tokens, A, starts)


def scan_backward(chunk, saved, g):
    tokens, A, starts = saved
    g_y, g_h = g

    def body(carry, part):
        g_h, d_A = carry
        (*tokens, g_y), start = part
        grads, of_A, g_h = learn(tokens, A.T, start, g_y, g_h)
        return (g_h, d_A + of_A), grads

    carry = jnp.swapaxes(g_h, 1, 2), jnp.zeros_like(A.T)
    parts = in_chunks((*tokens, g_y.astype(A.dtype)), chunk), starts
    (g_h, d_A), grads = lax.scan(body, carry, parts, reverse=True)
    d_tokens = (*map(joined, grads, tokens), jnp.zeros_like(tokens[KEEP]))
    return d_tokens, d_A.T, jnp.swapaxes(g_h, 1, 2)


scan.defvjp(scan_forward, scan_backward)


def in_chunks(tokens: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    """[B, L, ...] -> [n, chunk, B, ...], the last one filled up with steps of length 0, which keep the state."""
    L = tokens[0].shape[1]
    chunk = min(chunk, L)
    n = -(-L // chunk)

    def cut(leaf: Array, fill: int) -> Array:
        leaf = jnp.swapaxes(leaf, 0, 1)
        leaf = jnp.pad(leaf, [(0, n * chunk - L)] + [(0, 0)] * (leaf.ndim - 1), constant_values=fill)
        return leaf.reshape(n, chunk, *leaf.shape[1:])

    return tuple(cut(leaf, fill=int(i == KEEP)) for i, leaf in enumerate(tokens))


def joined(chunks: Array, tokens: Array) -> Array:
    """Back to the shape and dtype of tokens `[B, L, ...]`."""
    flat = chunks.reshape(-1, *chunks.shape[2:])
    return jnp.swapaxes(flat[: tokens.shape[1]], 0, 1).astype(tokens.dtype)


def power_of_two(t: Array) -> Array:
    """2^t, held between 2^-126 and 2^127.

    Exponentials are most of what a token costs, and the compiler's take longer: they check more.
    """
    if t.dtype != jnp.float32:
        return jnp.exp2(t)
    t = jnp.clip(t, -126, 127)
    fraction = t - lax.round(t, lax.RoundingMethod.TO_NEAREST_EVEN)
    # Next to this number floats are 1 apart, so the last bits of the sum are the whole number: what is added to the
    # exponent of the fraction's power.
    whole = lax.bitcast_convert_type(t + 1.5 * 2**23, jnp.int32)
    power = lax.bitcast_convert_type(reduce(lambda power, c: power * fraction + c, POWER), jnp.int32)
    return lax.bitcast_convert_type(power + (whole << 23), jnp.float32)


def decay(dt: Array, rate: Array, keep: Array) -> Array:
    """`keep 2^(dt rate)`, [..., B, N, E]."""
    return power_of_two(dt[..., None, :] * rate) * keep[..., None, None]


def read(tokens: Tokens, A: Array, h0: Array) -> tuple[Array, Array]:
    """Outputs [L, B, E] of a chunk, and the last state; A: [N, E]."""
    rate = A * LOG2_E

    def step(h, token):
        x, dt, B, C, keep = token
        h = decay(dt, rate, keep) * h + (dt * x)[:, None, :] * B[:, :, None]
        return h, einsum("bne,bn->be", h, C)

    h, y = lax.scan(step, h0, tokens)
    return y, h


def learn(tokens: Tokens, A: Array, h0: Array, g_y: Array, g_h: Array) -> tuple[tuple[Array, ...], Array, Array]:
    """Gradients of a chunk's x, dt, B and C, of A and of h0, given those of its outputs and of its last state."""
    x, dt, B, C, keep = tokens
    a = decay(dt, A * LOG2_E, keep)  # made once for both walks

    def again(h, token):
        x, dt, B, a, g_y = token
        new = a * h + (dt * x)[:, None, :] * B[:, :, None]
        return new, (h, einsum("bne,be->bn", new, g_y))

    _, (before, d_C) = lax.scan(again, h0, (x, dt, B, a, g_y))

    def back(carry, token):
        g_h, d_A = carry
        x, dt, B, C, a, before, g_y = token
        g_h = g_h + g_y[:, None, :] * C[:, :, None]
        d_u = einsum("bne,bn->be", g_h, B)
        d_B = einsum("bne,be->bn", g_h, dt * x)
        g_h = a * g_h
        d_rate = g_h * before  # of dt A
        # One row of channels after another: a sum over the axis would first have A copied for every row of the batch.
        d_dt = sum(d_rate[:, n] * A[n] for n in range(A.shape[0]))
        # A's is added up over the batch at the end, for the same reason.
        return (g_h, d_A + d_rate * dt[:, None, :]), (d_u * dt, d_dt + d_u * x, d_B)

    carry = g_h, jnp.zeros_like(g_h)
    (g_h, d_A), (d_x, d_dt, d_B) = lax.scan(back, carry, (x, dt, B, C, a, before, g_y), reverse=True)
    return (d_x, d_dt, d_B, d_C), d_A.sum(axis=0), g_h
