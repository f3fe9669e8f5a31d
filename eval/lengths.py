"""Accuracy of a checkpoint at every length of `test_lengths`; over length and the bins of an attribute, a picture."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.accuracy import measure, show
from eval.pictures import draw_grid
from eval.report import columns, provenance, write
from eval.restore import Restored
from model.errors import UserError
from train.run import at_length

Measured = Mapping[int, dict[str, Any]]  # length -> what `measure` finds there


def lengths(restored: Restored, *, split: str) -> None:
    """The suite: measures, writes the numbers and the pictures into the run's folder, prints the numbers."""
    asked = restored.run.config.test_lengths
    if not asked:
        raise UserError("test_lengths is (); give those to ask at, such as --config.test_lengths=128,256,512")
    others = {length: dataclasses.replace(restored, run=at_length(restored.run, length)) for length in asked}
    found = dict(measured(others, split))
    if not found:
        raise UserError(f"this model goes to none of test_lengths {asked}; closest: {restored.run.task.length}")
    report = provenance(restored, split) | {"lengths": {str(length): one for length, one in found.items()}}
    path = write(restored, "lengths", split, report)
    console, metric, reached = Console(highlight=False), headline(found), tuple(found)
    for name in next(iter(found.values()))["slices"]:
        labels, values = grid(found, name, metric)
        console.print(table(name, labels, found, values))
        picture = path.with_name(f"{path.stem}-{name}.png")
        draw_grid(picture, f"{restored.run.task.name}: {metric} by length and {name}", (name, labels), reached, values)
        print(picture)
    console.print(table(metric, ("all",), found, np.array([[one["metrics"][metric] for one in found.values()]])))
    print(path)


def measured(others: Mapping[int, Restored], split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """At each length; where the model cannot go that is said, as a run does."""
    for length, other in others.items():
        try:
            yield length, measure(other, split)
        except UserError as error:
            print(f"not measured at length {length}: {error}")


def headline(found: Measured) -> str:
    """Whole answers, where they count."""
    return "exact" if all("exact" in one["metrics"] for one in found.values()) else "accuracy"


def grid(found: Measured, name: str, metric: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The bins of an attribute at any of the lengths, and a score for each bin and length; NaN where there is none."""
    columns = [{line["bin"]: line[metric] for line in one["slices"][name]} for one in found.values()]
    labels = tuple(dict.fromkeys(label for column in columns for label in column))
    return labels, np.array([[column.get(label, np.nan) for column in columns] for label in labels])


def table(name: str, labels: tuple[str, ...], found: Measured, values: np.ndarray) -> Table:
    shown = columns(name, *(f"length {length}" for length in found))
    for label, line in zip(labels, values, strict=True):
        shown.add_row(label, *map(show, line.tolist()))
    return shown
