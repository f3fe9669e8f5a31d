"""Random numbers for tests that only need some: a hash of (key, index), which compiles in a fraction of the time.

Most of compiling a model's initialisation goes into the rounds of the usual generator, once for every parameter.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

from model.stack import Stack

GOLDEN_RATIO = np.uint32(0x9E3779B9)


def mix(x: jax.Array) -> jax.Array:
    """Every bit of the input changes half of those of the output. https://github.com/skeeto/hash-prospector"""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def count(shape: tuple[int, ...]) -> jax.Array:
    return jnp.arange(np.prod(shape, dtype=int), dtype=jnp.uint32).reshape(shape)


def random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    assert bit_width == 32, "nobody has asked for others"
    return mix(mix(count(shape)) + key[0])


HASH = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.asarray(seed, jnp.uint32).reshape(1),
    split=lambda key, shape: mix(key + GOLDEN_RATIO * (1 + count((*shape, 1)))),
    random_bits=random_bits,
    fold_in=lambda key, data: mix(key + GOLDEN_RATIO * jnp.asarray(data, jnp.uint32)),
    name="hash",
    tag="hash",
)


def quickly(patch: pytest.MonkeyPatch) -> None:
    """Models are drawn by it, and layers traced once: they then draw other numbers than those of real runs."""
    patch.setattr(jax.random, "key", partial(jax.random.key, impl=HASH))
    patch.setattr(Stack, "draws", lambda *_: False)
