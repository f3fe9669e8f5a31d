"""Gradients against central differences of a definition written out in float64, which nothing differentiates."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

STEP = 1e-6  # along a way whose numbers are about 1: rounding and what a difference leaves out are both about 1e-9
WAYS = 2  # a leaf: what is wrong with any number of a gradient shows along each
LEAST = 0.01  # the share of the whole gradient below which a leaf's is not looked at any closer


def check_slopes(value: Callable[[Any], float], at: Any, grads: Any, within: float = 3e-5) -> None:
    """Whether `grads` are the gradients of `value` at a tree of arrays, leaf by leaf, relative to their size."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), at))
    found = [np.asarray(grad, np.float64) for grad in jax.tree.leaves(grads)]
    least = LEAST * np.sqrt(sum(np.sum(grad**2) for grad in found))
    rng = np.random.default_rng(3)
    for i, (leaf, grad) in enumerate(zip(leaves, found, strict=True)):
        assert leaf.shape == grad.shape and np.isfinite(grad).all()
        for _ in range(WAYS):
            way = rng.normal(size=leaf.shape)
            ahead, behind = (
                value(tree.unflatten([*leaves[:i], leaf + step * way, *leaves[i + 1 :]])) for step in (STEP, -STEP)
            )
            error = abs(np.sum(grad * way) - (ahead - behind) / (2 * STEP))
            assert error < within * max(np.linalg.norm(grad), least), (i, leaf.shape, error)
