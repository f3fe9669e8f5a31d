"""Word problems of groups (Merrill et al., 2024, "The Illusion of State", https://arxiv.org/abs/2404.08819)."""

import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from data import bins
from data.task import Example, Task
from model.settings import Length


@functools.lru_cache(maxsize=8)
def elements(group: str) -> np.ndarray:
    """`[G, n]`: the permutations of n points in the symmetric (S) or alternating (A) group, in lexical order."""
    n = int(group[1:])
    found = np.array(list(itertools.permutations(range(n))))
    if group[0] == "A":
        first, second = np.triu_indices(n, 1)
        turned = (found[:, first] > found[:, second]).sum(axis=1)  # pairs out of order
        found = found[turned % 2 == 0]
    return found


@functools.lru_cache(maxsize=8)
def products(group: str) -> np.ndarray:
    """`[G, G]`: the number of the permutation that is first b, then a."""
    found = elements(group)
    weights = found.shape[1] ** np.arange(found.shape[1])
    both = found[:, found]  # [a, b, point]
    number = np.argsort(found @ weights)
    return number[np.searchsorted((found @ weights)[number], both @ weights)].astype(np.int32)


@dataclass(frozen=True)
class Permutations(Task):
    """A label for each token: the product of all permutations so far, each done after those before it.

    Tokens are uniform over all elements of the group, so every label is equally likely at every token. S5 and A5 are
    not solvable: their products take a depth that grows with the length, unless the state decides what comes of it.
    S3, A4 and S4 are solvable, and so are sums: `running_sum` with modulus 60 is as large as A5, and with 2 parity.
    """

    name: ClassVar[str] = "permutations"
    kind: ClassVar[str] = "label"
    block: ClassVar[int] = 64

    length: Length = 64  # tokens
    group: Literal["S3", "A4", "S4", "A5", "S5"] = "S5"

    @property
    def vocab_size(self) -> int:
        return len(elements(self.group))

    @property
    def n_classes(self) -> int:
        return len(elements(self.group))

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        shape = self.block, self.length
        inputs = rng.integers(self.n_classes, size=shape, dtype=np.int32)
        table, targets = products(self.group), inputs.copy()
        for t in range(1, self.length):
            targets[:, t] = table[inputs[:, t], targets[:, t - 1]]
        return {
            "inputs": inputs,
            "targets": targets,
            "weights": np.ones(shape, np.float32),
            "attr_position": np.broadcast_to(bins.number(np.arange(1, self.length + 1)), shape),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"position": bins.labels(self.length)}  # permutations done

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.n_classes}
