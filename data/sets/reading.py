"""Files out of folders, tar, zip and gzip, as streams: nothing is unpacked, so no name in an archive becomes a file."""

import contextlib
import gzip
import io
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn

from model.errors import UserError

TORN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError)
Watch = Callable[[int], None]  # is told how many bytes were read


@dataclass(frozen=True)
class Entry:
    """A file of a set, to be read before the next one is asked for."""

    path: str  # in its folder or archive
    where: str  # for whoever reads an error
    size: int  # bytes; of a gzip file, which does not say, 0
    changed: int  # when the file was that it lies in, itself or its archive, in nanoseconds
    stream: BinaryIO

    def read(self, limit: int) -> bytes:
        """All of it; a file larger than anything that the set has is not read at all."""
        if self.size > limit:
            raise UserError(f"{self.where} has {self.size:,} bytes; a file of this set has at most {limit:,}")
        found = self.stream.read(self.size)
        if len(found) != self.size:
            raise UserError(f"{self.where} is truncated: {len(found):,} of {self.size:,} bytes")
        return found


@dataclass
class Files:
    """Folders, archives or single files, in which those of a set are looked for."""

    paths: tuple[Path, ...]
    watch: Watch = lambda n: None
    reading: Path | None = None  # the one that files were last taken out of

    @property
    def where(self) -> str:
        """The one, or the folder that has them all."""
        return os.path.commonpath(self.paths)

    def matching(self, pattern: str) -> Iterator[tuple[re.Match, Entry]]:
        """Files whose path ends in the pattern; in a folder sorted by path, in an archive as they come."""
        wanted = re.compile(rf"(?:^|/){pattern}$")
        for path in self.paths:
            self.reading = path
            for entry in self._entries(path, wanted):
                yield wanted.search(entry.path), entry

    def _entries(self, path: Path, wanted: re.Pattern) -> Iterator[Entry]:
        if path.is_dir():
            yield from self._in_folder(path, wanted)
        elif path.suffix == ".zip" or zipfile.is_zipfile(path):
            yield from self._in_zip(path, wanted)
        elif path.suffix == ".gz" and wanted.search(path.with_suffix("").as_posix()):
            with self._opened(path) as raw, gzip.GzipFile(fileobj=raw) as unpacked:
                yield Entry(path.with_suffix("").as_posix(), str(path), 0, changed(raw), unpacked)
        elif path.suffix in (".gz", ".tgz", ".tar"):
            yield from self._in_tar(path, wanted)
        elif wanted.search(path.as_posix()):
            with self._opened(path) as raw:
                yield Entry(path.as_posix(), str(path), size(raw), changed(raw), raw)

    def _in_folder(self, path: Path, wanted: re.Pattern) -> Iterator[Entry]:
        for place, folders, names in os.walk(path, onerror=unreadable):
            folders.sort()
            for name in sorted(names):
                file = Path(place, name)
                if wanted.search(file.as_posix()):
                    with self._opened(file) as raw:
                        yield Entry(file.as_posix(), str(file), size(raw), changed(raw), raw)

    def _in_tar(self, path: Path, wanted: re.Pattern) -> Iterator[Entry]:
        with self._opened(path) as raw:
            packed = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
            with tarfile.open(fileobj=packed, mode="r|") as tar:
                for member in tar:
                    inside = harmless(member.name, path)
                    if not (member.isfile() or member.isdir()):
                        raise UserError(f"{path} holds {member.name!r}, which is no file and no folder; it is not read")
                    if member.isfile() and wanted.search(inside):
                        yield Entry(inside, f"{path}: {inside}", member.size, changed(raw), tar.extractfile(member))
                while packed.read(1 << 20):  # to the end, where gzip keeps its own checksum
                    pass

    def _in_zip(self, path: Path, wanted: re.Pattern) -> Iterator[Entry]:
        with self._opened(path) as raw, unpacked(path), zipfile.ZipFile(raw) as packed:
            for member in packed.infolist():
                inside = harmless(member.filename, path)
                if member.external_attr >> 28 == 0o12:
                    raise UserError(f"{path} holds {member.filename!r}, which is a link; it is not read")
                if member.flag_bits & 1:
                    raise UserError(f"{path} holds {member.filename!r}, which is encrypted; it is not read")
                if not member.is_dir() and wanted.search(inside):
                    with packed.open(member) as stream:
                        yield Entry(inside, f"{path}: {inside}", member.file_size, changed(raw), stream)

    def _opened(self, path: Path) -> BinaryIO:
        try:
            return io.BufferedReader(Watched(path, self.watch), 1 << 18)
        except OSError as error:
            unreadable(error)


class Watched(io.FileIO):
    """A file that tells how much of it was read."""

    def __init__(self, path: Path, watch: Watch):
        super().__init__(path)
        self._watch = watch

    def readinto(self, buffer: memoryview) -> int | None:
        try:
            n = super().readinto(buffer)
        except OSError as error:
            error.filename = self.name
            unreadable(error)
        self._watch(n or 0)
        return n


def unreadable(error: OSError) -> NoReturn:
    """Names the file that cannot be read; what else fails while a set is made is taken for a failure to write it."""
    raise UserError(f"cannot read {error.filename}: {error.strerror}") from None


def size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def changed(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_mtime_ns


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[None]:
    """Says in one line that a zip is packed in a way that Python does not know."""
    try:
        yield
    except NotImplementedError as error:
        raise UserError(f"{path} cannot be unpacked ({error}); put one that can in its place") from None


def harmless(name: str, archive: Path) -> str:
    """The path of a member, or UserError if it leads out of its archive."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name):
        raise UserError(f"{archive} holds {name!r}, which leads out of its folder; it is not read")
    return path.as_posix()


@contextlib.contextmanager
def whole(files: Files) -> Iterator[None]:
    """Says in one line which of the files that are read in this block is torn."""
    try:
        yield
    except TORN as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the machine, not of what was read
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{files.reading} is truncated or damaged ({why}); delete it and prepare again") from None


def lines(entry: Entry, longest: int = 1 << 24) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, from 1, without their ends."""
    number = 0
    while line := entry.stream.readline(longest):
        number += 1
        if len(line) == longest:
            raise UserError(f"{entry.where} row {number} has more than {longest:,} bytes")
        yield number, line.rstrip(b"\r\n")
