"""What is known of a published set: where it is, what it must be, and how its files become arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from data.prepared import Writer
from data.sets.reading import Files

Convert = Callable[[Files, Writer], None]


@dataclass(frozen=True)
class Download:
    """A file at its official address."""

    path: str  # where it belongs, below the root
    url: str
    unpacked: tuple[str, ...]  # the files or folders that may be there in its place, the first of them that is
    size: int | None = None  # bytes, and None where nobody states them
    sha256: str | None = None

    def found(self, root: Path) -> Path | None:
        """What is there of it, unpacked or not."""
        return next((root / path for path in (*self.unpacked, self.path) if (root / path).exists()), None)


@dataclass(frozen=True)
class Release:
    """`sha256` is of each array's bytes as converted, so it holds for an archive, one packed anew, and a folder.

    Sets of which no checksum is known, those of Long Range Arena, are judged by how many rows they have: as many as
    were published, so a part of a set is told from all of it, but not one row from another.
    """

    name: str
    summary: str
    downloads: tuple[Download, ...]
    convert: Convert
    sha256: Mapping[str, str] = field(default_factory=dict)  # array -> of its bytes
    rows: Mapping[str, int] = field(default_factory=dict)  # array -> rows
    listed: Mapping[str, int] = field(default_factory=dict)  # array -> rows, with those left out for being empty
    passes: int = 1  # times that its files are read
