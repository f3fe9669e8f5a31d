"""Words to be counted (RULER's common words extraction, https://arxiv.org/abs/2404.06654)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.haystack import ASK, FIRST, Haystack, Words, different
from data.task import Example
from model.settings import LONGEST, within

Few = Annotated[int, within(1, 1024)]


@dataclass(frozen=True)
class CommonWords(Haystack):
    """A list in which a few words come up ten times as often as the others: which are they?

    The list is all of the haystack, in any order: longer ones have more words, each as often as in shorter ones, the
    last of them only as often as there is room. The question is `ASK`, the answer the common words in the order of the
    vocabulary, as RULER takes them in any. Words are names; there are no values and no fillers.
    """

    name: ClassVar[str] = "common_words"

    length: Annotated[int, within(4, LONGEST)] = 1024
    names: Words = 1024
    n_common: Few = 10  # words to be found
    common_times: Annotated[int, within(2, LONGEST)] = 30  # that each of these comes up
    other_times: Annotated[int, within(1, LONGEST)] = 3  # and each of the others

    @property
    def n_words(self) -> int:
        """Different words in a list."""
        room = self.haystack - self.n_common * self.common_times
        return self.n_common + -(-room // self.other_times)

    def check(self) -> None:
        self.bound("other_times", 1, self.common_times - 1, "less than common_times")
        least = self.n_common * (self.common_times + 1)
        self.bound("length", least + 1, why="common words, another one and the answer")
        self.bound("names", self.n_words, why=f"different words in {self.haystack} tokens")

    @property
    def asked_places(self) -> np.ndarray:
        return np.arange(1 + self.n_common) >= 1

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, n = self.block, self.n_common
        words = FIRST + different(rng, B, self.names, self.n_words)
        times = np.where(np.arange(self.n_words) < n, self.common_times, self.other_times)
        places = np.repeat(np.arange(self.n_words), times)[: self.haystack]
        rows = rng.permuted(words[:, places], axis=1)
        ending = np.concatenate([np.full((B, 1), ASK), np.sort(words[:, :n], axis=1)], axis=1)
        return self.asked_of(rows, ending)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {}  # a word that is common is so all along

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.names, "any word shown": 1 / self.n_words}
