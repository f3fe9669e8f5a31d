"""Objectives: what a model is trained for, `(model, params, batch, rng) -> sums`.

A sum is a pair (sum, count) by the name of its metric. `loss` is minimised, its sum over its count; both are of the
whole batch, so that parts of a batch add up. Without `rng` the model is being tested.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from model.asked import ARGUMENTS
from model.build import Model

Batch = Mapping[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]  # metric -> (sum, count)
Objective = Callable[[Model, Any, Batch, jax.Array | None], Sums]


def cross_entropy(attributes: Mapping[str, tuple[str, ...]], whole_answers: bool = False) -> Objective:
    """Of the task's own targets: the next token, a class, an answer at each place where it asks.

    A test slices the accuracy by every bin of the task's attributes. `whole_answers`: rows that are right in every
    place count as well.
    """

    def objective(model: Model, params: Any, batch: Batch, rng: jax.Array | None) -> Sums:
        logits, _ = model.apply(
            {"params": params},
            batch["inputs"],
            **arguments(batch),
            train=rng is not None,
            rngs=None if rng is None else {"dropout": rng},
        )
        weights = batch["weights"]
        logits = jnp.where(weights[..., None] > 0, logits, 0)  # what is not asked may be answered by NaN
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]) * weights
        hits = (jnp.argmax(logits, -1) == batch["targets"]) * weights
        count = weights.sum()
        sums = {"loss": (loss.sum(), count), "accuracy": (hits.sum(), count)}
        if rng is None:
            sums |= sliced(attributes, batch, hits)
        if whole_answers:
            sums |= exact(attributes if rng is None else {}, batch, hits)
        return sums

    return objective


def arguments(batch: Batch) -> Batch:
    """What of a batch a model is called with, besides its inputs."""
    return {name: batch[name] for name in ARGUMENTS if name in batch}


def sliced(attributes: Mapping[str, tuple[str, ...]], batch: Batch, hits: jax.Array) -> Sums:
    """Accuracy within every bin of every attribute."""
    sums = {}
    for name, labels in attributes.items():
        bins = batch[f"attr_{name}"].reshape(-1)
        sums[f"accuracy/{name}"] = tuple(
            jax.ops.segment_sum(values.reshape(-1), bins, len(labels)) for values in (hits, batch["weights"])
        )
    return sums


def exact(attributes: Mapping[str, tuple[str, ...]], batch: Batch, hits: jax.Array) -> Sums:
    """Rows whose every target is hit, also within the bins of attributes, which are the same all along a row.

    All of an answer is then what the model would write by itself, taking the likeliest token each time.
    """
    weights = batch["weights"]
    rows = (weights > 0).any(-1).astype(jnp.float32)
    right = (hits >= weights).all(-1) * rows
    sums = {"exact": (right.sum(), rows.sum())}
    for name, labels in attributes.items():
        bins = batch[f"attr_{name}"].max(-1)  # padding has 0
        sums[f"exact/{name}"] = tuple(jax.ops.segment_sum(values, bins, len(labels)) for values in (right, rows))
    return sums
