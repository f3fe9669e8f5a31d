"""Fourier transforms over the width and the length of rows that need not be full.

The transform of a row's first n tokens, with n known only when the program runs, is Bluestein's chirp-z transform
(https://doi.org/10.1109/TAU.1970.1162132): `k t = (k^2 + t^2 - (k - t)^2) / 2` makes it a convolution with a chirp,
and that is one of transforms of a fixed length.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from model import placement
from model.contract import wide
from model.ops.conv import TOKENS, transform
from model.ops.stretches import by_channels, stretches


def fourier(x: jax.Array, n: jax.Array | None) -> jax.Array:
    """The real part of the transform of x `[B, L, D]` over D and over the first n [B] tokens; None: over all of them.

    Tokens behind the first n are zero. Each device transforms its own tokens over the width, then its own channels over
    the length: the compiler would give each of them all.
    """

    def along_length(z, *n):
        z = jnp.swapaxes(z, 1, 2)
        made = chirp_z(z, *n) if n else transform(z)
        return (jnp.swapaxes(jnp.real(made), 1, 2),)

    own = placement.spec(("batch", "length", None), x.shape)
    z = placement.on_each_device(transform, (own,), own)(x.astype(jnp.result_type(wide(x.dtype), jnp.complex64)))
    given, axes = (z,) if n is None else (z, n), (TOKENS, ("batch",))
    if stretches(x.shape[1]) > 1:
        return by_channels(along_length, given, axes[: len(given)], (TOKENS,))[0]
    own = tuple(placement.spec(names, leaf.shape) for names, leaf in zip(axes, given, strict=False))
    return placement.on_each_device(along_length, own, own[:1])(*given)[0]


def chirp_z(z: jax.Array, n: jax.Array) -> jax.Array:
    """`y_k = sum_{t<n} z_t exp(-2 pi i k t / n)` for k < n along the last axis of z `[B, D, L]`; n: [B]."""
    L = z.shape[-1]
    t = jnp.arange(L, dtype=jnp.uint32)
    chirp = turned(product_mod(t, t, 2 * n[:, None]), 2 * n[:, None], z.dtype)[:, None]  # exp(-pi i t^2 / n)
    back = jnp.conj(chirp)
    kernel = jnp.concatenate([back, jnp.zeros_like(back[..., :1]), back[..., :0:-1]], axis=-1)  # lags 0.. and ..-1
    product = transform(jnp.pad(z * chirp, [(0, 0), (0, 0), (0, L)])) * transform(kernel)
    return chirp * jnp.conj(transform(jnp.conj(product)))[..., :L] / (2 * L)


def reference(x: jax.Array, n: jax.Array | None) -> jax.Array:
    """The same by matrices."""
    (B, L, D), dtype = x.shape, jnp.result_type(wide(x.dtype), jnp.complex64)
    n = jnp.full(B, L) if n is None else n
    over_width, over_length = matrix(D, jnp.full(1, D), dtype)[0], matrix(L, n, dtype)
    return jnp.real(jnp.einsum("bkl,bld,de->bke", over_length, x.astype(dtype), over_width))


def matrix(size: int, n: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`exp(-2 pi i k t / n)`, `[B, size, size]`; n: [B]."""
    t, n = jnp.arange(size, dtype=jnp.uint32), n[:, None, None]
    return turned(product_mod(t[:, None] % n.astype(jnp.uint32), t, n), n, dtype)


def turned(part: jax.Array, whole: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`exp(-2 pi i part / whole)` of whole numbers, part below whole.

    Right angles are taken off first, which is exact, so that what is left is small and well rounded.
    """
    real = jnp.finfo(dtype).dtype
    part, whole = part.astype(jnp.int32), whole.astype(jnp.int32)
    right = (4 * part + whole // 2) // whole
    angle = -jnp.pi / 2 * ((4 * part - right * whole).astype(real) / whole.astype(real))
    return jnp.asarray([1, -1j, -1, 1j], dtype)[right % 4] * jax.lax.complex(jnp.cos(angle), jnp.sin(angle))


def product_mod(a: jax.Array, b: jax.Array, m: jax.Array) -> jax.Array:
    """`a b mod m` without rounding or overflow, for a and b below 2^26 and m up to 2^27, as 32-bit numbers.

    Digit by digit of a: a float32 would lose the angle of a long row, which is what is left over of a large square.
    """
    a, b, m = (x.astype(jnp.uint32) for x in (a, b, m))
    made = jnp.zeros(jnp.broadcast_shapes(a.shape, b.shape, m.shape), jnp.uint32)
    for shift in range(24, -1, -4):
        made = (made * 16 + ((a >> shift) & 15) * b) % m
    return made


IMPLEMENTATIONS: dict[str, Callable[[jax.Array, jax.Array | None], jax.Array]] = {
    "fft": fourier,
    "reference": reference,
}
