"""One token to keep among noise, and how far back it lies: memory against distance."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.settings import LONGEST, WIDEST, Length, even, within


@dataclass(frozen=True)
class DelayedRecall(Task):
    """Noise with one token to keep in it, and a mark at the end: name that token, so many tokens back.

    The last token is the mark, V-1. Tokens to keep are uniform in 0..V/2-1 and noise is uniform in V/2..V-2, so that it
    takes no search to tell one from the other, only memory. The distance from the token to the mark is of any power of
    two from `min_distance` to L - 1, all as likely, and uniform within it. At another length it is L - 1 in every row:
    tests at many lengths are tests at as many distances.
    """

    name: ClassVar[str] = "delayed_recall"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64

    length: Annotated[int, within(2, LONGEST)] = 256  # tokens
    vocab_size: Annotated[int, within(4, WIDEST), even] = 16
    min_distance: Length = 1

    def check(self) -> None:
        self.bound("min_distance", 1, self.length - 1, f"a token before the last of {self.length}")

    def resized(self, length: int) -> dict[str, Any]:
        return {"length": length, "min_distance": max(length - 1, 1)}

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V = self.block, self.length, self.vocab_size
        low = bins.number(np.array(self.min_distance))
        power = 2 ** rng.integers(low, (L - 1).bit_length(), (B, 1))
        distance = rng.integers(np.maximum(power, self.min_distance), np.minimum(2 * power, L))
        inputs = rng.integers(V // 2, V - 1, (B, L), dtype=np.int32)
        kept = rng.integers(V // 2, size=(B, 1), dtype=np.int32)
        np.put_along_axis(inputs, L - 1 - distance, kept, axis=1)
        inputs[:, -1] = V - 1
        return {
            "inputs": inputs,
            "at": np.full((B, 1), L - 1, np.int32),
            "targets": kept,
            "weights": np.ones((B, 1), np.float32),
            "attr_distance": bins.number(distance).astype(np.int32),
        }

    @property
    def tail(self) -> int:
        return 1

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"distance": bins.labels(self.length - 1)}

    def baselines(self) -> dict[str, float]:
        return {"chance": 2 / self.vocab_size}
