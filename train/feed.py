"""A run's training batches, on the devices by the time that they are asked for."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from data import pipeline
from data.ahead import Ahead
from train.run import Run
from train.sharding import held_rows, put_batch
from train.step import RunState

DEPTH = 8  # batches made ahead, and on the devices,
ROOM = 128 << 20  # as far as a host's share of them fits into so many bytes


class Feed:
    """Iterates over the training batches from a state's step to the run's last; `seek` goes to those of another state.

    A thread makes them and sends them to the devices, ahead of the loop.
    """

    def __init__(self, run: Run, state: RunState):
        self._run, self._depth = run, depth(run)
        self._batches = Ahead(batches(run, state), self._depth)

    def seek(self, state: RunState) -> None:
        self.close()
        self._batches = Ahead(batches(self._run, state), self._depth)

    def __next__(self) -> Mapping[str, jax.Array]:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def batches(run: Run, state: RunState) -> Iterator[dict[str, jax.Array]]:
    c, step, offset = run.config, int(state.step), int(state.data_offset)
    found = pipeline.stream(run.task, c.data.seed, c.batch_size, step, c.steps, offset=offset, order=c.seed)
    return (put_batch(batch, run.batch_sharding) for batch in found)


def depth(run: Run) -> int:
    """How many batches may be made ahead: all are of one size."""
    c = run.config
    row = pipeline.batch_at(run.task, c.data.seed, "train", 1, 0)
    held = held_rows(run.batch_sharding, c.batch_size).size * sum(array.nbytes for array in row.values())
    return int(np.clip(ROOM // held, 1, DEPTH))
