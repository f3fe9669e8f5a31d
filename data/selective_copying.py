"""Selective copying (Gu and Dao, "Mamba", 2023, section 4.1.1, https://arxiv.org/abs/2312.00752)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.task import Example, Task


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Tokens scattered among noise: reproduce them in order at the end.

    Noise is 0, tokens are uniform in 1..V-2 at sorted random positions, and the last n_tokens inputs are the
    marker V-1, where the tokens are asked for.
    """

    name: ClassVar[str] = "selective_copying"
    kind: ClassVar[str] = "lm"

    length: int = 256  # tokens; the last n_tokens are markers, the rest hold the noise and the tokens
    vocab_size: int = 16  # noise and marker included
    n_tokens: int = 16  # to be copied

    def check(self) -> None:
        self.bound("length", 2)
        self.bound("n_tokens", 1, self.length // 2, f"half of length {self.length}")
        self.bound("vocab_size", 3, why="noise, marker and a token")

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        L, V, Q = self.length, self.vocab_size, self.n_tokens
        tokens = rng.integers(1, V - 1, Q, dtype=np.int32)
        inputs = np.zeros(L, np.int32)
        inputs[np.sort(rng.choice(L - Q, Q, replace=False, shuffle=False))] = tokens
        inputs[L - Q :] = V - 1
        return {
            "inputs": inputs,
            "at": np.arange(L - Q, L, dtype=np.int32),
            "targets": tokens,
            "weights": np.ones(Q, np.float32),
            "attr_place": np.arange(Q, dtype=np.int32),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"place": tuple(str(q + 1) for q in range(self.n_tokens))}  # in the output

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - 2)}
