"""Retrieval of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006): which two documents belong
together, of papers that cite each other, or of Wikipedia articles that link to each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from data import bins
from data.prepared import PreparedSet
from data.stored import Stored
from data.task import SPLITS, Example
from model.settings import Length

PRINTABLE = range(0x20, 0x7F)  # the 95 characters that AAN has
UNKNOWN, EOS, FIRST = 1, 2, 3  # 0 is padding
WIDEST = 4  # bytes of a character


def byte_ids(text: np.ndarray, length: int) -> np.ndarray:
    """LRA's ids of a text uint8 [n]: byte + 1."""
    return text[:length].astype(np.int32) + 1


def character_ids(text: np.ndarray, length: int) -> np.ndarray:
    """S4's ids of a text uint8 [n] of UTF-8: a number for each character, and one for its end, also if it is cut."""
    points = text[: WIDEST * length].tobytes().decode("utf-8", "replace")[: length - 1].encode("utf-32-le")
    points = np.frombuffer(points, np.uint32).astype(np.int64)
    known = (points >= PRINTABLE.start) & (points < PRINTABLE.stop)
    ids = np.where(known, points - PRINTABLE.start + FIRST, UNKNOWN)
    return np.append(ids, EOS).astype(np.int32)


PROTOCOLS: dict[str, tuple[Callable[[np.ndarray, int], np.ndarray], int]] = {
    "lra": (byte_ids, 257),
    "s4": (character_ids, FIRST + len(PRINTABLE)),
}


@dataclass(frozen=True)
class Pairs(Stored):
    """Two documents, of which a prepared set says whether they belong together.

    `lra` feeds bytes, plus 1, and `s4` characters with an end: the 95 that can be printed, and one id for all others.
    Id 0 is padding. A longer document is cut.
    """

    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = 2
    pair: ClassVar[bool] = True

    length: Length = 4000  # tokens of each document, at most
    protocol: Literal["lra", "s4"] = "lra"

    @property
    def vocab_size(self) -> int:
        return PROTOCOLS[self.protocol][1]

    @property
    def set_name(self) -> str:
        return self.name

    def sizes(self) -> dict[str, int | None]:
        return {split: len(self.stored.arrays[f"{split}_labels"]) for split in SPLITS}

    def document(self, split: str, place: int, side: int) -> np.ndarray:
        """The first (side 0) or second text of a pair, uint8: what such a task defines."""
        raise NotImplementedError

    def rows(self, split: str, places: np.ndarray) -> Example:
        ids, _ = PROTOCOLS[self.protocol]
        out = {}
        for side, (tokens, segments) in enumerate((("inputs", "segments"), ("other", "other_segments"))):
            out[tokens], out[segments] = np.zeros((2, len(places), self.length), np.int32)
            for row, place in enumerate(places.tolist()):
                found = ids(self.document(split, place, side), self.length)
                out[tokens][row, : found.size], out[segments][row, : found.size] = found, 1
        longer = np.maximum(out["segments"].sum(1), out["other_segments"].sum(1))
        return out | {
            "targets": self.stored.arrays[f"{split}_labels"][places].astype(np.int32),
            "weights": np.ones(len(places), np.float32),
            "attr_length": bins.number(np.maximum(longer, 1)).astype(np.int32),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"length": bins.labels(self.length)}  # of the longer document

    def baselines(self) -> dict[str, float]:
        ones = float(self.stored.arrays["test_labels"].mean())
        return {"chance": 0.5, "majority": max(ones, 1 - ones)}


def text_at(stored: PreparedSet, run: str, starts: str, place: int) -> np.ndarray:
    begin, end = stored.arrays[starts][place : place + 2]
    return stored.arrays[run][begin:end]


@dataclass(frozen=True)
class Aan(Pairs):
    """Whether one of two papers cites the other (Retrieval of Long Range Arena)."""

    name: ClassVar[str] = "aan"

    @property
    def set_name(self) -> str:
        return "lra_aan"

    def document(self, split: str, place: int, side: int) -> np.ndarray:
        return text_at(self.stored, f"{split}_text{side + 1}", f"{split}_starts{side + 1}", place)


@dataclass(frozen=True)
class WikiLinks(Pairs):
    """Whether one of two Wikipedia articles of enwik8 links to the other; links are taken out of both texts.

    A stand-in for Retrieval, and not comparable to it: see data/sets/wiki_links.py for what pairs there are. Common
    words tell much: the cosine of the first 4,000 bytes of each as tf-idf vectors, cut where validation says, is right
    in 71.4 % of the test pairs.
    """

    name: ClassVar[str] = "wiki_links"

    def document(self, split: str, place: int, side: int) -> np.ndarray:
        return text_at(self.stored, "text", "starts", int(self.stored.arrays[f"{split}_pairs"][place, side]))
