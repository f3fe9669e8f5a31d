"""What more context is worth: the same bytes, predicted from the last 64, 128, 256, ... bytes before them."""

from typing import Any

import numpy as np
from rich.console import Console

from eval.accuracy import show
from eval.report import columns, provenance, write
from eval.restore import Restored
from train import streaming
from train.evaluate import bits_per_byte

SHORTEST = 64


def context(restored: Restored, *, split: str, targets: int) -> None:
    """The suite: contexts double up to the longest of the row's length and `test_lengths`."""
    report = provenance(restored, split) | measure(restored, split, targets)
    path = write(restored, f"context-{report['targets']}", split, report)
    table = columns("context", "bits per byte", texts=0)
    for line in report["context"]:
        table.add_row(f"{line['context']:,}", show(line["bits_per_byte"]))
    console = Console(highlight=False)
    console.print(f"{report['task']} {split} split at step {restored.step}: the same {report['targets']:,} bytes")
    console.print(table)
    print(path)


def measure(restored: Restored, split: str, targets: int) -> dict[str, Any]:
    """Bits per byte by context, of `targets` bytes spread evenly over a split, or of all where there are fewer."""
    run = restored.run
    found = contexts(run.task.length, run.config.test_lengths)
    streaming.check(run, split, found[-1], found[-1], key="the longest context")
    tokens = streaming.document(run, split, 0)
    asked = np.unique(np.linspace(found[-1], len(tokens) - 1, targets).astype(np.int64))
    lines = []
    for n in found:
        nats = np.concatenate(list(streaming.from_context(run, restored.params, tokens, asked, n)))
        mean = float(np.mean(nats, dtype=np.float64))
        lines.append({"context": n, "loss": mean, **bits_per_byte(run.objective, mean)})
    return {"targets": len(asked), "context": lines}


def contexts(length: int, others: tuple[int, ...]) -> list[int]:
    """Powers of two from 64, or from the row's length if that is less, and the longest."""
    longest, n = max(length, *others, 0), min(SHORTEST, length)
    found = []
    while n < longest:
        found.append(n)
        n *= 2
    return [*found, longest]
