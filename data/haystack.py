"""Sentences hidden in a haystack, and a question at its end: the pieces that the tasks of the needle family share.

After RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654), for models small enough to be trained on it. One
vocabulary of made-up words serves the whole family, so that a model of one task can be asked another: STOP ends a
sentence, ASK begins a question; then come names (keys, variables, words to count), values and fillers. A word is one
token, as what is asked is to find and not to spell, and in bytes most of a short row would be the needle's spelling.

Shape letters, besides the tasks': H tokens of the haystack, F of them fillers, n sentences of w tokens, T tokens of the
ending, which is the question and, teacher-forced, its answer.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.rng import distinct
from data.task import Example, Task
from model.settings import LONGEST, WIDEST, within

STOP, ASK, FIRST = 0, 1, 2
DEPTHS = 10  # bins

Words = Annotated[int, within(2, WIDEST)]


@dataclass(frozen=True)
class Haystack(Task):
    """A haystack of H tokens, then an ending of T, of which the last is asked for and not shown: L = H + T - 1."""

    kind: ClassVar[str] = "lm"
    whole_answers: ClassVar[bool] = True
    block: ClassVar[int] = 64

    length: Annotated[int, within(4, LONGEST)] = 256  # tokens
    names: Words = 64  # in the vocabulary, as are the next two
    values: Words = 64
    fillers: Words = 64

    @property
    def asked_places(self) -> np.ndarray:
        """bool [T]: which tokens of the ending are asked for."""
        raise NotImplementedError

    @property
    def shows_answers(self) -> bool:
        """Of an answer of several words, all but the last are read on."""
        return bool(self.asked_places[:-1].any())

    @property
    def first_value(self) -> int:
        return FIRST + self.names

    @property
    def first_filler(self) -> int:
        return self.first_value + self.values

    @property
    def vocab_size(self) -> int:
        return self.first_filler + self.fillers

    @property
    def haystack(self) -> int:
        """H."""
        return self.length - len(self.asked_places) + 1

    @property
    def tail(self) -> int:
        return len(self.asked_places) - int(np.argmax(self.asked_places))

    def asked_of(self, rows: np.ndarray, ending: np.ndarray, depth: np.ndarray | None = None) -> Example:
        """Examples of haystacks [B, H], endings [B, T] and the bins [B] of their depths."""
        asked = np.flatnonzero(self.asked_places)
        targets = ending[:, asked].astype(np.int32)
        out = {
            "inputs": np.concatenate([rows, ending[:, :-1]], axis=1).astype(np.int32),
            "at": np.broadcast_to(rows.shape[1] + asked - 1, targets.shape).astype(np.int32),
            "targets": targets,
            "weights": np.ones(targets.shape, np.float32),
        }
        if depth is not None:
            out["attr_depth"] = np.broadcast_to(depth[:, None], targets.shape).astype(np.int32)
        return out

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """How deep in the haystack the sentence begins that is asked for, the first one of several."""
        return {"depth": tuple(f"{100 * i // DEPTHS}-{100 * (i + 1) // DEPTHS} %" for i in range(DEPTHS))}


def depth(starts: np.ndarray, last: int) -> np.ndarray:
    """Bins of sentences that begin at `starts`, of 0..last."""
    return DEPTHS * starts // (last + 1)


def different(rng: np.random.Generator, rows: int, n: int, k: int) -> np.ndarray:
    """`[rows, k]`: in each row k different numbers below n, in random order.

    Many are taken from a permutation: clocks that ring at once would leave the order to the platform's sort.
    """
    if k * k <= 2 * n:
        return distinct(rng, rows, n, k)
    return rng.permuted(np.tile(np.arange(n), (rows, 1)), axis=1)[:, :k]


def repeated(rng: np.random.Generator, rows: int, n: int, words: int) -> np.ndarray:
    """`[rows, n]`: one sentence of all the words, over and over, from any of them on."""
    return (rng.integers(words, size=(rows, 1)) + np.arange(n)) % words


def hide(rng: np.random.Generator, sentences: np.ndarray, fillers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Haystacks [B, H] of fillers [B, F] and sentences [B, n, w], in their order; and where [B, n] these begin.

    Each sentence goes between any two fillers, or to an end, as likely as anywhere else.
    """
    (B, n, w), F = sentences.shape, fillers.shape[1]
    starts = np.sort(rng.integers(F + 1, size=(B, n)), axis=1) + w * np.arange(n)
    cells = (starts[:, :, None] + np.arange(w)).reshape(B, n * w)
    rows, free = np.empty((B, F + n * w), np.int32), np.ones((B, F + n * w), bool)
    np.put_along_axis(free, cells, False, axis=1)
    rows[free] = fillers.ravel()
    np.put_along_axis(rows, cells, sentences.reshape(B, n * w).astype(np.int32), axis=1)
    return rows, starts
