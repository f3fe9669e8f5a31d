"""Accuracy, loss and perplexity of a checkpoint on a split, and accuracy in every bin of every attribute."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from eval.report import changed, columns, provenance, write
from eval.restore import Restored
from train.evaluate import bits_per_byte, mean, tally
from train.objective import Objective
from train.scores import batches_of

Totals = Mapping[str, tuple[np.ndarray, np.ndarray]]  # metric -> (sum, count)


def accuracy(restored: Restored, *, split: str) -> None:
    """The suite: measures, writes the numbers into the run's folder, prints them; of many processes the first does."""
    report = provenance(restored, split) | measure(restored, split)
    if jax.process_index() != 0:
        return
    path = write(restored, "accuracy", split, report)
    print(headline(report))
    console = Console(highlight=False)
    for table in tables(report):
        console.print(table)
    print(path)


def measure(restored: Restored, split: str) -> dict[str, Any]:
    """Numbers over the first `eval_batches` batches of a split, or over all of it."""
    run, c = restored.run, restored.run.config
    totals = tally(run.eval_step, restored.params, batches_of(run, split), run.batch_sharding)
    loss = float(mean(*totals["loss"]))
    asked, there = c.eval_batches * c.batch_size, run.task.size(split)
    return {
        "examples": min(n for n in (asked, there) if n),
        "targets": int(totals["accuracy"][1]),
        "metrics": plain(totals) | readings(run.objective, loss),
        "baselines": run.objective.baselines(),
        "slices": {
            name: of_bins(run.objective, labels, totals, name) for name, labels in run.objective.attributes.items()
        },
    }


def plain(totals: Totals) -> dict[str, float]:
    """The plain numbers; `exact` where whole answers count, `reach` where the objective asks for it."""
    return {name: float(mean(*totals[name])) for name in ("accuracy", "exact", "loss", "reach") if name in totals}


def readings(objective: Objective, loss: float) -> dict[str, float]:
    """A language model's mean loss, in nats, said in other ways."""
    if objective.task.kind != "lm" or not objective.likelihood:
        return {}
    return {"perplexity": float(np.exp(loss)), **bits_per_byte(objective, loss)}


def of_bins(objective: Objective, labels: tuple[str, ...], totals: Totals, name: str) -> list[dict[str, Any]]:
    """One line per bin of an attribute, with `exact` where whole answers count, and bits per byte of running text."""
    lines = by_bin(labels, *totals[f"accuracy/{name}"])
    more = {"exact": mean(*totals[f"exact/{name}"])} if f"exact/{name}" in totals else {}
    if f"loss/{name}" in totals:
        more |= bits_per_byte(objective, mean(*totals[f"loss/{name}"]))
    for metric, values in more.items():
        for line, value in zip(lines, values, strict=True):
            line[metric] = float(value)
    return lines


def by_bin(labels: tuple[str, ...], hits: np.ndarray, counts: np.ndarray) -> list[dict[str, Any]]:
    """One line per bin; the accuracy of an empty one is NaN."""
    lines = zip(labels, mean(hits, counts), counts, strict=True)
    return [{"bin": label, "accuracy": float(a), "count": int(n)} for label, a, n in lines]


def headline(report: dict[str, Any]) -> str:
    return (
        f"{report['task']} {report['split']} split at step {report['step']}: "
        f"{report['examples']:,} examples, {report['targets']:,} targets{changed(report)}"
    )


def tables(report: dict[str, Any]) -> list[Table]:
    """The numbers for the eye: one table of means, one for each attribute."""
    means = columns("metric", "value")
    for name, value in report["metrics"].items():
        means.add_row(name.replace("_", " "), show(value))
    for name, value in report["baselines"].items():
        means.add_row(f"baseline: {name}", show(value))
    out = [means]
    for name, lines in report["slices"].items():
        shown = [key for key in ("accuracy", "exact", "bits_per_byte") if key in lines[0]]
        table = columns(name, *(key.replace("_", " ") for key in shown), "count")
        for line in lines:
            table.add_row(line["bin"], *(show(line[key]) for key in shown), f"{line['count']:,}")
        out.append(table)
    return out


def show(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
