"""What the six tasks of MAD have in common (Poli et al., 2024, https://arxiv.org/abs/2403.17844).

Their training sets are fixed. Where rows are language to be modelled, training asks for every next token and the other
splits only for those that follow from the row: `weights` differ by split, as a task's may. MAD tests at the end of
training on one split; here a validation split chooses, and the test split is another of the same size.
"""

from dataclasses import dataclass

import numpy as np

from data.task import SPLITS, Task
from model.settings import Count


@dataclass(frozen=True)
class Mad(Task):
    """A task with a fixed training set, and fixed sets to validate and test on."""

    n_train: Count = 12_800  # examples
    n_test: Count = 1_280  # examples, and as many for validation

    def sizes(self) -> dict[str, int | None]:
        return dict(zip(SPLITS, (self.n_train, self.n_test, self.n_test), strict=True))


def shown_before(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of the keys `[B, P]` the place where its row first has it, and where it last had it; -1: nowhere."""
    order = np.argsort(keys, axis=1, kind="stable")  # equal keys side by side, each group in order of place
    grouped = np.take_along_axis(keys, order, axis=1)
    new = np.ones(keys.shape, bool)
    new[:, 1:] = grouped[:, 1:] != grouped[:, :-1]
    start = np.maximum.accumulate(np.where(new, np.arange(keys.shape[1]), 0), axis=1)
    first, last = np.empty_like(order), np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, start, axis=1), axis=1)
    np.put_along_axis(last, order, np.where(new, -1, np.roll(order, 1, axis=1)), axis=1)
    return first, last
