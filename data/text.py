"""Byte-level language modelling over the user's own text."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from data import bins
from data.corpus import Corpus, check_there, open_corpus
from data.task import Example, Task
from model.errors import UserError
from model.settings import Length, within

_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 fill the unit interval evenly, however many are taken


@dataclass(frozen=True)
class Text(Task):
    """The next byte of any text file or folder of files.

    The splits are train | validation | test by position. A window is length + 1 bytes: the inputs and, one
    on, the targets; windows follow each other so that every byte is a target once per epoch. Each training
    epoch cuts them at another phase, so in time every byte is seen with every amount of context.
    """

    name: ClassVar[str] = "text"
    kind: ClassVar[str] = "lm"
    vocab_size: ClassVar[int] = 256
    by_epoch: ClassVar[bool] = True  # the phase
    next_token: ClassVar[bool] = True
    running_text: ClassVar[bool] = True

    path: str = ""  # a file, or a folder: all its files, sorted, hidden ones skipped, a zero byte between two
    length: Length = 256  # bytes the model sees
    validation: Annotated[float, within(1e-4, 0.4)] = 0.05  # fraction of the text
    test: Annotated[float, within(1e-4, 0.4)] = 0.05  # fraction of the text, its end

    @functools.cached_property
    def corpus(self) -> Corpus:
        return open_corpus(Path(self.path).expanduser())

    def spans(self, total: int) -> dict[str, tuple[int, int]]:
        """First byte and number of bytes of each split of a text of `total` bytes."""
        validation, test = round(total * self.validation), round(total * self.test)
        train = total - validation - test
        return {"train": (0, train), "validation": (train, validation), "test": (train + validation, test)}

    def windows(self, total: int) -> dict[str, int]:
        """Windows per split of a text of `total` bytes; training leaves one window's room for the phase."""
        return {
            split: max(n - (self.length if split == "train" else 1), 0) // self.length
            for split, (_, n) in self.spans(total).items()
        }

    def check(self) -> None:
        L = self.length
        # From here on every split has a window, however the fractions round.
        train = 1 - self.validation - self.test
        need = math.ceil(max((2 * L + 1) / train, (L + 0.51) / min(self.validation, self.test)))
        asked = f"length {L} needs a text of at least {need:,} bytes"
        if not self.path:
            raise UserError(f"data.text.path is not set; give a text file or a folder of them ({asked})")
        check_there("data.text.path", self.path, asked)
        if not all(self.windows(self.corpus.size).values()):
            has = f"has only {self.corpus.size:,} bytes" if self.corpus.size else "is empty"
            raise UserError(f"data.text.path {self.path!r} {has}; {asked}")

    def sizes(self) -> dict[str, int | None]:
        return dict(self.windows(self.corpus.size))

    def n_bytes(self, split: str) -> int:
        """How many a split has."""
        return self.spans(self.corpus.size)[split][1]

    def document(self, split: str, length: int) -> np.ndarray:
        """The first `length` bytes of a split as one document, and the byte after them: int32 [length + 1]."""
        return self.corpus.read(self.spans(self.corpus.size)[split][0], length + 1).astype(np.int32)

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        L = self.length
        epoch, place = divmod(index, self.size(split))
        phase = int(epoch * _GOLDEN % 1 * L)  # epoch 0, the only one of an evaluation split: no phase
        window = self.corpus.read(self.spans(self.corpus.size)[split][0] + place * L + phase, L + 1)
        window = window.astype(np.int32)
        return {
            "inputs": window[:-1],
            "targets": window[1:],
            "weights": np.ones(L, np.float32),
            "attr_position": bins.number(np.arange(1, L + 1)),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"position": bins.labels(self.length)}  # bytes read when the next is asked for

    def baselines(self) -> dict[str, float]:
        counts = sum(np.bincount(chunk, minlength=256) for chunk in self.corpus.chunks())
        return {"chance": 1 / 256, "commonest byte": float(counts.max() / counts.sum())}

    def parameters(self) -> dict[str, Any]:
        """Where the bytes lie does not matter, only which they are."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "path"}

    def content(self) -> Iterable[bytes]:
        return (chunk.tobytes() for chunk in self.corpus.chunks())
