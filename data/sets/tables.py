"""Tables of texts as arrays: rows of tab-separated columns, each refused by its number if it is not as it should be."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from data.prepared import Writer
from data.sets.reading import Entry, Files, lines
from model.errors import UserError

Row = TypeVar("Row")


def rows(entry: Entry, parse: Callable[[list[bytes]], Row], header: bytes | None = None) -> Iterator[Row]:
    """What `parse` makes of each row's columns; a ValueError of its is the user's, with the number of the row."""
    for number, line in lines(entry):
        if number == 1 and header is not None:
            if line != header:
                raise UserError(f"{entry.where} row 1 is {line[:40]!r}, not the header {header!r}")
            continue
        try:
            yield parse(line.split(b"\t"))
        except ValueError as error:
            raise UserError(f"{entry.where} row {number}: {error}") from None


def columns(cells: list[bytes], n: int) -> list[bytes]:
    if len(cells) != n:
        raise ValueError(f"it has {len(cells)} columns, not {n}")
    return cells


class Texts:
    """Texts of any length, one after another in the array `run`, and in `starts` [n + 1] where each begins."""

    def __init__(self, writer: Writer, run: str, starts: str):
        self.writer, self.run, self.starts = writer, run, starts
        self.sizes = [0]

    def append(self, text: bytes | np.ndarray) -> None:
        self.writer.append(self.run, np.frombuffer(text, np.uint8) if isinstance(text, bytes) else text)
        self.sizes.append(len(text))

    def finish(self) -> None:
        self.writer.append(self.starts, np.cumsum(self.sizes, dtype=np.int64))


def each(files: Files, pattern: str, names: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
    """One file for each name, which the pattern captures, and the rest of an archive, where its checksum stands."""
    missing = set(names)
    for match, entry in files.matching(pattern):
        if match[1] in missing:
            missing.remove(match[1])
            yield match[1], entry
    if missing:
        raise UserError(f"{pattern.replace(chr(92), '')} for {', '.join(sorted(missing))} is not in {files.where}")
