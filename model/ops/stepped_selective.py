"""Mamba's scan one token after another, for CPUs: what a token needs stays in the cache, and channels lie side by side.

States are [B, N, E] here: a sum over N is then one of rows of channels, where it would be one of 16 neighbours. They
are not kept for the gradient, which makes those of a chunk anew, and its decays once for all that asks for them: that
costs less than a loop over layers takes to copy them. Chunks are short, so that both stay in the cache too.
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

CHUNK = 16  # tokens

LOG2_E = math.log2(math.e)
# 2^r for r from -1/2 to 1/2, highest power first, within 4e-9; in float32 1 at 0: a step of length 0 loses nothing.
POWER = Chebyshev.interpolate(np.exp2, 6, domain=(-0.5, 0.5)).convert(kind=Polynomial).coef[::-1].tolist()

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def stepped_selective(
    x: Array, dt: Array, A: Array, B: Array, C: Array, h0: Array, keep: Array | None, chunk: int = CHUNK
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


def power_of_two(t: Array) -> Array:
    """2^t, held between 2^-126 and 2^127.

    Exponentials are most of what a token costs. By the compiler's, a CPU took twice as long for them: it checks for
    more than can come here.
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


@jax.custom_vjp
def walk(tokens: Tokens, A: Array, h0: Array) -> tuple[Array, Array]:
    """Outputs [L, B, E] and the last state; A: [N, E]."""
    rate = A * LOG2_E

    def read(h, token):
        x, dt, B, C, keep = token
        h = decay(dt, rate, keep) * h + (dt * x)[:, None, :] * B[:, :, None]
        return h, einsum("bne,bn->be", h, C)

    h, y = lax.scan(read, h0, tokens)
    return y, h


def walk_forward(tokens, A, h0):
    return walk(tokens, A, h0), (tokens, A, h0)


def walk_backward(saved, g):
    (x, dt, B, C, keep), A, h0 = saved
    g_y, g_h = g
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

    tokens = x, dt, B, C, a, before, g_y
    (g_h, d_A), (d_x, d_dt, d_B) = lax.scan(back, (g_h, jnp.zeros_like(g_h)), tokens, reverse=True)
    grads = (d_x, d_dt, d_B, d_C, jnp.zeros_like(keep))
    return tuple(g.astype(leaf.dtype) for g, leaf in zip(grads, saved[0], strict=True)), d_A.sum(axis=0), g_h


walk.defvjp(walk_forward, walk_backward)
