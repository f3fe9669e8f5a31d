"""How far back a model's answers reach, before training and after it."""

from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from data import bins
from eval.continuation import check_tokens
from eval.report import columns, provenance, write
from eval.restore import Restored
from model.errors import UserError
from train.evaluate import fetch, mean
from train.objective import Batch, row_weights
from train.reach import last_place, sensitivity
from train.run import on_mesh
from train.scores import batches_of
from train.sharding import put_batch


def reach(restored: Restored, *, split: str) -> None:
    """The suite: gradients by distance, written into the run's folder and printed."""
    check_tokens(restored.run.task)
    if restored.run.config.model.kind != "stack":
        raise UserError(
            f"model.kind {restored.run.config.model.kind!r} reads more than one row, and this suite asks how far back "
            "in one; allowed: stack"
        )
    report = provenance(restored, split) | {"distances": measure(restored, split)}
    path = write(restored, "reach", split, report)
    print(f"{report['task']} {split} split at step {restored.step}: norm of the gradient of the last answer")
    Console(highlight=False).print(table(report["distances"]))
    print(path)


def measure(restored: Restored, split: str) -> list[dict[str, Any]]:
    """Mean norms in bins of the distance from a vector to the last answer, with fresh parameters and with these."""
    run, c = restored.run, restored.run.config

    def found_in(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        return sensitivity(run.model, params, batch), last_place(batch), row_weights(batch) > 0

    step = on_mesh(found_in, run.mesh, c)
    labels = ("0", *bins.labels(max(run.task.length - 1, 1)))
    params = {"fresh": run.init().params, "trained": restored.params}
    totals = {name: np.zeros(len(labels)) for name in params}
    counts = np.zeros(len(labels))
    for batch in batches_of(run, split):
        rows = put_batch(batch, run.batch_sharding)
        for name in params:
            norms, last, real = fetch(step(params[name], rows))
            distance = last[:, None] - np.arange(norms.shape[1])
            seen = (distance >= 0) & real[:, None]  # not of rows past the end of a split
            number = np.where(distance > 0, bins.number(np.maximum(distance, 1)) + 1, 0)[seen]
            totals[name] += np.bincount(number, norms[seen], len(labels))
        counts += np.bincount(number, minlength=len(labels))
    found = {name: mean(total, counts) for name, total in totals.items()}
    return [
        {"distance": label, **{name: float(found[name][i]) for name in found}, "count": int(counts[i])}
        for i, label in enumerate(labels)
        if counts[i]
    ]


def table(lines: list[dict[str, Any]]) -> Table:
    out = columns("tokens back", "fresh", "trained")
    for line in lines:
        out.add_row(line["distance"], *(f"{line[name]:.3g}" for name in ("fresh", "trained")))
    return out
