"""Tasks that bring a source and ask for the target that answers it, each of its own length.

Shape letters: S tokens of the source, T of the target. Ids below FIRST mean the same in all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.asked import Asked
from model.errors import UserError
from model.settings import is_one_of, shown

PADDING, START, END, FIRST = 0, 1, 2, 3


@dataclass(frozen=True)
class SourceTask(Task):
    """An example holds `source` int32 [S] and `source_segments` [S], the source closed by END; `inputs` [T], START and
    the answer; `targets` [T], the answer and END; `weights` and `segments` [T], which tell the padding behind them.
    `attr_length` is the bin of the source's length, its end counted. `length` is S.
    """

    kind: ClassVar[str] = "lm"
    whole_answers: ClassVar[bool] = True
    block: ClassVar[int] = 64

    @property
    def asked(self) -> Asked:
        return Asked(self.vocab_size, source=self.length)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"length": bins.labels(self.length)}

    def encode(self, text: str) -> list[int]:
        """A source as ids, its end among them; written as ids with blanks between them, unless a task has words."""
        words = text.split()
        wrong = [word for word in words if not is_one_of(range(FIRST, self.vocab_size), word)]
        if wrong or not words:
            given = f"holds {shown(wrong[0])}" if wrong else "is empty"
            raise UserError(f"source {given}; task {self.name} takes token ids from {FIRST} to {self.vocab_size - 1}")
        return self.closed([int(word) for word in words])

    def closed(self, ids: list[int]) -> list[int]:
        """A source with its end, if it is not too long."""
        if len(ids) >= self.length:
            raise UserError(f"a source of {len(ids)} tokens; task {self.name} takes up to {self.length - 1}")
        return [*ids, END]

    def decode(self, token: int) -> str:
        """What to print for a token of an answer."""
        return f" {token}"


def paired(sources: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], S: int, T: int) -> Example:
    """Examples of sources and their answers, which are given as lists of ids without their ends."""
    return pairs(*padded(sources, S), *padded(answers, T))


def padded(rows: Iterable[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists as one array `[B, width]`, and how long each is, `[B]`."""
    rows = list(rows)
    out, counts = np.full((len(rows), width), PADDING, np.int32), np.array([len(row) for row in rows])
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out, counts


def pairs(source: np.ndarray, n: np.ndarray, answer: np.ndarray, m: np.ndarray) -> Example:
    """The same of arrays: the first n [B] of `source` [B, S] count, and the first m [B] of `answer` [B, T]."""
    targets, real = closed(answer, m)
    source, read = closed(source, n)
    inputs = np.where(real, np.roll(targets, 1, axis=1), PADDING)
    inputs[:, 0] = START
    length = np.broadcast_to(bins.number(n + 1)[:, None], targets.shape)
    return {
        "source": source,
        "source_segments": read.astype(np.int32),
        "inputs": inputs.astype(np.int32),
        "targets": targets,
        "weights": real.astype(np.float32),
        "segments": real.astype(np.int32),
        "attr_length": np.where(real, length, 0).astype(np.int32),
    }


def closed(rows: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows with END behind their first n [B], and which of their tokens are no padding."""
    place, n = np.arange(rows.shape[1]), n[:, None]
    return np.where(place < n, rows, np.where(place == n, END, PADDING)).astype(np.int32), place <= n
