"""Associative recall of several lengths and numbers of pairs at once (Arora et al., 2024, "Based",
https://arxiv.org/abs/2402.18668)."""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from data import bins
from data.mqar import Mqar
from data.task import Example, Task
from model.errors import UserError
from model.settings import LONGEST, WIDEST, Count, Length, at_least, even, within

Size = Annotated[int, within(4, LONGEST), even]


@dataclass(frozen=True)
class MqarMix(Task):
    """Rows of `mqar` of several lengths and numbers of pairs, shorter ones padded: each key's value.

    `train` has the lengths, pairs and numbers of examples of which a fixed training set is made, `test` the lengths and
    pairs of the other splits, `n_test` examples of each. At another length a quarter of its tokens are pairs, the most
    there can be: that is how Based tests beyond its training lengths. (Zoology's batches are each of one length, and
    test what validates; here batches mix them.)
    """

    name: ClassVar[str] = "mqar_mix"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 32

    length: Size = 256  # tokens that rows are padded to
    vocab_size: Annotated[int, within(4, WIDEST)] = 8192
    train: tuple[tuple[Size, Length, Count], ...] = (
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    )
    test: tuple[tuple[Size, Length], ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64))
    n_test: Count = 1_000
    alpha: Annotated[float, at_least(1e-3)] = 0.01  # power law of the gaps; 1: uniform
    random_fillers: bool = True  # other slots hold random tokens, not 0

    def check(self) -> None:
        for field, rows in (("train", self.train), ("test", self.test)):
            if not rows:
                raise UserError(f"data.{self.name}.{field} is empty; allowed: at least one length with its pairs")
            longest = max(row[0] for row in rows)
            self.bound("length", longest, why=f"the longest of data.{self.name}.{field}")
        for length, pairs in self.settings:
            self.part(length, pairs)

    def resized(self, length: int) -> dict[str, Any]:
        test = ((length, max(length // 4, 1)),)
        return {"length": max(length, *(row[0] for row in self.train)), "test": test}

    @functools.cached_property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """Every length with its pairs, in the order in which they are told apart."""
        return tuple(sorted({row[:2] for row in self.train} | set(self.test)))

    def part(self, length: int, pairs: int) -> Mqar:
        """The task of one length and one number of pairs."""
        try:
            return Mqar(length, self.vocab_size, pairs, alpha=self.alpha, random_fillers=self.random_fillers)
        except UserError as error:
            raise UserError(f"data.{self.name} asks for {pairs} pairs in {length} tokens: {error}") from None

    def of_split(self, split: str) -> tuple[tuple[int, int, int], ...]:
        """Length, pairs and examples of each part of a split."""
        return self.train if split == "train" else tuple((*row, self.n_test) for row in self.test)

    def sizes(self) -> dict[str, int | None]:
        return {split: sum(n for *_, n in self.of_split(split)) for split in super().sizes()}

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, Q = self.block, max(pairs for _, pairs in self.settings)
        parts = self.of_split(split)
        ends = np.cumsum([n for *_, n in parts])
        which = np.minimum(np.searchsorted(ends, index + np.arange(B), side="right"), len(parts) - 1)
        out = {
            **{key: np.zeros((B, self.length), np.int32) for key in ("inputs", "segments")},
            **{key: np.zeros((B, Q), np.int32) for key in ("at", "targets", "attr_distance", "attr_setting")},
            "weights": np.zeros((B, Q), np.float32),
        }
        for part in np.unique(which):
            length, pairs, _ = parts[part]
            rows = np.flatnonzero(which == part)
            task = self.part(length, pairs)
            made = task.examples(split, index, rng)
            for key, array in made.items():
                out[key][rows, : array.shape[1]] = array[: len(rows)]
            out["segments"][rows, :length] = 1
            out["attr_setting"][rows] = self.settings.index((length, pairs))
        return out

    @property
    def tail(self) -> int:
        return self.length - 2 * min(pairs for _, pairs in self.settings)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """From a pair's key to its query; and tokens and pairs of the row."""
        settings = tuple(f"{length} tokens, {pairs} pairs" for length, pairs in self.settings)
        return {"distance": bins.labels(self.length - 1), "setting": settings}

    def baselines(self) -> dict[str, float]:
        shown = sum(pairs for _, pairs in self.test)
        return {"chance": 1 / (self.vocab_size - self.vocab_size // 2), "any value shown": len(self.test) / shown}
