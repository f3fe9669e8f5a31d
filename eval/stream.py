"""Bits per byte along a document far longer than a row, its state carried on from chunk to chunk."""

import time
from typing import Any

import numpy as np
from rich.console import Console

from eval.accuracy import show
from eval.report import columns, provenance, write
from eval.restore import Restored
from train import streaming
from train.evaluate import bits_per_byte


def stream(restored: Restored, *, split: str) -> None:
    """The suite: reads the document, printing as it goes, and writes the numbers into the run's folder.

    `--config.stream` says how: so many bytes (0: the whole split), or each byte from a row that is read anew. A cache
    of the last bytes, with or without the first, is `--config.model.attention.window` and `.sink_tokens`.
    """
    c = restored.run.config.stream
    streaming.check(restored.run, split, c.length, c.recompute)
    report = provenance(restored, split) | measure(restored, split)
    path = write(restored, "stream", split, report)
    table = columns("bytes read", "bits per byte", "targets", texts=0)
    for line in report["stream"]:
        table.add_row(f"{line['bytes']:,}", show(line["bits_per_byte"]), f"{line['targets']:,}")
    table.add_row("all", show(report["metrics"]["bits_per_byte"]), f"{report['bytes']:,}")
    Console(highlight=False).print(table)
    print(f"{report['bytes_per_s']:.0f} bytes/s, {report['state_bytes']:,} bytes of state")
    print(path)


def measure(restored: Restored, split: str) -> dict[str, Any]:
    """Bits per byte of the whole document, and of each stretch of it: a row's length, then every doubling."""
    run = restored.run
    c = run.config.stream
    tokens = streaming.document(run, split, c.length)
    begun, found, due = time.monotonic(), [], run.task.length
    for piece in streaming.losses(run, restored.params, tokens, c.chunk, c.recompute):
        found.append(piece)
        done = sum(map(len, found))
        if done >= due:
            so_far = bits_per_byte(run.objective, float(np.mean(np.concatenate(found), dtype=np.float64)))
            print(f"{done:,} of {len(tokens) - 1:,} bytes: {so_far['bits_per_byte']:.4f} bits per byte", flush=True)
            due = 2 * done
    nats = np.concatenate(found)
    lines = streaming.along(nats, run.task.length)
    mean = float(np.mean(nats, dtype=np.float64))
    return {
        "bytes": len(nats),
        "metrics": {"loss": mean, **bits_per_byte(run.objective, mean)},
        "stream": [line | bits_per_byte(run.objective, line["loss"]) for line in lines],
        "bytes_per_s": len(nats) / (time.monotonic() - begun),
        "state_bytes": 0 if c.recompute else run.model.state_bytes(len(nats)),
    }
