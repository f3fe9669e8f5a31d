"""Compression: a row in one vector (Poli et al., 2024, "MAD", https://arxiv.org/abs/2403.17844)."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.mad import Mad
from data.task import Example
from model.asked import Asked
from model.settings import LONGEST, WIDEST, within


@dataclass(frozen=True)
class MadCompression(Mad):
    """Random tokens and a mark: every token again, from the vector at the mark alone.

    Tokens are uniform in 0..V-2, and the mark is V-1. Training asks for the mark as well, as in MAD, whose accuracy
    counts it too; here the other splits do not.
    """

    name: ClassVar[str] = "mad_compression"
    kind: ClassVar[str] = "label"
    block: ClassVar[int] = 64

    length: Annotated[int, within(2, LONGEST)] = 32  # tokens, with the mark
    vocab_size: Annotated[int, within(3, WIDEST)] = 16

    @property
    def n_classes(self) -> int:
        return self.vocab_size

    @property
    def asked(self) -> Asked:
        return dataclasses.replace(super().asked, from_last=True)

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        shape = self.block, self.length
        inputs = rng.integers(self.vocab_size - 1, size=shape, dtype=np.int32)
        inputs[:, -1] = self.vocab_size - 1
        weights = np.ones(shape, np.float32)
        if split != "train":
            weights[:, -1] = 0
        from_end = np.arange(self.length, 0, -1)
        return {
            "inputs": inputs,
            "targets": inputs,
            "weights": weights,
            "attr_distance": np.broadcast_to(bins.number(np.maximum(from_end - 1, 1)), shape),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"distance": bins.labels(max(self.length - 1, 1))}  # from a token to the mark

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - 1)}
