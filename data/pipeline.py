"""Batches as a pure function of (task, seed, split, size, step) and row numbers: nothing to store or restore.

Whoever holds some rows of a global batch makes those rows, so batches are the same for any number of hosts, on any
mesh, and after any restart.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from data.kept import Blocks, FixedSets
from data.rng import Stream
from data.shelf import shelved
from data.stored import Stored
from data.task import Example, Task
from data.workers import Block, Workers
from model.errors import UserError

MiB = 1 << 20
FIXED = FixedSets(512 * MiB)  # finite splits; the training set of Long Range Arena's ListOps takes 370
ASKED = Blocks(128 * MiB)  # what each evaluation asks again of an endless split
PASSING = Blocks(32 * MiB)  # of what is not seen again, the last blocks: neighbours come from one
WORKERS = Workers()


@dataclass(frozen=True)
class Batch:
    """The global batch of a step, of which any rows can be made without the others."""

    task: Task
    seed: int
    split: str
    size: int  # rows
    step: int
    order: int | None = 0

    def rows(self, numbers: np.ndarray) -> Example:
        return batch_at(self.task, self.seed, self.split, self.size, self.step, numbers, self.order)


def batch_at(
    task: Task,
    seed: int,
    split: str,
    batch_size: int,
    step: int,
    rows: np.ndarray | None = None,
    order: int | None = 0,
) -> Example:
    """The rows with these numbers, in their order, of the global batch of a step; None: all of them.

    `seed` makes the examples. `order` concerns the train split alone: another one shuffles a finite set
    differently, or draws different examples of an endless stream. With None, and in the other splits, rows
    come in order, and those past the end have weight 0.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; allowed: at least 1; closest: 1")
    n = task.size(split)
    training = split == "train" and order is not None
    index = step * batch_size + (np.arange(batch_size) if rows is None else rows)
    if n is None:
        return gather(task, seed, split, order if training else 0, index, index)
    if training:
        epoch, place = passed(seed, order, n, index)
        return (
            gather(task, seed, split, 0, epoch * n + place, place) if task.by_epoch else fixed(task, seed, split, place)
        )
    batch = fixed(task, seed, split, np.minimum(index, n - 1))
    batch["weights"][index >= n] = 0
    return batch


def passed(seed: int, order: int, n: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The epoch [B] and the place [B] in a training set of n where the shuffled passes through it have come."""
    epoch, turn = np.divmod(index, n)
    place = np.empty_like(turn)
    for e in np.unique(epoch):
        place[epoch == e] = shuffled(seed, order, n, int(e))[turn[epoch == e]]
    return epoch, place


@functools.lru_cache(maxsize=2)  # a batch may lie across the end of an epoch
def shuffled(seed: int, order: int, n: int, epoch: int) -> np.ndarray:
    """The order [n] in which one epoch goes through a training set of n examples."""
    return Stream(seed, "epochs", order).at(epoch).permutation(n)


def fixed(task: Task, seed: int, split: str, place: np.ndarray) -> Example:
    """Examples `place` [B] of a finite split."""
    if isinstance(task, Stored) and task.on_disk:
        return task.rows(split, place)

    def make(firsts: Sequence[int]) -> Iterator[tuple[int, Example]]:
        blocks = [Block(task, seed, split, 0, first, first) for first in firsts]
        for block, packed in shelved(blocks, make_blocks):
            yield block.place, packed

    hands = WORKERS.hands if task.costly else 1
    found = FIXED.rows((task, seed, split), task.size(split), task.block, make, place, hands)
    return gather(task, seed, split, 0, place, place) if found is None else task.unpacked(found)


def gather(task: Task, seed: int, split: str, order: int, index: np.ndarray, place: np.ndarray) -> Example:
    """Examples `index` [B], with the random numbers of `place` [B], sliced out of the blocks they are made in."""
    row = place % task.block
    cuts = np.flatnonzero((np.diff(place) != 1) | (np.diff(index) != 1) | (row[1:] == 0)) + 1
    slices = list(zip([0, *cuts], [*cuts, len(place)], strict=True))
    blocks = [Block(task, seed, split, order, int(index[i] - row[i]), int(place[i] - row[i])) for i, _ in slices]
    made = (PASSING if split == "train" else ASKED).get(blocks, make_blocks)
    return {
        key: np.concatenate(
            [made[block][key][row[i] : row[i] + j - i] for block, (i, j) in zip(blocks, slices, strict=True)]
        )
        for key in made[blocks[0]]
    }


def make_blocks(blocks: Sequence[Block]) -> Iterator[tuple[Block, Example]]:
    """Each of these blocks, all of one task."""
    if blocks and blocks[0].task.costly:
        return WORKERS.make(blocks)
    return ((block, block.make()) for block in blocks)


def eval_batches(task: Task, seed: int, split: str, batch_size: int, n_batches: int = 0) -> Iterator[Batch]:
    """The first n_batches of a split; 0: all of a finite one, its last batch filled up with weight 0."""
    check_countable(task, split, n_batches)
    n = task.size(split)
    whole = -(-n // batch_size) if n is not None else n_batches
    for step in range(min(n_batches or whole, whole)):
        yield Batch(task, seed, split, batch_size, step, order=None)


def check_countable(task: Task, split: str, n_batches: int) -> None:
    """Refuses to evaluate all of a split that has no end."""
    if n_batches == 0 and task.size(split) is None:
        raise UserError(f"eval_batches is 0, but {task.name} has an endless {split} split; allowed: at least 1")


def stream(
    task: Task, seed: int, batch_size: int, start: int = 0, stop: int | None = None, offset: int = 0, order: int = 0
) -> Iterator[Batch]:
    """Training batches of the global steps from `start` to before `stop`; None: for ever.

    The batch of step s is that of data step s + offset: after a roll-back, another offset brings new data.
    """
    for step in count(start) if stop is None else range(start, stop):
        yield Batch(task, seed, "train", batch_size, step + offset, order)
