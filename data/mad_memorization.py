"""Memorization: facts that are in no row (Poli et al., 2024, "MAD", https://arxiv.org/abs/2403.17844)."""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.mad import Mad
from data.rng import Stream
from data.task import Example
from model.settings import LONGEST, WIDEST, Count, Seed, even, within


@functools.lru_cache(maxsize=16)
def facts(seed: int, n_keys: int, n_values: int) -> np.ndarray:
    """A value `[n_keys]` below n_values for each key, all different."""
    return Stream(seed, "facts").at(0).permutation(n_values)[:n_keys]


@dataclass(frozen=True)
class MadMemorization(Mad):
    """Keys, each with a mark behind it where its value is asked for: the same in all rows, and in none of them.

    Of the ids below the mark, V-1, the first half are keys, uniform in a row, and the others values.
    """

    name: ClassVar[str] = "mad_memorization"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64

    n_train: Count = 256  # examples
    length: Annotated[int, within(2, LONGEST), even] = 32  # tokens
    vocab_size: Annotated[int, within(3, WIDEST)] = 256  # mark included
    facts: Seed = 0  # seed of the values

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V = self.block, self.length, self.vocab_size
        n_keys = (V - 1) // 2
        keys = rng.integers(n_keys, size=(B, L // 2))
        inputs = np.full((B, L), V - 1, np.int32)
        inputs[:, ::2] = keys
        places = np.tile(np.arange(L // 2, dtype=np.int32), (B, 1))
        return {
            "inputs": inputs,
            "at": 2 * places + 1,
            "targets": (n_keys + facts(self.facts, n_keys, V - 1 - n_keys)[keys]).astype(np.int32),
            "weights": np.ones((B, L // 2), np.float32),
        }

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)}
