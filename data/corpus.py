"""A text file, or all files of a folder, as one run of bytes of which nothing is held in memory.

A `.npy` file is text too if it is one row of bytes, as `data.prepare enwik8` leaves it: its header is skipped.
"""

import functools
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.prepared import in_a_set, open_set
from model.errors import UserError

SEPARATOR = 0  # between files: no text holds a zero byte, so a model can see that another file begins


@functools.lru_cache(maxsize=256)
def _opened(path: str) -> FileIO:
    return open(path, "rb", buffering=0)


def _read(path: str, start: int, n: int) -> np.ndarray:
    # Read and not mapped: a page that cannot be had, of a file that has shrunk say, would kill the process.
    try:
        found = np.frombuffer(os.pread(_opened(path).fileno(), n, start), np.uint8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if found.size < n:
        raise UserError(f"{path} has become shorter since it was opened; put it back, or begin a new run")
    return found


@dataclass(frozen=True)
class Corpus:
    paths: tuple[str, ...]
    headers: tuple[int, ...]  # bytes at the beginning of each file that are no text
    starts: tuple[int, ...]  # of each file, one separator after the end of the file before
    size: int  # bytes, separators included

    def read(self, start: int, n: int) -> np.ndarray:
        """Bytes start .. start + n - 1, as uint8."""
        out = np.full(n, SEPARATOR, np.uint8)
        at = bisect_right(self.starts, start) - 1
        while at < len(self.paths) and self.starts[at] < start + n:
            first, end = self.starts[at], self.end(at)
            low, high = max(start, first), min(start + n, end)
            if low < high:
                place = self.headers[at] + low - first
                out[low - start : high - start] = _read(self.paths[at], place, high - low)
            at += 1
        return out

    def end(self, at: int) -> int:
        """One past the last byte of a file."""
        return self.starts[at + 1] - 1 if at + 1 < len(self.starts) else self.size

    def chunks(self, size: int = 1 << 22) -> Iterator[np.ndarray]:
        """All of it, in order."""
        return (self.read(start, min(size, self.size - start)) for start in range(0, self.size, size))


def check_there(key: str, path: str, need: str) -> None:
    """Refuses a text that is not there; of a prepared set that is not, by the command that makes it."""
    if Path(path).expanduser().exists():
        return
    if stored := in_a_set(path):
        open_set(stored.root, stored.name)
    raise UserError(f"{key} {path!r} does not exist; {need}")


def open_corpus(path: Path) -> Corpus:
    """A file, or those of a folder and its subfolders sorted by path; hidden and empty ones are skipped."""
    try:
        if path.is_dir():
            inside = (p.relative_to(path).parts for p in path.rglob("*") if p.is_file())
            files = [path.joinpath(*parts) for parts in sorted(inside) if not any(x.startswith(".") for x in parts)]
        else:
            files = [path]
        headers = [header(p) for p in files]
        sized = [(str(p), skip, p.stat().st_size - skip) for p, skip in zip(files, headers, strict=True)]
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from error
    sized = [file for file in sized if file[2]]
    ends = list(accumulate(n + 1 for *_, n in sized))
    paths, headers, _ = zip(*sized, strict=True) if sized else ((), (), ())
    return Corpus(paths, headers, (0, *ends[:-1]), ends[-1] - 1 if ends else 0)


def header(path: Path) -> int:
    """Bytes before the text of a file."""
    if path.suffix != ".npy":
        return 0
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
    except ValueError as error:
        raise UserError(f"{path} is no whole .npy file: {error}") from error
    if dtype != np.uint8 or len(shape) != 1:
        raise UserError(f"{path} holds {dtype} {list(shape)}; text is one row of bytes, uint8")
    return begin
