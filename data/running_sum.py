"""The word problem of a cyclic group (Merrill et al., 2024, "The Illusion of State", https://arxiv.org/abs/2404.08819)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.settings import WIDEST, Length, within


@dataclass(frozen=True)
class RunningSum(Task):
    """A label for each token: the sum of all so far, modulo m; 2 makes it parity.

    Tokens are uniform in 0..m-1, so every label is equally likely at every token, whatever came before it.
    """

    name: ClassVar[str] = "running_sum"
    kind: ClassVar[str] = "label"
    block: ClassVar[int] = 64

    length: Length = 64  # tokens
    modulus: Annotated[int, within(2, WIDEST)] = 2

    @property
    def vocab_size(self) -> int:
        return self.modulus

    @property
    def n_classes(self) -> int:
        return self.modulus

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        shape = self.block, self.length
        inputs = rng.integers(self.modulus, size=shape)
        return {
            "inputs": inputs.astype(np.int32),
            "targets": (inputs.cumsum(axis=1) % self.modulus).astype(np.int32),
            "weights": np.ones(shape, np.float32),
            "attr_position": np.broadcast_to(bins.number(np.arange(1, self.length + 1)), shape),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"position": bins.labels(self.length)}  # tokens summed

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.modulus}
