"""Selective copying (Gu and Dao, "Mamba", 2023, section 4.1.1, https://arxiv.org/abs/2312.00752)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.copying import Copied
from data.rng import distinct
from data.task import Example
from model.settings import LONGEST, WIDEST, Length, within


@dataclass(frozen=True)
class SelectiveCopying(Copied):
    """Tokens scattered among noise: reproduce them in order at the end.

    Noise is 0, tokens are uniform in 1..V-2 at sorted random positions, and the last n_tokens inputs are the
    marker V-1, where the tokens are asked for.
    """

    name: ClassVar[str] = "selective_copying"

    length: Annotated[int, within(2, LONGEST)] = 256  # tokens; the last n_tokens are markers
    vocab_size: Annotated[int, within(3, WIDEST)] = 16  # noise and marker included
    n_tokens: Length = 16  # to be copied

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V, Q = self.block, self.length, self.vocab_size, self.n_tokens
        tokens = rng.integers(1, V - 1, (B, Q), dtype=np.int32)
        inputs = np.zeros((B, L), np.int32)
        np.put_along_axis(inputs, np.sort(distinct(rng, B, L - Q, Q), axis=1), tokens, axis=1)
        inputs[:, L - Q :] = V - 1
        return self.asked_of(inputs, tokens)
