"""Batches as a pure function of (task, seed, split, batch_size, step): nothing to store, nothing to restore.

The same for any number of hosts, each of which makes only its own rows, and after any restart.
"""

import functools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    random = Stream(seed, split, order if training and n is None else 0)
    examples = []
    for at in range(start, start + rows):
        if n is None:
            example = task.example(split, at, random.at(at))
        elif training:
            epoch, place = divmod(at, n)
            index = int(shuffled(seed, order, n, epoch)[place])
            example = task.example(split, epoch * n + index, random.at(index))
        else:
            index = min(at, n - 1)
            example = task.example(split, index, random.at(index))
            if at >= n:
                example["weights"] = np.zeros_like(example["weights"])
        examples.append(example)
    return {key: np.stack([example[key] for example in examples]) for key in examples[0]}


def eval_batches(
    task: Task, seed: int, split: str, batch_size: int, n_batches: int = 0, host: int = 0, hosts: int = 1
) -> Iterator[Example]:
    """The first n_batches of a split; 0: all of a finite one, its last batch filled up with weight 0."""
    n = task.size(split)
    if n_batches == 0 and n is None:
        raise UserError(
            f"eval_batches is 0, but {task.name} has an endless {split} split; allowed: at least 1"
        )
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
    prefetch: int = 4,
) -> Iterator[Example]:
    """Training batches from a global step on, made ahead in a thread that ends with the iterator.

    The batch of step s is that of data step s + offset: after a roll-back, another offset brings new data.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"data-{task.name}")
    ahead = deque()
    try:
        for step in count(start + offset):
            ahead.append(pool.submit(batch_at, task, seed, "train", batch_size, step, host, hosts, order))
            if len(ahead) > prefetch:
                yield ahead.popleft().result()  # an error made in the thread is raised here
    finally:
        pool.shutdown(cancel_futures=True)
