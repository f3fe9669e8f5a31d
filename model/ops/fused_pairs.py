"""Pairs of a chunk's tokens whose channels decay by themselves between them, in kernels for NVIDIA GPUs.

The decay between two tokens of a chunk enters a matrix product as two factors, one of each token. Where the chunk as a
whole decays little, both are measured from its middle, as one of them may then exceed 1: one product serves all pairs.
Else spans of 1, 2, 4, ... tokens are joined in twos and measured from where they meet, as in
model/ops/chunked_channels.py: no factor exceeds 1, and nothing is divided by a decay. Each way has kernels of its own,
as the second needs registers that the first would wait for. Letters as in model/ops/fused_state.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model.ops.fused_state import Refs, launch, sides

Array = jax.Array

LITTLE = 64.0  # of log decay between the middle of a chunk and its ends: e^64 and e^-64 are far from any bounds
ONE = pl.BlockSpec((None, None, None), lambda h, m, b: (b, h, m))  # of `[B, H, M]`, what is a chunk's


def summed(seen: Array, x: Array, dtype: Any) -> Array:
    """For each token the sum of wide numbers over those that it sees: a product, exact enough for tokens of a dtype."""
    if dtype == x.dtype:
        return dot(seen.astype(dtype), x, precision=lax.Precision.HIGHEST)
    high = x.astype(dtype)
    low = (x - high).astype(dtype)
    seen = seen.astype(dtype)
    return dot(seen, high) + dot(seen, low)


def rows(x: Array, see: Refs, name: str) -> Array:
    """x where tokens are of the first document of a chunk, or of the last; else nothing."""
    if "documents" not in see:
        return x
    kept = see["documents"][...] == 0 if name == "first" else see["last"][...] != 0
    return jnp.where(kept[:, None], x, 0)


def unbroken(x: Array, see: Refs) -> Array:
    """x if no document begins in the chunk; else nothing."""
    return x if "documents" not in see else jnp.where(see["none"][...] != 0, x, 0)


def whole(w: Array, see: Refs) -> tuple[Array, Array]:
    """What is left of the state before the chunk at its end, [K], and whether the chunk decays strongly."""
    first, second = halves(w)
    strong = jnp.min(jnp.minimum(first, second)) < -LITTLE
    return unbroken(jnp.exp(first + second), see), strong.astype(jnp.int32)


def halves(w: Array) -> list[Array]:
    """The log decays of either half of a chunk, [K]."""
    first = lax.broadcasted_iota(jnp.int32, w.shape, 0) < w.shape[0] // 2
    return [jnp.sum(jnp.where(half, w, 0), axis=0) for half in (first, ~first)]


def cuts(documents: Array | None, chunk: int) -> dict[str, tuple[Array, pl.BlockSpec]]:
    """The documents of tokens, which of them the chunk ends with, and whether none begins in it."""
    if documents is None:
        return {}
    token = pl.BlockSpec((None, None, chunk), lambda h, m, b: (b, m, 0))
    last = (documents == documents[..., -1:]).astype(jnp.int32)
    none = (documents[..., -1] == 0).astype(jnp.int32)
    return dict(
        documents=(documents, token),
        last=(last, token),
        none=(none, pl.BlockSpec((None, None), lambda h, m, b: (b, m))),
    )


def same_document(see: Refs, Q: int) -> Array:
    """Whether tokens i and j are of one document, at [i, j], j not after i."""
    row, column = sides(Q)
    if "documents" not in see:
        return row >= column
    documents = see["documents"][...]
    return (row >= column) & (documents[:, None] == documents[None, :])


def between(level: Any, token: Array, other: Array) -> Array:
    """Whether another token lies between a token and where its span of 2^level meets its neighbour."""
    place = (((token >> (level + 1)) << 1) | 1) << level
    earlier, later = (token < other) & (other < place), (place <= other) & (other <= token)
    return earlier | later


def meeting(level: Any, i: Array, j: Array) -> Array:
    """Whether token i is of a span of 2^level that meets that of token j, the earlier one."""
    return (i >> (level + 1) == j >> (level + 1)) & ((i >> level) & 1 == 1) & ((j >> level) & 1 == 0)


def from_middle(w: Array, after: Array, dtype: Any) -> Array:
    """Log decays from the chunk's middle to before tokens `after`, above 0 in its first half; after: [Q, Q], by row.

    They are sums, not differences of running ones.
    """
    half, column = len(w) // 2, sides(len(w))[1]
    later, earlier = (half <= column) & (column < after), (after <= column) & (column < half)
    return summed(jnp.where(later, 1.0, 0.0) - jnp.where(earlier, 1.0, 0.0), w, dtype)


def in_two(
    kernels: tuple[Callable, Callable],
    name: str,
    given: dict,
    made: list,
    strong: Array,
    params: tuple[int, int],
    interpret: bool,
) -> list[Array]:
    """Chunks that decay little by the first kernel, and then the others by the second, onto what the first has made.

    params: warps and stages.
    """

    def run(kernel: Callable, name: str, wanted: int, given: dict, onto: tuple[str, ...] = ()) -> list[Array]:
        def where(see: Refs, *out):
            pl.when(see["strong"][...] == wanted)(lambda: kernel(see, *out))

        B, H, M = strong.shape
        return launch(where, name, (H, M, B), given, made, params, interpret, onto)

    at_once, by_halves = kernels
    given = given | dict(strong=(strong, ONE))
    found = run(at_once, name, 0, given)
    onto = {f"made_{i}": (array, block) for i, (array, (_, block)) in enumerate(zip(found, made, strict=True))}
    return run(by_halves, f"{name}_by_halves", 1, given | onto, tuple(onto))


def kept_got(see: Refs, end: Array) -> Array:
    """What log decays get from the state before the chunk by that after it, [K]; end: their sum over the chunk."""
    return unbroken(jnp.exp(end) * jnp.sum(see["before"][...].astype(end.dtype) * see["after"][...], axis=1), see)
