"""Long convolutions with kernels that no recurrence makes: behind past inputs, in documents, between padding.

A transform knows nothing of documents. But of the pairs on both sides of a cut, those that see each other all belong
to the one document that lies across it. So the inputs left of the cut that are of this document are convolved, and
what comes of it is kept right of the cut for its tokens; then each side is cut in the same way. That is exact, and of
n tokens takes the logarithm of n transforms as long as all of them together.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from model.ops.conv import TOKENS, Kernel, axes_of, fft_conv, moved, places
from model.ops.stretches import by_channels

Array = jax.Array

SHORT = 64  # tokens of a block that is not cut any more
FEW = 16  # tokens of a call up to which each goes through its past by itself


def document_conv(
    u: Array,
    past: Array,
    kernel: Kernel,
    weights: tuple[Array, ...],
    *,
    ahead: tuple[Array, ...] = (),
    shared: tuple[Array, ...] = (),
    reach: Array | None = None,
    real: Array | None = None,
) -> Array:
    """The convolution of u `[B, L, D]` behind past inputs `[B, P, D]`, document by document; kernels as of `long_conv`.

    reach, real: [B, L], as `short_conv` has them; None: all is one document, without padding.
    """
    marks = () if reach is None else (reach, real)

    def run(u, past, *arrays):
        (reach, real), arrays = arrays[: len(marks)] or (None, None), arrays[len(marks) :]
        both, common = arrays[: len(arrays) - len(shared)], arrays[len(arrays) - len(shared) :]
        M = past.shape[1] + u.shape[1]
        back, ahead = (kernel(*part, *common, M) if part else None for part in (both[:n], both[n:]))
        if reach is None:
            return (through(u, past, None, back, ahead),)
        there, here = places(real)
        reach = jnp.where(there < 0, -1, jnp.take_along_axis(reach, jnp.maximum(there, 0), axis=1))
        return (moved(through(moved(u, there, here), past, reach, back, ahead), here, there),)

    n, both = len(weights), (*weights, *ahead)
    axes = TOKENS, ("batch", None, "inner"), *[TOKENS[:2]] * len(marks), *axes_of(both, shared)
    (y,) = by_channels(run, (u, past, *marks, *both, *shared), axes, (TOKENS,))
    return y


def through(u: Array, past: Array, reach: Array | None, back: Array, ahead: Array | None) -> Array:
    """The same for rows without padding but behind their tokens, where reach is -1."""
    L, P = u.shape[1], past.shape[1]
    if P and L <= FEW:
        return one_by_one(u, past, reach, back)
    window = jnp.concatenate([past, u], axis=1)
    documents = None if reach is None else numbered(reach, P)
    y = halved(window, documents, back)
    if ahead is not None:
        flipped = None if documents is None else documents[:, ::-1]
        y = y + halved(window[:, ::-1], flipped, ahead)[:, ::-1]
    return y[:, P:]


def numbered(reach: Array, P: int) -> Array:
    """A number for each document, `[B, P + L]`; past inputs out of sight and what is no token have their own."""
    now = jnp.where(reach < 0, -1, jnp.cumsum(reach == 0, axis=1))
    before = jnp.where(P - jnp.arange(P) <= reach[:, :1], 0, -2)
    return jnp.concatenate([before, now], axis=1)


def one_by_one(u: Array, past: Array, reach: Array | None, kernel: Array) -> Array:
    """A few tokens, each of which looks at all before it."""
    L, M = u.shape[1], past.shape[1] + u.shape[1]
    window = jnp.concatenate([past, u], axis=1)
    turned = jnp.pad(kernel[:M], [(L, 0), (0, 0)])[::-1]  # lag M - 1 - i at i, and zeros for lags below 0

    def look(t):
        taps = lax.dynamic_slice_in_dim(turned, L - 1 - t, M)
        if reach is None:
            return jnp.sum(window * taps, axis=1)
        lag = M - L + t - jnp.arange(M)
        return jnp.sum(jnp.where((lag <= reach[:, t, None])[..., None], window, 0) * taps, axis=1)

    return jnp.moveaxis(lax.map(look, jnp.arange(L)), 0, 1)


def halved(u: Array, documents: Array | None, kernel: Array) -> Array:
    """`y_t = sum_s kernel_s u_{t-s}` over the tokens of t's own document, `[B, L, D]`; documents: [B, L]."""
    L = u.shape[1]
    block = min(SHORT, L)
    blocks = 1 << (-(-L // block) - 1).bit_length()  # a power of two
    fill = blocks * block - L
    u = jnp.pad(u, [(0, 0), (0, fill), (0, 0)])
    kernel = jnp.pad(kernel[:L], [(0, fill), (0, 0)])
    documents = None if documents is None else jnp.pad(documents, [(0, 0), (0, fill)], constant_values=-1)
    y = within_blocks(u, documents, kernel[:block])
    while block < u.shape[1]:
        y = y + across(u, documents, kernel[: 2 * block])
        block *= 2
    return y[:, :L]


@partial(jax.checkpoint, prevent_cse=False)
def across(u: Array, documents: Array | None, kernel: Array) -> Array:
    """What the first halves of blocks as long as the kernel add to the second, `[B, L, D]`."""
    (B, L, D), n = u.shape, kernel.shape[0]
    first = jnp.arange(n) < n // 2
    u = u.reshape(-1, n, D)
    if documents is None:
        return jnp.where(first[:, None], 0, fft_conv(jnp.where(first[:, None], u, 0), kernel)).reshape(B, L, D)
    documents = documents.reshape(-1, n)
    same = documents == documents[:, n // 2, None]
    y = fft_conv(jnp.where((same & first)[..., None], u, 0), kernel)
    return jnp.where((same & ~first)[..., None], y, 0).reshape(B, L, D)


def within_blocks(u: Array, documents: Array | None, kernel: Array) -> Array:
    """What tokens of a block as long as the kernel add to those behind them in it, one lag after another."""
    (B, L, D), n = u.shape, kernel.shape[0]
    u = u.reshape(-1, n, D)
    before = jnp.pad(u, [(0, 0), (n - 1, 0), (0, 0)])
    if documents is not None:
        documents = documents.reshape(-1, n)
        theirs = jnp.pad(documents, [(0, 0), (n - 1, 0)], constant_values=-3)

    @partial(jax.checkpoint, prevent_cse=False)  # else what each lag sees is kept for the gradient
    def add(y, at):
        lag, tap = at
        seen = lax.dynamic_slice_in_dim(before, n - 1 - lag, n, axis=1)
        if documents is not None:
            same = lax.dynamic_slice_in_dim(theirs, n - 1 - lag, n, axis=1) == documents
            seen = jnp.where(same[..., None], seen, 0)
        return y + tap * seen, None

    return lax.scan(add, jnp.zeros_like(u), (jnp.arange(n), kernel))[0].reshape(B, L, D)
