"""A matrix state carried from chunk to chunk by kernels for NVIDIA GPUs: in segments of the length, all at once.

A program carries a tile of a state's columns. Where heads and rows make too few programs, the length is cut: a run from
the identity, in which no token writes, tells what a segment makes of a state, one from nothing what it adds; with both,
states are handed on from segment to segment, and the true run begins with them. Gradients of states go the other way by
the same maps, transposed. Letters as in model/ops/fused_state.py; S segments.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

Array = jax.Array

TILE = 16  # values of a state's rows that one program carries
FILLING = 128  # programs that fill a large GPU well enough for one run over the whole length
WANTED = 512  # programs to be had of segments, else: four a multiprocessor


def in_turn(dtype: Any) -> tuple[int, int]:
    """Warps and stages of a kernel that goes from chunk to chunk: wide numbers take twice the room on the chip."""
    return 4, max(1, 4 // jnp.dtype(dtype).itemsize)


# What a program of the grid (heads, tiles, rows by segments) sees of an array of some shape


def keys_seen(n: int, S: int, K: int) -> pl.BlockSpec:
    """Of `[B, n, H, K]`, a segment's."""
    return pl.BlockSpec((None, n // S, None, K), lambda h, t, s: (s // S, s % S, h, 0))


def values_seen(n: int, S: int, R: int) -> pl.BlockSpec:
    """Of `[B, n, H, V]`, a segment's, and a tile of R values."""
    return pl.BlockSpec((None, n // S, None, R), lambda h, t, s: (s // S, s % S, h, t))


def states_seen(n: int, S: int, K: int, R: int) -> pl.BlockSpec:
    """Of `[B, n, H, K, V]`, likewise."""
    return pl.BlockSpec((None, n // S, None, K, R), lambda h, t, s: (s // S, s % S, h, 0, t))


def segment_seen(S: int, K: int, R: int) -> pl.BlockSpec:
    """Of `[B, S, H, K, V]`, what there is one of for a segment."""
    return pl.BlockSpec((None, None, None, K, R), lambda h, t, s: (s // S, s % S, h, 0, t))


def segments(programs: int, chunks: int) -> int:
    """How many parts of the length are worked on at once, a divisor of the number of chunks.

    Finding where they begin takes two more runs, so that few of them are not worth it; and as many steps from segment
    to segment as there are, so that more of them than a segment has chunks are not.
    """
    wanted = 1 if programs >= FILLING else min(math.isqrt(chunks), -(-WANTED // programs))
    found = next(n for n in range(wanted, 0, -1) if chunks % n == 0)
    return found if found > 4 else 1


def maps_of(run: Callable, h0: Array, chunks: int) -> Array | None:
    """What segments make of a state, `[B, S, H, K, K]`, or None where there is one.

    run: what segments end with, given what they begin with, `[B, S, H, K, K]`, where no token writes.
    """
    B, H, K, V = h0.shape
    S = segments(B * H * max(1, V // TILE), chunks)
    if S == 1:
        return None
    (maps,) = run(start=jnp.broadcast_to(jnp.eye(K, dtype=h0.dtype), (B, S, H, K, K)))
    return maps


def starts_of(run: Callable, maps: Array | None, h0: Array, reverse: bool = False) -> Array:
    """The states that segments begin with, `[B, S, H, K, V]`; in reverse, their gradients, from the end.

    run: what segments end with, given what they begin with.
    """
    if maps is None:
        return h0[:, None]
    (ends,) = run(start=jnp.zeros((*maps.shape[:-1], h0.shape[-1]), h0.dtype))
    return handed_on(maps, ends, h0, reverse)


def handed_on(maps: Array, ends: Array, h0: Array, reverse: bool) -> Array:
    """What segments begin with, `[B, S, H, K, V]`, given what they end with from nothing, and h0 before the first.

    maps: [B, S, H, K, K], what a segment makes of a state. In reverse: of gradients, from the end.
    """
    spec = "bhji,bhjv->bhiv" if reverse else "bhij,bhjv->bhiv"

    def step(h, segment):
        P, end = segment
        return jnp.einsum(spec, P, h, precision=lax.Precision.HIGHEST) + end, h

    turned = tuple(jnp.moveaxis(leaf, 1, 0) for leaf in (maps, ends))
    return jnp.moveaxis(lax.scan(step, h0, turned, reverse=reverse, unroll=min(8, len(turned[0])))[1], 0, 1)
