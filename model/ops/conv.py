"""Causal convolutions along the length: long ones by FFT, short depthwise ones directly."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from model.ops.stretches import by_channels

TOKENS = ("batch", "length", "inner")  # of what is convolved


def long_conv(u: jax.Array, kernel: Callable[..., jax.Array], weights: tuple[jax.Array, ...]) -> jax.Array:
    """The convolution of u `[B, L, D]` with `kernel(*weights, L)`, `[L, D]`, of weights that have channels in front.

    Devices that share the length share channels here, kernels included: a transform needs all tokens.
    """

    def run(u, *weights):
        return (fft_conv(u, kernel(*weights, u.shape[1])),)

    axes = [("inner", *[None] * (leaf.ndim - 1)) for leaf in weights]
    (y,) = by_channels(run, (u, *weights), (TOKENS, *axes), (TOKENS,))
    return y


def fft_conv(u: jax.Array, kernel: jax.Array) -> jax.Array:
    """`y_t = sum_s kernel_s u_{t-s}` per channel; u: [B, L, D], kernel: [L, D], both real or both complex."""
    if jnp.iscomplexobj(u):
        L = u.shape[1]
        n = 2 * L  # room for the tail, so that it does not wrap around
        return jnp.fft.ifft(jnp.fft.fft(u, n=n, axis=1) * jnp.fft.fft(kernel, n=n, axis=0), axis=1)[:, :L]
    return right_angle_conv(u, kernel)


def right_angle_conv(u: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same for real arrays, by transforms of length L where zeros would make it 2L.

    Turned by up to a right angle along the length, the tail wraps around as imaginary numbers, and the real part is
    the answer (Crandall and Fagin 1994, https://doi.org/10.1090/S0025-5718-1994-1185244-1).
    """
    L = u.shape[1]
    # A constant: the compiler would make it anew for every channel.
    turn = np.exp(0.5j * np.pi / L * np.arange(L)).astype(jnp.result_type(u, jnp.complex64))
    # Transforms run along the last axis. Of two axes alone, a CPU gets the kernel the wrong way round (jax 0.10, where
    # devices share the length), hence three.
    u, kernel = (jnp.swapaxes(x, 1, 2) for x in (u, kernel[None]))
    product = jnp.fft.fft(u * turn) * jnp.fft.fft(kernel * turn)
    # The inverse by the forward transform: conjugates and scale cost nothing beside it.
    return jnp.swapaxes(jnp.real(jnp.fft.fft(jnp.conj(product)) * turn) / L, 1, 2)


def short_conv(x: jax.Array, kernel: jax.Array, past: jax.Array, reach: jax.Array | None = None) -> jax.Array:
    """Depthwise causal convolution, `[B, L, E]`; kernel: [W, E] with its last row for the current token.

    past: [B, W-1, E], the inputs before these. reach: [B, L], how far back each token may look; None: to the end.
    """
    W, L = kernel.shape[0], x.shape[1]
    joined = jnp.concatenate([past, x], axis=1)
    y = x * kernel[-1]
    for back in range(1, W):
        shifted = joined[:, W - 1 - back : W - 1 - back + L]
        if reach is not None:
            shifted = jnp.where((reach >= back)[..., None], shifted, 0)
        y = y + shifted * kernel[W - 1 - back]
    return y


def conv_tail(x: jax.Array, past: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """The `past` of the next call: the last W-1 inputs, padding left out. real: [B, L] bool, padding at the end."""
    W1, L = past.shape[1], x.shape[1]
    joined = jnp.concatenate([past, x], axis=1)
    if real is None:
        return joined[:, L:]
    # Tokens up to the last real one count; padding in front of them is of another document and never looked at.
    length = jnp.max(jnp.where(real, jnp.arange(1, L + 1), 0), axis=1)
    return jnp.take_along_axis(joined, (length[:, None] + jnp.arange(W1))[..., None], axis=1)
