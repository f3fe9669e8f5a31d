"""Strings of random symbols and a function of them: copied, reversed, sorted."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from data.source_target import FIRST, SourceTask, pairs
from data.task import Example
from model.settings import LONGEST, WIDEST, within


@dataclass(frozen=True)
class Strings(SourceTask):
    """A string of symbols, uniform in 3..V-1, its length with its end uniform too; the answer is as long."""

    length: Annotated[int, within(2, LONGEST)] = 16  # tokens of the longest source, its end included
    min_length: Annotated[int, within(2, LONGEST)] = 2  # of the shortest
    vocab_size: Annotated[int, within(FIRST + 2, WIDEST)] = 32  # padding, start and end included

    def check(self) -> None:
        self.bound("min_length", 2, self.length, "length")

    def resized(self, length: int) -> dict[str, Any]:
        return {"length": length, "min_length": length}

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L = self.block, self.length
        n = rng.integers(self.min_length - 1, L, B)
        symbols = rng.integers(FIRST, self.vocab_size, (B, L), dtype=np.int32)
        return pairs(symbols, n, self.answer(symbols, n[:, None]), n)

    def answer(self, symbols: np.ndarray, n: np.ndarray) -> np.ndarray:
        """`[B, L]`, of which the first n [B, 1] count, as of the symbols."""
        raise NotImplementedError

    def baselines(self) -> dict[str, float]:
        mean = (self.min_length + self.length) / 2  # tokens of an answer, its end included
        return {"chance": 1 / (self.vocab_size - FIRST + 1), "always the end": 1 / mean}


class Copy(Strings):
    """A string of symbols: write it again."""

    name: ClassVar[str] = "copy"

    def answer(self, symbols: np.ndarray, n: np.ndarray) -> np.ndarray:
        return symbols


class Reverse(Strings):
    """A string of symbols: write it backwards."""

    name: ClassVar[str] = "reverse"

    def answer(self, symbols: np.ndarray, n: np.ndarray) -> np.ndarray:
        return np.take_along_axis(symbols, (n - 1 - np.arange(self.length)) % self.length, axis=1)


class Sort(Strings):
    """A string of symbols: write them in order, equal ones as often as they stand there."""

    name: ClassVar[str] = "sort"

    def answer(self, symbols: np.ndarray, n: np.ndarray) -> np.ndarray:
        return np.sort(np.where(np.arange(self.length) < n, symbols, self.vocab_size), axis=1)
