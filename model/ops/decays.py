"""Log decays, added up over stretches of tokens without loss, the running maxima that keep
exponentials in range, and the states that chunks of tokens hand on.
"""

import jax
import jax.numpy as jnp
from jax import lax

from model.ops.stretches import of_earlier, of_last, on_stretches

Array = jax.Array

FORGET = -1e30  # a log decay that leaves nothing; finite, as 0 times -inf would be NaN
STRONGEST = -64.0  # a token's log decay: what e^-64 leaves is lost beside anything
STEP = 2.0**-10  # float32 adds up multiples of it exactly, over 256 tokens of the strongest decay
GROUP = 32  # chunks whose states are carried on by one product


def filled(x: Array, size: int, axis: int = 1, value: float = 0) -> Array:
    """With an axis filled up to a multiple of some size.

    What needs no filling stays the array it is: of a copy, the gradient would keep both.
    """
    if x.shape[axis] % size == 0:
        return x
    edges = [(0, 0)] * x.ndim
    edges[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, edges, constant_values=value)


def in_chunks(x: Array, size: int, axis: int = 1) -> Array:
    """Splits an axis into pieces, `[..., n, size, ...]`, the last one filled up with zeros."""
    n = -(-x.shape[axis] // size)
    return filled(x, size, axis).reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :])


def spans(a: Array) -> Array:
    """The sum of every stretch of the last axis: `a_j + ... + a_{i-1}` at [i, j] of `[..., n+1, n+1]`, -inf for j > i.

    Each is added up by itself: a difference of running sums would lose the small ones among them.
    """
    edge, k = jnp.arange(a.shape[-1] + 1), jnp.arange(a.shape[-1])
    inside = (edge[:, None] <= k) & (k < edge[:, None, None])  # [i, j, k]
    sums = jnp.einsum("...k,ijk->...ij", a, inside.astype(a.dtype), precision=lax.Precision.HIGHEST)
    return jnp.where(edge[:, None] >= edge, sums, -jnp.inf)


def sums(a: Array, seen: Array) -> Array:
    """For each token the sum of the others that it has seen, `[..., Q]`; a product, as scans are slow to compile."""
    return jnp.einsum("...k,ik->...i", a, seen.astype(a.dtype), precision=lax.Precision.HIGHEST)


def parts(a: Array) -> tuple[Array, Array]:
    """Multiples of STEP, whose running sums are exact and so are their differences, and the small rest."""
    coarse = jnp.round(a / STEP) * STEP
    return coarse, a - coarse


def carry(t: Array, v: Array, h0: Array) -> tuple[Array, Array]:
    """The states before each chunk, `[B, M, X, Y]`, and after the last: `h_{m+1} = exp(t_m) h_m + v_m` from h0.

    t: [B, M, X]; v: [B, M, X, Y]; h0: [B, X, Y]. A group of chunks is one product; groups are carried like chunks.
    """
    B, M, X, Y = v.shape
    size = min(M, GROUP)
    t, v = in_chunks(t, size), in_chunks(v, size)  # filled with t = 0, v = 0, which leaves a state as it was
    log_decay = spans(jnp.moveaxis(t, 2, -1))
    decay = jnp.exp(log_decay)
    own = jnp.einsum("bnxij,bnjxy->bnixy", decay[..., 1:], v, precision=lax.Precision.HIGHEST)
    several = t.shape[1] > 1
    first, last = carry(log_decay[..., -1, 0], own[:, :, -1], h0) if several else (h0[:, None], None)
    h = own + jnp.moveaxis(decay[..., 0], -1, 2)[..., None] * first[:, :, None]
    return h[:, :, :-1].reshape(B, -1, X, Y)[:, :M], last if several else h[:, 0, -1]


def exponents(decay: Array, entering: Array, pp0: Array) -> tuple[Array, Array, Array]:
    """`pp_t = max(pp_{t-1} + decay_t, entering_t)` before and after each token, `[B, L, E]`, and the last, `[B, E]`."""

    def combine(one, two):
        return one[0] + two[0], jnp.maximum(one[1] + two[0], two[1])

    def stretch(tokens, pp0, share):
        faded, top = lax.associative_scan(combine, tokens, axis=1)
        empty = jnp.zeros_like(pp0), jnp.full_like(pp0, -jnp.inf)
        _, start = combine((0, pp0), of_earlier(combine, (faded[:, -1], top[:, -1]), empty, share))
        pp = jnp.maximum(top, faded + start[:, None])
        before = jnp.concatenate([start[:, None], pp[:, :-1]], axis=1)
        return (before, pp), of_last(pp[:, -1], share)

    (before, pp), end = on_stretches(stretch, (decay, entering), pp0)
    return before, pp, end


def stabilised(
    log_f: Array, log_i: Array, m0: Array, real: Array | None, keep: Array | None
) -> tuple[Array, Array, Array]:
    """Log decays of sums kept as multiples of `e^m`, that m after each token, each `[B, L, H]`, and the last, `[B, H]`.

    `m_t = max(log_f_t + m_{t-1}, log_i_t)`: what is kept of the past and what a token adds, times `e^-m`, then exceed 1
    neither of them. Any m would do that keeps both in range, so no gradient runs through it. real, keep: [B, L], which
    tokens count and where the past is kept; None: all.
    """
    if real is not None:
        real, keep = real[..., None], keep[..., None]
        log_f, log_i = jnp.where(real, log_f, 0), jnp.where(real, log_i, -jnp.inf)
    faded = log_f if keep is None else jnp.where(keep, log_f, -jnp.inf)
    before, m, last = exponents(*lax.stop_gradient((faded, log_i, m0)))
    w = log_f + (before - m)  # m may be large, and what it was rounded by when it was made must not be lost
    return w if keep is None else jnp.where(keep, w, 0), m, last
