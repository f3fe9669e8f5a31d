"""Multi-query associative recall, by Zoology's law (Arora et al., ICLR 2024, https://arxiv.org/abs/2312.04927)."""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from data import bins
from data.rng import distinct
from data.task import Example, Task
from model.settings import LONGEST, WIDEST, Length, Whole, at_least, even, within


@functools.lru_cache(maxsize=1024)
def gap_rates(space: int, alpha: float) -> np.ndarray:
    """Unnormalised chances alpha * i^(alpha - 1) of the gaps i = 1..space: near ones first, a heavy tail."""
    return alpha * np.arange(1, space + 1) ** (alpha - 1.0)


@dataclass(frozen=True)
class Mqar(Task):
    """Key-value pairs, then each key once more: name its value (Zoology's multi-query associative recall).

    `k1 v1 ... kK vK`, then every key is asked once, at position 2K + 2 * gap. Keys come from 1..V/2-1 and
    values from V/2..V-1, each without replacement; gaps are drawn without replacement by `gap_rates`. Query
    k asks for pair k. (Zoology also wants V > L; nothing in the law does.)
    """

    name: ClassVar[str] = "mqar"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64

    length: Annotated[int, within(4, LONGEST), even] = 64  # tokens; at least four per pair
    vocab_size: Annotated[int, within(4, WIDEST)] = 8192  # half of them keys, half values
    n_pairs: Length = 4  # pairs per example; the most, where min_pairs is set
    min_pairs: Whole = 0  # pairs vary uniformly from this to n_pairs; 0: always n_pairs
    alpha: Annotated[float, at_least(1e-3)] = 0.01  # power law of the gaps; 1: uniform
    random_fillers: bool = False  # other slots hold random tokens, not 0 (Zoology's Figure 2: 0)
    n_train: Whole = 0  # fixed training set of this many examples; 0: fresh for ever

    def check(self) -> None:
        self.bound("n_pairs", 1, self.length // 4, f"a quarter of length {self.length}")
        self.bound("min_pairs", 0, self.n_pairs, "n_pairs")
        self.bound("vocab_size", 2 * self.n_pairs + 2, why=f"{self.n_pairs} keys, as many values, and 0")

    def sizes(self) -> dict[str, int | None]:
        return super().sizes() | {"train": self.n_train or None}

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V, Q = self.block, self.length, self.vocab_size, self.n_pairs
        K = rng.integers(self.min_pairs or Q, Q + 1, (B, 1))  # pairs in each example
        keys = 1 + distinct(rng, B, V // 2 - 1, Q)
        values = V // 2 + distinct(rng, B, V - V // 2, Q)
        # Draws without replacement by chances p are the first rings of exponential clocks with rates p.
        rates = gap_rates((L - 2 * (self.min_pairs or Q)) // 2, self.alpha)
        clocks = rng.standard_exponential((B, rates.size)) / rates
        clocks[np.arange(rates.size) >= (L - 2 * K) // 2] = np.inf  # a gap past the end
        gaps = clocks.argsort(axis=1)[:, :Q]

        pair = np.arange(Q)
        used = pair < K
        at = np.where(used, 2 * K + 2 * gaps, 0)
        inputs = np.zeros((B, L + 1), np.int64)  # one column more, for what an absent pair writes
        if self.random_fillers:
            inputs[:] = rng.integers(V, size=inputs.shape)
        for places, tokens in ((2 * pair, keys), (2 * pair + 1, values), (at, keys)):
            np.put_along_axis(inputs, np.where(used, places, L), tokens, axis=1)
        out = {
            "inputs": inputs[:, :L].astype(np.int32),
            "at": at.astype(np.int32),
            "targets": np.where(used, values, 0).astype(np.int32),
            "weights": used.astype(np.float32),
            "attr_distance": np.where(used, bins.number(np.maximum(at - 2 * pair, 1)), 0).astype(np.int32),
        }
        if self.min_pairs:
            out["attr_pairs"] = np.broadcast_to(bins.number(K), (B, Q)).astype(np.int32)
        return out

    @property
    def tail(self) -> int:
        return self.length - 2 * (self.min_pairs or self.n_pairs)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        out: dict[str, Any] = {"distance": bins.labels(self.length - 1)}  # from a pair's key to its query
        if self.min_pairs:
            out["pairs"] = bins.labels(self.n_pairs)
        return out

    def baselines(self) -> dict[str, float]:
        mean_pairs = ((self.min_pairs or self.n_pairs) + self.n_pairs) / 2
        return {"chance": 1 / (self.vocab_size - self.vocab_size // 2), "any value shown": 1 / mean_pairs}
