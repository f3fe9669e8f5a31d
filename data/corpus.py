"""A text file, or all files of a folder, as one run of bytes of which nothing is held in memory."""

import functools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

SEPARATOR = 0  # between files: no text holds a zero byte, so a model can see that another file begins


@functools.lru_cache(maxsize=256)
def _mapped(path: str) -> np.ndarray:
    return np.memmap(path, np.uint8, mode="r")


@dataclass(frozen=True)
class Corpus:
    paths: tuple[str, ...]
    starts: tuple[int, ...]  # of each file, one separator after the end of the file before
    size: int  # bytes, separators included

    def read(self, start: int, n: int) -> np.ndarray:
        """Bytes start .. start + n - 1, as uint8."""
        out = np.full(n, SEPARATOR, np.uint8)
        at = bisect_right(self.starts, start) - 1
        while at < len(self.paths) and self.starts[at] < start + n:
            skip = max(start - self.starts[at], 0)
            piece = _mapped(self.paths[at])[skip : start + n - self.starts[at]]
            where = self.starts[at] + skip - start
            out[where : where + piece.size] = piece
            at += 1
        return out

    def chunks(self, size: int = 1 << 22) -> Iterator[np.ndarray]:
        """All of it, in order."""
        return (self.read(start, min(size, self.size - start)) for start in range(0, self.size, size))


def open_corpus(path: Path) -> Corpus:
    """A file, or those of a folder and its subfolders sorted by path; hidden and empty ones are skipped."""
    if path.is_dir():
        inside = (p.relative_to(path).parts for p in path.rglob("*") if p.is_file())
        files = [path.joinpath(*parts) for parts in sorted(inside) if not any(x.startswith(".") for x in parts)]
    else:
        files = [path]
    sized = [(str(p), p.stat().st_size) for p in files]
    sized = [(p, n) for p, n in sized if n]
    ends = list(accumulate(n + 1 for _, n in sized))
    return Corpus(tuple(p for p, _ in sized), (0, *ends[:-1]), ends[-1] - 1 if ends else 0)
