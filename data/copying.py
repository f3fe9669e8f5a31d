"""Copying: tokens that are asked for again at the end of a row, and the task of that name.

(Arjovsky et al., 2016, https://arxiv.org/abs/1511.06464, its marks as in the state-spaces/s4 code.)
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.task import Example, Task
from model.settings import LONGEST, WIDEST, Length, within


class Copied(Task):
    """Tokens `n_tokens` of a row, in order, are the answers at its last places."""

    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64

    def check(self) -> None:
        self.bound("n_tokens", 1, self.length // 2, f"half of length {self.length}")

    def asked_of(self, inputs: np.ndarray, tokens: np.ndarray) -> Example:
        """Rows `[B, L]` that hold these tokens `[B, Q]`."""
        (B, L), Q = inputs.shape, tokens.shape[1]
        places = np.tile(np.arange(Q, dtype=np.int32), (B, 1))
        return {
            "inputs": inputs,
            "at": L - Q + places,
            "targets": tokens,
            "weights": np.ones((B, Q), np.float32),
            "attr_place": places,
        }

    @property
    def tail(self) -> int:
        return self.n_tokens

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"place": tuple(str(q + 1) for q in range(self.n_tokens))}  # in the output

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - 2)}


@dataclass(frozen=True)
class Copying(Copied):
    """Tokens, a long silence, then marks: reproduce the tokens in order there.

    Tokens are uniform in 1..V-2, the silence is 0, and the last n_tokens inputs are the mark V-1. Between a token and
    its copy lie L - n_tokens places: it is remembered for as long, whatever it is.
    """

    name: ClassVar[str] = "copying"

    length: Annotated[int, within(2, LONGEST)] = 256  # tokens: those to be copied, silence, and marks
    vocab_size: Annotated[int, within(3, WIDEST)] = 10  # silence and mark included
    n_tokens: Length = 10  # to be copied

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V, Q = self.block, self.length, self.vocab_size, self.n_tokens
        tokens = rng.integers(1, V - 1, (B, Q), dtype=np.int32)
        inputs = np.zeros((B, L), np.int32)
        inputs[:, :Q], inputs[:, L - Q :] = tokens, V - 1
        return self.asked_of(inputs, tokens)
