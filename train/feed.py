"""A run's training batches, on the devices by the time that they are asked for."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jax
import numpy as np

from data import pipeline
from data.ahead import Ahead
from data.pipeline import Batch
from train.dispatch import ROOM, steps_from
from train.run import Run
from train.sharding import held_rows, put_batch, put_batches
from train.step import RunState

DEPTH = 8  # batches made ahead, and on the devices, as far as a host's share of them fits into ROOM


class Feed:
    """Iterates over the training batches from a state's step to the run's last; `seek` goes to those of another state.

    Where the loop takes several steps at once, it gets the batches of these stacked, as `train.run.Run.train_steps`
    reads them.

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
    if run.most == 1:
        return (put_batch(batch, run.batch_sharding) for batch in found)
    return (put_batches(group, run.most, run.batch_sharding) for group in groups(run, step, found))


def groups(run: Run, step: int, found: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Batches, the first of them a step's, divided as the loop takes them."""
    while step < run.config.steps:
        n = steps_from(step, run.config, run.most)
        yield list(islice(found, n))
        step += n


def depth(run: Run) -> int:
    """How many batches, or stacks of them, may be made ahead: all are of one size."""
    c = run.config
    row = pipeline.batch_at(run.task, c.data.seed, "train", 1, 0)
    held = held_rows(run.batch_sharding, c.batch_size).size * sum(array.nbytes for array in row.values())
    return int(np.clip(ROOM // (run.most * held), 1, max(DEPTH // run.most, 1)))
