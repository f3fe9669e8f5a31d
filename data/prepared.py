"""Sets of arrays on disk, made once by `python -m data.prepare` and only ever opened whole.

    ROOT/prepared/NAME/<array>.npy ... manifest.json

A set is written beside its place and put there by one rename, its manifest last, so whatever stands there is whole.
Arrays are mapped into memory: opening one costs nothing, and processes on one machine share its pages.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from model.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, eq=False)
class PreparedSet:
    name: str
    arrays: Mapping[str, np.ndarray]  # mapped, read only
    digest: str  # of every bit of them, hexadecimal
    notes: tuple[str, ...] = ()  # what was skipped or cut, in words


def folder(root: str | Path, name: str) -> Path:
    return Path(root).expanduser() / "prepared" / name


class Unprepared(UserError):
    """A set that is not there, or not whole, and the command that makes it."""

    def __init__(self, said: str, root: str, name: str):
        super().__init__(said, root, name)  # all of it, so that it comes whole out of another process
        self.said, self.root, self.name = said, root, name

    def __str__(self) -> str:
        return f"{self.said} {command(self.root, self.name)}"


def open_set(root: str, name: str) -> PreparedSet:
    """The set of that name below a root, or UserError with the command that makes it."""
    place = folder(root, name)
    try:
        written = (place / MANIFEST).stat()
    except (OSError, ValueError):  # the latter of a name that no file can have
        raise Unprepared(f"no prepared set {name!r} below {root!r}; make it by:", root, name) from None
    return _opened(str(root), name, str(place), written.st_mtime_ns)


def command(root: str | Path, name: str) -> str:
    return f"python -m data.prepare {name} --root={root}"


@functools.lru_cache(maxsize=32)
def _opened(root: str, name: str, place: str, written: int) -> PreparedSet:
    try:
        manifest = json.loads((Path(place) / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, where {FORMAT} is read")
        arrays = {key: _mapped(Path(place, f"{key}.npy"), fact) for key, fact in manifest["arrays"].items()}
        notes = tuple(map(str, manifest["notes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        said = f"the prepared set {name!r} below {root!r} is damaged ({why}); make it anew by:"
        raise Unprepared(said, root, name) from None
    return PreparedSet(name, MappingProxyType(arrays), digest(manifest["arrays"]), notes)


def _mapped(path: Path, fact: Mapping[str, Any]) -> np.ndarray:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if (array.dtype.str, list(array.shape)) != (fact["dtype"], fact["shape"]):
        raise ValueError(f"{path.name} is {array.dtype.str} {list(array.shape)}, not {fact['dtype']} {fact['shape']}")
    return array.view(np.ndarray)


def digest(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """One hash of the names, types, shapes and bytes of all arrays."""
    told = [[name, fact["dtype"], fact["shape"], fact["sha256"]] for name, fact in sorted(facts.items())]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def is_whole(root: str | Path, name: str) -> bool:
    """Whether a set is there and has every bit that it was written with, read from end to end."""
    try:
        found = open_set(str(root), name)
    except UserError:
        return False
    manifest = json.loads((folder(root, name) / MANIFEST).read_text(encoding="utf-8"))
    return all(fact["sha256"] == sha256(found.arrays[key]) for key, fact in manifest["arrays"].items())


def sha256(array: np.ndarray, step: int = 1 << 24) -> str:
    """Of an array's bytes, a part at a time."""
    h = hashlib.sha256()
    rows = max(step // max(math.prod(array.shape[1:]) * array.itemsize, 1), 1)
    for start in range(0, len(array), rows):
        h.update(np.ascontiguousarray(array[start : start + rows]).tobytes())
    return h.hexdigest()


class Writer:
    """Takes the arrays of a new set: whole, a part after another, or in any order."""

    def __init__(self, place: Path):
        self.place = place
        self.notes: list[str] = []
        self.left_out: Counter[str] = Counter()  # rows of the release that an array has not
        self.filled: dict[str, np.ndarray] = {}
        self._growing: dict[str, Growing] = {}
        self._facts: dict[str, dict[str, Any]] = {}

    def note(self, line: str) -> None:
        """Says what is not as one may expect it; the command prints it, and the set keeps it."""
        self.notes.append(line)

    def leave_out(self, name: str, line: str) -> None:
        """Counts a row of the release that an array will not have, and says which."""
        self.left_out[name] += 1
        self.note(line)

    def append(self, name: str, part: np.ndarray) -> None:
        """Adds rows to an array, of which nothing is held in memory."""
        if name not in self._growing:
            self._growing[name] = Growing(self._path(name), part.dtype, part.shape[1:])
        self._growing[name].append(part)

    def fill(self, name: str, dtype: np.typing.DTypeLike, shape: tuple[int, ...]) -> None:
        """Opens `filled[name]`, an array to be written in any order."""
        self.filled[name] = np.lib.format.open_memmap(self._path(name), "w+", np.dtype(dtype), shape)

    def _path(self, name: str) -> Path:
        return self.place / f"{name}.npy"

    def close(self) -> None:
        while self._growing:
            self._growing.popitem()[1].close()
        while self.filled:
            self.filled.popitem()[1].flush()

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the manifest says of each array, read back from the disk; no array is written to any more."""
        self.close()
        for path in sorted(self.place.glob("*.npy")):
            if path.stem not in self._facts:
                mapped = np.load(path, mmap_mode="r", allow_pickle=False)
                fact = {"dtype": mapped.dtype.str, "shape": list(mapped.shape), "sha256": sha256(mapped)}
                self._facts[path.stem] = fact
        return self._facts

    def finish(self, name: str) -> None:
        """Writes the manifest, with which the set is one."""
        manifest = {"format": FORMAT, "name": name, "arrays": self.facts(), "notes": self.notes}
        with open(self.place / MANIFEST, "x", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.place)


class Growing:
    """A `.npy` file whose number of rows is known at the end; NumPy leaves room in the header for it."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]):
        self.file = open(path, "xb")  # noqa: SIM115
        self.dtype, self.shape, self.n = dtype, shape, 0
        self.start = self._header()

    def append(self, part: np.ndarray) -> None:
        assert (part.dtype, part.shape[1:]) == (self.dtype, self.shape), (part.dtype, part.shape)
        self.file.write(np.ascontiguousarray(part).data)
        self.n += len(part)

    def close(self) -> None:
        self.file.seek(0)
        assert self._header() == self.start
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def _header(self) -> int:
        facts = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.n, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, facts)
        return self.file.tell()


def _sync(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(root: str | Path, name: str) -> Iterator[Writer]:
    """A set to write, which takes its place when the block ends, and leaves nothing if it fails.

    What a process that was killed left behind is begun anew. One process at a time writes a set.
    """
    place = folder(root, name)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = open(place.with_name(f".{name}.lock"), "a")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write below {str(root)!r}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is making the set {name!r} below {str(root)!r}; wait for it") from None
        part, old = place.with_name(f".{name}.part"), place.with_name(f".{name}.old")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            writer = Writer(part)
            with contextlib.closing(writer):
                yield writer
                writer.finish(name)
            shutil.rmtree(old, ignore_errors=True)
            if place.exists():
                os.replace(place, old)
            os.replace(part, place)
            _sync(place.parent)
        except OSError as error:
            raise UserError(f"cannot write {part}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
