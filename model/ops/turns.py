"""Angles `n x` of whole numbers n, less whole turns. A float32 product of 100,000 radians is off by up to 0.004.

An angle x is kept as so many steps of 2^-32 turns and the rest of it. A product of int32 wraps around just where turns
do, so n times the steps is exact however often it goes round, and n times the rest is small.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PER_RADIAN = 1 / (2 * np.pi)
# The same in three parts. With the first two, of 12 bits, a number of 12 bits has a product that float32 holds exactly.
FIRST = np.round(PER_RADIAN * 2**14) / 2**14
SECOND = np.round((PER_RADIAN - FIRST) * 2**26) / 2**26
THIRD = PER_RADIAN - FIRST - SECOND


class Turns(NamedTuple):
    """An angle as a number of turns, `steps / 2^32 + rest`, less whole ones."""

    steps: jax.Array | np.ndarray  # int32
    rest: jax.Array | np.ndarray


def constant_turns(radians: np.ndarray, dtype: Any) -> Turns:
    """Of angles known in float64."""
    turns = np.mod(radians * PER_RADIAN, 1)
    steps = np.floor(turns * 2**32)
    return Turns(steps.astype(np.uint32).view(np.int32), (turns - steps / 2**32).astype(dtype))


def float_turns(radians: jax.Array) -> Turns:
    """Of angles known in their dtype alone, which are taken to be exact."""
    if radians.dtype == jnp.float64:
        return stepped(radians * PER_RADIAN)
    # Every product is exact, or too small for its rounding to count: a compiler may fuse it with a sum.
    high = lax.reduce_precision(radians, exponent_bits=8, mantissa_bits=11)
    low = radians - high
    first, second, third = (np.float32(part) for part in (FIRST, SECOND, THIRD))
    steps, rests = zip(*map(stepped, (high * first, high * second, low * first)), strict=True)
    return Turns(sum(steps), sum(rests) + (low * second + radians * third))


def stepped(turns: jax.Array) -> Turns:
    turns = turns - jnp.round(turns)
    half_steps = jnp.round(turns * 2.0**31)  # of twice the size, so that half a turn is no overflow
    return Turns(2 * half_steps.astype(jnp.int32), turns - half_steps / 2.0**31)


def times(n: jax.Array, x: Turns) -> jax.Array:
    """`n x` in radians, less the whole turns that its steps make."""
    near = (n.astype(jnp.int32) * x.steps).astype(x.rest.dtype) / 2.0**32
    return 2 * np.pi * (near + n.astype(x.rest.dtype) * x.rest)
