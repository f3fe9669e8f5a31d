"""Selective copying as MAD has it (Poli et al., 2024, https://arxiv.org/abs/2403.17844)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.copying import Copied
from data.mad import Mad
from data.task import Example
from model.settings import LONGEST, WIDEST, Length, within


@dataclass(frozen=True)
class MadSelectiveCopying(Copied, Mad):
    """Tokens with blanks before each of them, then a mark and as many blanks: reproduce the tokens there.

    Tokens are uniform in 0..V-3, V-2 is blank and V-1 the mark. Each blank stands before one of the tokens, all as
    likely, so that none comes after the last. In `selective_copying` tokens stand anywhere, every choice of places as
    likely, and there are marks in place of the mark and the blanks at the end.
    """

    name: ClassVar[str] = "mad_selective_copying"

    length: Annotated[int, within(4, LONGEST)] = 256  # tokens
    vocab_size: Annotated[int, within(4, WIDEST)] = 16
    n_tokens: Length = 16  # to be copied

    def check(self) -> None:
        self.bound("n_tokens", 1, (self.length - 2) // 2, f"room in length {self.length}")

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, V, Q = self.block, self.length, self.vocab_size, self.n_tokens
        tokens = rng.integers(V - 2, size=(B, Q), dtype=np.int32)
        before = rng.integers(Q, size=(B, L - 2 * Q - 1))  # the token that each blank stands before
        blanks = (before[:, None] <= np.arange(Q)[:, None]).sum(axis=2)  # [B, Q], up to each token
        inputs = np.full((B, L), V - 2, np.int32)
        np.put_along_axis(inputs, blanks + np.arange(Q), tokens, axis=1)
        inputs[:, L - Q - 1] = V - 1
        return self.asked_of(inputs, tokens)
