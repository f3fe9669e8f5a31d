"""Lookup by position: what was the 4,000th word?"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.settings import LONGEST, WIDEST, Dim, within


@dataclass(frozen=True)
class Lookup(Task):
    """Random words, then questions that name a place by its decimal digits: the word that stands there.

    Words are uniform in 0..V-12. A question is the mark V-1 and the place, counted from 1 and uniform, in `digits`
    digits, of which d is V-11+d; its answer is asked for at the last digit. Questions stand at the end of a row.
    """

    name: ClassVar[str] = "lookup"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64

    length: Annotated[int, within(3, LONGEST)] = 256  # tokens: words and questions
    vocab_size: Annotated[int, within(13, WIDEST)] = 64  # ten digits and the mark included
    n_questions: Dim = 8
    digits: Annotated[int, within(1, 8)] = 4  # of a place

    def check(self) -> None:
        asked = self.n_questions * (self.digits + 1)
        self.bound("length", asked + 1, why=f"{asked} tokens of questions, and a word")
        longest = asked + 10**self.digits - 1
        self.bound("length", 3, longest, f"words that {self.digits} digits can count, and the questions")

    @property
    def n_words(self) -> int:
        return self.length - self.tail

    @property
    def tail(self) -> int:
        return self.n_questions * (self.digits + 1)

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, V, Q, N, D = self.block, self.vocab_size, self.n_questions, self.n_words, self.digits
        words = rng.integers(V - 11, size=(B, N))
        places = rng.integers(1, N + 1, (B, Q))
        written = V - 11 + places[..., None] // 10 ** np.arange(D - 1, -1, -1) % 10
        questions = np.concatenate([np.full((B, Q, 1), V - 1), written], axis=2).reshape(B, -1)
        at = np.tile(N - 1 + (D + 1) * np.arange(1, Q + 1, dtype=np.int32), (B, 1))
        return {
            "inputs": np.concatenate([words, questions], axis=1).astype(np.int32),
            "at": at,
            "targets": np.take_along_axis(words, places - 1, axis=1).astype(np.int32),
            "weights": np.ones((B, Q), np.float32),
            "attr_position": bins.number(places).astype(np.int32),
            "attr_distance": bins.number(at - (places - 1)).astype(np.int32),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """The place asked for, and how far it lies before the end of its question."""
        return {"position": bins.labels(self.n_words), "distance": bins.labels(self.length - 1)}

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - 11)}
