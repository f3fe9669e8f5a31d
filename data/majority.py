"""The majority language, over more symbols than two (on attention and it: Hahn 2020, https://arxiv.org/abs/1906.06755)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.task import Example, Task
from model.settings import LONGEST, WIDEST, even, within


@dataclass(frozen=True)
class Majority(Task):
    """Random tokens, all of the row: are more of them from the upper half of the vocabulary than from the lower?

    Tokens are uniform; where the halves are even, the last token alone decides.
    """

    name: ClassVar[str] = "majority"
    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = 2
    block: ClassVar[int] = 64

    length: Annotated[int, within(1, LONGEST)] = 1024  # tokens
    vocab_size: Annotated[int, within(2, WIDEST), even] = 256

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        inputs = rng.integers(self.vocab_size, size=(self.block, self.length), dtype=np.int32)
        upper = inputs >= self.vocab_size // 2
        twice = 2 * upper.sum(axis=1)
        return {
            "inputs": inputs,
            "targets": np.where(twice == self.length, upper[:, -1], twice > self.length).astype(np.int32),
            "weights": np.ones(self.block, np.float32),
        }

    def baselines(self) -> dict[str, float]:
        return {"chance": 0.5}
