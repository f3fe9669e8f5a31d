"""The evaluation pass: called by the training loop and by `python -m eval`."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from data.pipeline import Batch
from data.text import Text
from train.objective import Objective
from train.sharding import put_batch


def tally(
    step: Callable[[Any, Mapping[str, jax.Array]], dict],
    params: Any,
    batches: Iterable[Batch],
    sharding: NamedSharding,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(sum, count) over all batches of `loss`, `accuracy`, and by bins of every `accuracy/ATTRIBUTE`."""
    totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    # One batch behind the device, so that the next is on its way while this one is added up.
    pending = None
    for batch in batches:
        current = step(params, put_batch(batch, sharding))
        add(totals, pending)
        pending = current
    add(totals, pending)
    return totals


def fetch(arrays: Any) -> Any:
    """Arrays as NumPy ones, or the error that prevented them.

    Of a program that found no memory, a CPU's values are waited for in vain; that they will never come is told to
    those who ask whether they are ready (jax 0.10).
    """
    return jax.device_get(jax.block_until_ready(arrays))


def add(totals: dict[str, tuple[np.ndarray, np.ndarray]], sums: dict | None) -> None:
    for name, pair in (sums or {}).items():
        pair = tuple(np.asarray(x, np.float64) for x in fetch(pair))
        old = totals.get(name, (0.0, 0.0))
        totals[name] = (old[0] + pair[0], old[1] + pair[1])


def means(totals: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: mean(total, count) for name, (total, count) in totals.items()}


def mean(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """NaN where nothing was counted, as in a bin that no example fell in."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, total / count, np.nan)


def scalars(metrics: Mapping[str, np.ndarray], prefix: str) -> dict[str, float]:
    """The plain numbers, named `SPLIT/METRIC` for the log."""
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items() if np.ndim(value) == 0}


def slices(
    metrics: Mapping[str, np.ndarray], attributes: Mapping[str, tuple[str, ...]], prefix: str
) -> dict[str, dict[str, float | None]]:
    """Those by attribute, named `SPLIT/METRIC/ATTRIBUTE`: by the label of a bin, None where nothing was counted."""
    return {
        f"{prefix}/{name}": {
            label: None if np.isnan(value) else float(value)
            for label, value in zip(attributes[attribute], values, strict=True)
        }
        for name, values in metrics.items()
        if np.ndim(values) and (attribute := name.rpartition("/")[2]) in attributes
    }


def counts(totals: Mapping[str, tuple[np.ndarray, np.ndarray]], prefix: str) -> dict[str, int]:
    """How many targets each of those numbers rests on, under the same names."""
    return {f"{prefix}/{name}": round(float(count)) for name, (_, count) in totals.items() if np.ndim(count) == 0}


def bits_per_byte(objective: Objective, nats: np.ndarray | float) -> dict[str, np.ndarray | float]:
    """A mean loss in nats in the unit of byte-level language models, by name; nothing where it is no such loss."""
    of_bytes = isinstance(objective.task, Text) and objective.likelihood
    return {"bits_per_byte": nats / math.log(2)} if of_bytes else {}
