"""Random tokens, each asked for the next: nothing can be learned, and what it costs to try can be measured."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.task import Example, Task
from model.settings import WIDEST, Length, within


@dataclass(frozen=True)
class Noise(Task):
    """Tokens are uniform in 0..V-1, and every place is a target, as in a language model's training."""

    name: ClassVar[str] = "noise"
    kind: ClassVar[str] = "lm"
    next_token: ClassVar[bool] = True

    length: Length = 256
    vocab_size: Annotated[int, within(2, WIDEST)] = 256

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        L = self.length
        row = rng.integers(0, self.vocab_size, L + 1, dtype=np.int32)
        return {"inputs": row[:-1], "targets": row[1:], "weights": np.ones(L, np.float32)}

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.vocab_size}
