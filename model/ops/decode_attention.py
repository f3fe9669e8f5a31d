"""Attention of one query a row to a cache that is filled up to a place: what is filled is read once, and no more.

In tiles, by the online softmax. In plain XLA a loop over tiles ends where the cache does so far; on a GPU, which would
have to ask its host at every turn of such a loop, a kernel does the same (`flash_decode`). All heads that share a
key-value head read it together.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from model.ops.dense_attention import LOW, xla
from model.ops.mask import both
from model.ops.scores import Form, Operands, levels, raw_scores, shape_scores, visible

Array = jax.Array
TILE = 256  # keys

BY_KEY = ("k", "v", "k_positions", "k_segments", "k_levels")  # of Operands, [B or 1, M, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def decode(form: Form, o: Operands) -> tuple[Array, Array]:
    """Output `[B, 1, G, R, V]` and log-sum-exp `[B, 1, G, R]`, a tile of keys after another."""
    (B, _, G, R, _), (M, V), size = o.q.shape, o.v.shape[1::2], min(TILE, o.k.shape[1])

    def add(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, sum_ = carry
        start = jnp.minimum(j * size, M - size)  # the last tile may begin within the one before it
        t = o.replace(**{name: tile_of(getattr(o, name), start, size) for name in BY_KEY})
        raw = raw_scores(t.q, t.k, t.additive)
        scores = shape_scores(form, raw, t.bias, t.q_positions, t.k_positions, levels(t))[:, :, :, 0]
        seen = both(visible(form, t.q_positions, t.k_positions, t.q_segments, t.k_segments), fresh(j, start, size))
        seen = seen[:, None]  # [B or 1, 1, 1, m]
        higher = jnp.maximum(top, jnp.max(jnp.where(seen, scores, LOW), axis=-1))
        weights, shrink = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0), jnp.exp(top - higher)
        values = jnp.einsum("bgrm,bmgv->bgrv", weights.astype(t.v.dtype), t.v, preferred_element_type=weights.dtype)
        return higher, total * shrink + jnp.sum(weights, axis=-1), sum_ * shrink[..., None] + values

    dtype = jnp.promote_types(o.q.dtype, jnp.float32)
    top, total = jnp.full((B, G, R), LOW, dtype), jnp.zeros((B, G, R), dtype)
    if o.sinks is not None:  # a key that has been seen already, with a value of 0
        top, total = jnp.broadcast_to(o.sinks.astype(dtype), top.shape), total + 1
    tiles = (jnp.minimum(o.k_filled, M) + size - 1) // size
    top, total, sum_ = lax.fori_loop(0, tiles, add, (top, total, jnp.zeros((B, G, R, V), dtype)))
    total = jnp.where(total > 0, total, 1)
    out = (sum_ / total[..., None]).astype(o.v.dtype)
    return out[:, None], (top + jnp.log(total))[:, None]


def tile_of(x: Array | None, start: Array, size: int) -> Array | None:
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, axis=1)


def fresh(j: Array, start: Array, size: int) -> Array:
    """Which keys of tile j no tile before it has had, `[1, 1, m]`."""
    return (start + jnp.arange(size, dtype=jnp.int32) >= j * size)[None, None]


def decode_forward(form, o):
    return decode(form, o), o


def decode_backward(form, o, grads):
    """Of all scores at once: they are one row of a matrix."""
    return jax.vjp(partial(xla, form), o)[1](grads)


decode.defvjp(decode_forward, decode_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def flash_decode(form: Form, o: Operands, interpret: bool = False) -> tuple[Array, Array]:
    """The same in a kernel for NVIDIA GPUs; `interpret` runs it anywhere, slowly.

    It reads the cache as it lies, and so takes no caches shorter than a tile and no head dims but powers of two.
    """
    from model.ops import decode_kernels  # here: Pallas takes a second to load, and only GPUs need it

    return decode_kernels.flash_decode(form, o, interpret)


def flash_decode_forward(form, o, interpret):
    return flash_decode(form, o, interpret), o


flash_decode.defvjp(flash_decode_forward, lambda form, interpret, o, grads: decode_backward(form, o, grads))


def parts_of(M: int, rows: int) -> tuple[int, int]:
    """Into how many parts a GPU's programs share the keys of each of `rows`, and how many keys are in each.

    Programs enough for every processor of a large chip to have several, but not fewer than a tile of keys each. Both
    are powers of two, as a kernel likes them.
    """
    keys = 2 ** round(math.log2(max(1, M * rows / 1024)))
    keys = min(max(keys, 128), 1024)
    return 2 ** math.ceil(math.log2(-(-M // keys))), keys
