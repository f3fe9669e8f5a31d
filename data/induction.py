"""Induction heads (Gu and Dao, "Mamba", 2023, section 4.1.2, https://arxiv.org/abs/2312.00752)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.settings import LONGEST, WIDEST, within


@dataclass(frozen=True)
class Induction(Task):
    """Random tokens with one trigger token inside and again at the end: name the token that followed it.

    Tokens are uniform in 0..V-2; the trigger is V-1, its first place uniform in 0..L-3, its second the last.
    """

    name: ClassVar[str] = "induction"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64

    length: Annotated[int, within(3, LONGEST)] = 256  # tokens
    vocab_size: Annotated[int, within(3, WIDEST)] = 16  # trigger included, and at least two others

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V = self.block, self.length, self.vocab_size
        inputs = rng.integers(V - 1, size=(B, L), dtype=np.int32)
        trigger = rng.integers(L - 2, size=(B, 1))
        np.put_along_axis(inputs, trigger, V - 1, axis=1)
        inputs[:, -1] = V - 1
        return {
            "inputs": inputs,
            "at": np.full((B, 1), L - 1, np.int32),
            "targets": np.take_along_axis(inputs, trigger + 1, axis=1),
            "weights": np.ones((B, 1), np.float32),
            "attr_distance": bins.number(L - 1 - trigger).astype(np.int32),
        }

    @property
    def tail(self) -> int:
        return 1

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"distance": bins.labels(self.length - 1)}  # between the two triggers

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - 1)}
