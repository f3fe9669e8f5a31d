"""Batches as a pure function of (task, seed, split, batch_size, step): nothing to store, nothing to restore.

The same for any number of hosts, each of which makes only its own rows, and after any restart.
"""

import functools
from collections.abc import Iterator
from itertools import count

import numpy as np

from data.rng import Stream
from data.task import Example, Task
from model.errors import UserError


@functools.lru_cache(maxsize=8)
def shuffled(seed: int, order: int, n: int, epoch: int) -> np.ndarray:
    """The order [n] in which one epoch goes through a training set of n examples."""
    return Stream(seed, "epochs", order).at(epoch).permutation(n)


def batch_at(
    task: Task,
    seed: int,
    split: str,
    batch_size: int,
    step: int,
    host: int = 0,
    hosts: int = 1,
    order: int | None = 0,
) -> Example:
    """One host's rows, a contiguous part, of the global batch of a step.

    `seed` makes the examples. `order` concerns the train split alone: another one shuffles a finite set
    differently, or draws different examples of an endless stream. With None, and in the other splits, rows
    come in order, and those past the end have weight 0.
    """
    if batch_size < 1 or batch_size % hosts:
        near = max(round(batch_size / hosts), 1) * hosts
        raise UserError(f"batch_size is {batch_size}; allowed: multiples of {hosts} hosts; closest: {near}")
    n = task.size(split)
    rows = batch_size // hosts
    start = step * batch_size + host * rows
    training = split == "train" and order is not None
    index = place = np.arange(start, start + rows)
    if n is not None and training:
        epoch, turn = np.divmod(index, n)
        place = np.array([shuffled(seed, order, n, e)[t] for e, t in zip(epoch, turn, strict=True)])
        index = epoch * n + place
    elif n is not None:
        index = place = np.minimum(index, n - 1)
    batch = gather(task, seed, split, order if training and n is None else 0, index, place)
    if n is not None and not training:
        batch["weights"][np.arange(start, start + rows) >= n] = 0
    return batch


def gather(task: Task, seed: int, split: str, order: int, index: np.ndarray, place: np.ndarray) -> Example:
    """Examples `index` [B], with the random numbers of `place` [B], sliced out of the blocks they are made in."""
    row = place % task.block
    cuts = np.flatnonzero((np.diff(place) != 1) | (np.diff(index) != 1) | (row[1:] == 0)) + 1
    parts = []
    for i, j in zip([0, *cuts], [*cuts, len(place)], strict=True):
        made = block_at(task, seed, split, order, int(index[i] - row[i]), int(place[i] - row[i]))
        parts.append({key: array[row[i] : row[i] + j - i] for key, array in made.items()})
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


# Neighbours come from one block, and a fixed training set of blocks is made once.
@functools.lru_cache(maxsize=4096)
def block_at(task: Task, seed: int, split: str, order: int, index: int, place: int) -> Example:
    return task.examples(split, index, Stream(seed, split, order).at(place))


def eval_batches(
    task: Task, seed: int, split: str, batch_size: int, n_batches: int = 0, host: int = 0, hosts: int = 1
) -> Iterator[Example]:
    """The first n_batches of a split; 0: all of a finite one, its last batch filled up with weight 0."""
    n = task.size(split)
    if n_batches == 0 and n is None:
        raise UserError(f"eval_batches is 0, but {task.name} has an endless {split} split; allowed: at least 1")
    whole = -(-n // batch_size) if n is not None else n_batches
    for step in range(min(n_batches or whole, whole)):
        yield batch_at(task, seed, split, batch_size, step, host, hosts, order=None)


def stream(
    task: Task,
    seed: int,
    batch_size: int,
    start: int = 0,
    host: int = 0,
    hosts: int = 1,
    offset: int = 0,
    order: int = 0,
) -> Iterator[Example]:
    """Training batches from a global step on, each made when it is asked for.

    The batch of step s is that of data step s + offset: after a roll-back, another offset brings new data.
    """
    for step in count(start + offset):
        yield batch_at(task, seed, "train", batch_size, step, host, hosts, order)
