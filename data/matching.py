"""Pairs of noisy documents: whether both are about the same."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.rng import distinct
from data.task import Example, Task
from model.settings import LONGEST, WIDEST, Dim, Fraction, within


@dataclass(frozen=True)
class Matching(Task):
    """Two documents of topic words among noise: whether both have the same topic words.

    Ids from 1 to `n_noise` are noise, those above it, up to V - 1, topic words, and 0 is padding. A document has
    `n_topics` different topic words in any order and, anywhere between them, 0 to L - `n_topics` noise words, uniform
    in number and kind. The other one has the same topic words, in an order and with noise of its own, or all but
    `n_changed` of them, and as many that the first has not.
    """

    name: ClassVar[str] = "matching"
    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = 2
    block: ClassVar[int] = 64
    pair: ClassVar[bool] = True

    length: Annotated[int, within(1, LONGEST)] = 32  # tokens of each document, at most
    vocab_size: Annotated[int, within(4, WIDEST)] = 64
    n_noise: Dim = 31
    n_topics: Dim = 4
    n_changed: Dim = 1
    positives: Fraction = 0.5  # share of pairs that match; contrastive training wants 1.0

    def check(self) -> None:
        self.bound("n_topics", 1, self.length, f"length {self.length}")
        self.bound("n_changed", 1, self.n_topics, f"n_topics {self.n_topics}")
        least = 1 + self.n_noise + self.n_topics + self.n_changed
        self.bound("vocab_size", least, why=f"padding, {self.n_noise} noise words, and topics to change")

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, K = self.block, self.n_topics
        words = 1 + self.n_noise + distinct(rng, B, self.vocab_size - 1 - self.n_noise, K + self.n_changed)
        match = rng.random(B) < self.positives
        first, others = words[:, :K], np.where(match[:, None], words[:, :K], words[:, self.n_changed :])
        inputs, segments = self.noisy(rng, first)
        other, other_segments = self.noisy(rng, others)
        longer = np.maximum(segments.sum(1), other_segments.sum(1))
        return {
            "inputs": inputs,
            "segments": segments,
            "other": other,
            "other_segments": other_segments,
            "targets": match.astype(np.int32),
            "weights": np.ones(B, np.float32),
            "attr_length": bins.number(longer).astype(np.int32),
        }

    def noisy(self, rng: np.random.Generator, topics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Documents `[B, L]` with these topic words, and where they are no padding; topics: [B, K]."""
        (B, K), L = topics.shape, self.length
        n = rng.integers(K, L + 1, (B, 1))
        real = np.arange(L) < n
        document = np.where(real, rng.integers(1, self.n_noise + 1, (B, L)), 0)
        clocks = np.where(real, rng.random((B, L)), np.inf)
        np.put_along_axis(document, clocks.argsort(axis=1)[:, :K], topics, axis=1)  # in any K places, in any order
        return document.astype(np.int32), real.astype(np.int32)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"length": bins.labels(self.length)}  # of the longer document

    def baselines(self) -> dict[str, float]:
        return {"majority": max(self.positives, 1 - self.positives)}
