"""Every mixer in the zoo at test size, and how the laws call one."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context, Mixer
from model.documents import document_positions, open_reading
from model.mixers import MIXERS
from model.positions import POSITIONS

WIDTH = 16

# Settings worth a law of their own, besides every mixer's defaults. `reference` names the slow, obvious form.
VARIANTS = {
    "attention": [{}, {"n_kv_heads": 2}, {"n_kv_heads": 1}],
    "s4d": [{}, {"A_init": "inv", "state": 8}],
}
REFERENCE = {"attention": "reference"}


def cases() -> list:
    """(mixer, settings, position) for every mixer, variant, and position that acts inside it."""
    found = []
    for name, cls in MIXERS.items():
        inside = [p for p, c in POSITIONS.items() if c.needs_attention] if hasattr(cls, "softmax") else []
        for settings in VARIANTS.get(name, [{}]):
            for position in ["none", *inside]:
                label = "-".join([name, *(f"{k}={v}" for k, v in settings.items()), position])
                found.append(pytest.param((name, settings, position), id=label))
    return found


def make(case, **options) -> Mixer:
    name, settings, position = case
    place = {"position": POSITIONS[position]} if hasattr(MIXERS[name], "softmax") else {}
    return MIXERS[name](width=WIDTH, **place, **settings, **options)


def reference(case) -> str:
    return REFERENCE.get(case[0], "sequential")


def inputs(B: int, L: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, L, WIDTH)), dtype)


def context(segments=None, L: int | None = None) -> Context:
    if segments is None:
        return Context(positions=jnp.arange(L, dtype=jnp.int32)[None])
    segments = jnp.asarray(segments, jnp.int32)
    positions, _ = document_positions(segments, open_reading(segments.shape[0]))
    return Context(positions=positions, segments=segments)


@cache
def params(mixer: Mixer):
    """Parameters away from their initial values, so that none is at a point where a bug would not show."""

    @jax.jit
    def moved():
        values = nn.unbox(mixer.init(jax.random.key(0), inputs(1, 4), context(L=4)))
        leaves, tree = jax.tree.flatten(values)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noise = [0.1 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, [x + n for x, n in zip(leaves, noise, strict=True)])

    return moved()


@cache
def apply(mixer: Mixer):
    return jax.jit(mixer.apply)


def far(a, b) -> float:
    """Distance relative to size."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
