"""Needles, which are sentences `name value STOP`, in a haystack, and a question `ASK name` for what follows the name.

After RULER's needles (https://arxiv.org/abs/2404.06654) and the passkey of Mohtashami and Jaggi 2023
(https://arxiv.org/abs/2305.16300). Noise is random fillers; with a `path` the haystack is that text, a byte a token.
"""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from data.corpus import Corpus, check_there, open_corpus
from data.haystack import ASK, FIRST, STOP, Haystack, depth, different, hide, repeated
from data.task import SPLITS, Example
from model.errors import UserError
from model.settings import LONGEST, within

HELD_OUT = 20  # of a text one part in so many is for validation, and as much, its end, for testing

Few = Annotated[int, within(1, 1024)]


@dataclass(frozen=True)
class Passkey(Haystack):
    """A number hidden in one sentence repeated over and over: write it down.

    The number's digits are the first ten values, its name the first of the names.
    """

    name: ClassVar[str] = "passkey"

    values: Annotated[int, within(10, 2**20)] = 64
    digits: Few = 5  # of the number

    def check(self) -> None:
        self.bound("length", 2 * self.digits + 3, why=f"a number of {self.digits} digits, the question and its answer")

    @property
    def asked_places(self) -> np.ndarray:
        return np.arange(2 + self.digits) >= 2

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, w = self.block, self.digits + 2
        number = self.first_value + rng.integers(10, size=(B, self.digits))
        key = np.full((B, 1), FIRST)
        needle = np.concatenate([key, number, np.full((B, 1), STOP)], axis=1)
        filler = self.first_filler + repeated(rng, B, self.haystack - w, self.fillers)
        rows, starts = hide(rng, needle[:, None], filler)
        ending = np.concatenate([np.full((B, 1), ASK), key, number], axis=1)
        return self.asked_of(rows, ending, depth(starts[:, 0], self.haystack - w))

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / 10}


@dataclass(frozen=True)
class Needles(Haystack):
    """Needles in noise or in a text."""

    value_words: Few = 1  # of a value
    path: str = ""  # a text file, or a folder of them, for a haystack; "": noise

    @property
    def n_hidden(self) -> int:
        """Needles in a haystack."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Tokens of a needle."""
        return self.value_words + 2

    @property
    def vocab_size(self) -> int:
        return self.first_filler + (256 if self.path else self.fillers)

    def check(self) -> None:
        need = self.n_hidden * self.width + len(self.asked_places) - 1
        self.bound("length", need, why=f"needles of {self.width} tokens, the questions and their answers")
        if self.path:
            self.refuse_unread(("fillers",), "the fillers of a path's text are its bytes", "path=''")
            self.check_text()

    def check_text(self) -> None:
        room = self.haystack - self.n_hidden * self.width
        need = f"length {self.length} needs a text of at least {HELD_OUT * (room + 1):,} bytes"
        check_there(f"data.{self.name}.path", self.path, need)
        if self.corpus.size < HELD_OUT * (room + 1):
            raise UserError(f"data.{self.name}.path {self.path!r} has only {self.corpus.size:,} bytes; {need}")

    @functools.cached_property
    def corpus(self) -> Corpus:
        return open_corpus(Path(self.path).expanduser())

    def haystacks(self, split: str, rng: np.random.Generator) -> np.ndarray:
        """Fillers [B, F]: noise, or stretches of the text's part for a split."""
        B, n = self.block, self.haystack - self.n_hidden * self.width
        if not self.path:
            return self.first_filler + rng.integers(self.fillers, size=(B, n))
        held = self.corpus.size // HELD_OUT
        bounds = (0, self.corpus.size - 2 * held, self.corpus.size - held, self.corpus.size)
        first, end = bounds[SPLITS.index(split) :][:2]
        starts = rng.integers(first, end - n + 1, size=B)
        return self.first_filler + np.stack([self.corpus.read(int(start), n) for start in starts]).astype(np.int64)

    def draw_names(self, rng: np.random.Generator) -> np.ndarray:
        """A name [B, n] for each needle, no two alike."""
        return FIRST + different(rng, self.block, self.names, self.n_hidden)

    def draw_values(self, rng: np.random.Generator) -> np.ndarray:
        """A value [B, n, words] for each needle."""
        return self.first_value + rng.integers(self.values, size=(self.block, self.n_hidden, self.value_words))

    def hidden(
        self, split: str, rng: np.random.Generator, names: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Haystacks [B, H] with needles, and the bins [B, n] of the needles' depths."""
        needles = np.concatenate([names[..., None], values, np.full_like(names, STOP)[..., None]], axis=-1)
        rows, starts = hide(rng, needles, self.haystacks(split, rng))
        return rows, depth(starts, self.haystack - self.width)

    def baselines(self) -> dict[str, float]:
        shown = {"any value shown": 1 / self.n_hidden} if self.n_hidden > 1 else {}
        return {"chance": 1 / self.values} | shown

    def parameters(self) -> dict[str, Any]:
        """Where a text lies does not matter, only whether there is one, and which."""
        return dataclasses.asdict(self) | {"path": bool(self.path)}

    def content(self) -> Iterable[bytes]:
        return (chunk.tobytes() for chunk in self.corpus.chunks()) if self.path else ()


@dataclass(frozen=True)
class OneKey(Needles):
    """One of the needles is asked for: `ASK name`, its value."""

    @property
    def asked_places(self) -> np.ndarray:
        return np.arange(2 + self.value_words) >= 2

    def check(self) -> None:
        super().check()
        self.bound("names", self.n_hidden, why="a name for each needle")

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B = self.block
        names, values = self.draw_names(rng), self.draw_values(rng)
        rows, depths = self.hidden(split, rng, names, values)
        one = np.arange(B), rng.integers(self.n_hidden, size=B)
        ending = np.concatenate([np.full((B, 1), ASK), names[one][:, None], values[one]], axis=1)
        return self.asked_of(rows, ending, depths[one])


@dataclass(frozen=True)
class Needle(OneKey):
    """A name and its value hidden in noise or in a text: what is the value of that name?"""

    name: ClassVar[str] = "needle"
    n_hidden: ClassVar[int] = 1


@dataclass(frozen=True)
class MultiKey(OneKey):
    """A needle among others with other names, up to a haystack that is all needles: find the right one."""

    name: ClassVar[str] = "multi_key"

    n_needles: Annotated[int, within(0, LONGEST)] = 4  # 0: as many as there is room for

    @property
    def n_hidden(self) -> int:
        return self.n_needles or max(self.haystack // self.width, 1)


@dataclass(frozen=True)
class MultiValue(Needles):
    """One name in several needles, each with another value: write all of its values.

    In the order of the vocabulary, as RULER takes them in any, and by their first words, no two of which are alike.
    """

    name: ClassVar[str] = "multi_value"

    n_values: Few = 4  # needles

    @property
    def n_hidden(self) -> int:
        return self.n_values

    @property
    def asked_places(self) -> np.ndarray:
        return np.arange(2 + self.n_values * self.value_words) >= 2

    def check(self) -> None:
        super().check()
        self.bound("values", self.n_values, why="first words of the values")

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, n = self.block, self.n_values
        key = FIRST + rng.integers(self.names, size=(B, 1))
        values = self.draw_values(rng)
        values[..., 0] = self.first_value + different(rng, B, self.values, n)
        rows, depths = self.hidden(split, rng, np.repeat(key, n, axis=1), values)
        ordered = np.take_along_axis(values, np.argsort(values[..., :1], axis=1), axis=1)
        ending = np.concatenate([np.full((B, 1), ASK), key, ordered.reshape(B, -1)], axis=1)
        return self.asked_of(rows, ending, depths[:, 0])


@dataclass(frozen=True)
class MultiQuery(Needles):
    """Several needles, all of them asked for, one question after the other, in any order."""

    name: ClassVar[str] = "multi_query"

    n_queries: Few = 4  # needles

    @property
    def n_hidden(self) -> int:
        return self.n_queries

    @property
    def asked_places(self) -> np.ndarray:
        return np.tile(np.arange(2 + self.value_words) >= 2, self.n_queries)

    def check(self) -> None:
        super().check()
        self.bound("names", self.n_queries, why="a name for each needle")

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, n = self.block, self.n_queries
        names, values = self.draw_names(rng), self.draw_values(rng)
        rows, depths = self.hidden(split, rng, names, values)
        order = rng.permuted(np.tile(np.arange(n), (B, 1)), axis=1)[..., None]
        parts = np.full((B, n, 1), ASK), names[..., None], values
        ending = np.concatenate([np.take_along_axis(part, order, axis=1) for part in parts], axis=2)
        return self.asked_of(rows, ending.reshape(B, -1), depths[:, 0])
