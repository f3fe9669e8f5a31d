"""Sets of arrays on disk, made once by `python -m data.prepare` and only ever opened whole.

    ROOT/prepared/NAME/<array>.npy ... manifest.json

A set is written beside its place and put there by one rename, its manifest last, so whatever stands there is whole.
Arrays are mapped into memory: opening one costs nothing, and processes on one machine share its pages.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np
from absl import logging

from model.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
DONE = "done.json"  # in a set that is being made, how much of it is
TRIES = 100  # to take a lock that another process removes


@dataclass(frozen=True, eq=False)
class PreparedSet:
    name: str
    arrays: Mapping[str, np.ndarray]  # mapped, read only
    digest: str  # of every bit of them, hexadecimal
    notes: tuple[str, ...] = ()  # what was skipped or cut, in words


def folder(root: str | Path, name: str) -> Path:
    return Path(root).expanduser() / "prepared" / name


class SetFile(NamedTuple):
    """A file of a prepared set: ROOT/prepared/NAME/FILE."""

    root: str
    name: str
    file: str


def in_a_set(path: str) -> SetFile | None:
    """A path into a prepared set; None: it is none."""
    found = re.fullmatch(r"(?:(.*)/)?prepared/([^/]+)/([^/]+)", path)
    return SetFile(found[1] or ".", found[2], found[3]) if found else None


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
    return f"python -m data.prepare {name} --root={shlex.quote(str(root))}"


@functools.lru_cache(maxsize=32)
def _opened(root: str, name: str, place: str, written: int) -> PreparedSet:
    try:
        manifest = json.loads((Path(place) / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, where {FORMAT} is read")
        arrays = {key: _mapped(Path(place, f"{key}.npy"), fact) for key, fact in manifest["arrays"].items()}
        if unknown := {path.stem for path in Path(place).glob("*.npy")} - arrays.keys():
            raise ValueError(f"{MANIFEST} does not name {', '.join(sorted(unknown))}")
        notes = tuple(map(str, manifest["notes"]))
        return PreparedSet(name, MappingProxyType(arrays), digest(manifest["arrays"]), notes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        said = f"the prepared set {name!r} below {root!r} is damaged ({why}); make it anew by:"
        raise Unprepared(said, root, name) from None


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

    def fill(self, of: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Opens `filled`, arrays of bytes to be written in any order, before anything else is written.

        Gives how much of the work is done already, as the last `note_done` has it of a process that was killed; `of`
        names the work, and all that it rests on.
        """
        self._of = of
        done = self._done()
        try:
            opened = {name: np.load(self._path(name), mmap_mode="r+") for name in shapes if done}
        except (OSError, ValueError, EOFError):
            opened = {}
        if {name: (array.dtype, array.shape) for name, array in opened.items()} != {
            name: (np.dtype(np.uint8), shape) for name, shape in shapes.items()
        }:
            done = 0
        for path in self.place.iterdir():
            if not done or (path.name != DONE and path.stem not in shapes):
                path.unlink()
        new = functools.partial(np.lib.format.open_memmap, mode="w+", dtype=np.uint8)
        self.filled = opened if done else {name: new(self._path(name), shape=shape) for name, shape in shapes.items()}
        for name in self.filled:
            _reserve(self._path(name))
        return done

    def note_done(self, n: int) -> None:
        """So much of the work need not be done again, even if the power fails."""
        for array in self.filled.values():
            array.flush()
        new = self.place / f"{DONE}.new"
        with open(new, "w", encoding="utf-8") as file:
            json.dump({"of": self._of, "done": n}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.place / DONE)
        _sync(self.place)

    def _done(self) -> int:
        try:
            found = json.loads((self.place / DONE).read_text(encoding="utf-8"))
            return int(found["done"]) if found["of"] == self._of else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

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
        (self.place / DONE).unlink(missing_ok=True)
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
        end = self._header()  # with the number of rows that there came to be
        assert end == self.start, (end, self.start)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def _header(self) -> int:
        facts = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.n, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, facts)
        return self.file.tell()


def _reserve(path: Path) -> None:
    """Takes the room of a whole file: a full disk is an error here, and kills a process that writes to mapped pages."""
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _sync(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def folders(path: Path) -> Iterator[None]:
    """A folder is there in the block; what had to be made for it, and is empty after it, is gone again."""
    made = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for one in made:
            with contextlib.suppress(OSError):  # not empty, or another process was faster
                one.rmdir()


def _locked(path: Path) -> IO:
    """The lock file, held by this process: the one that others find too, as a holder that fails removes it."""
    for _ in range(TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:
                lock = opened.enter_context(open(path, "a"))
                _hold(lock)
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    opened.pop_all()
                    return lock
        except FileNotFoundError:  # removed since, with or without its folder
            continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _hold(lock: IO) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        logging.warning(
            "%s: its file system has no locks; a second process that makes the set is not refused", lock.name
        )


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process at a time; a lock file that was made for it goes again where no set came to stand."""
    path = place.with_name(f".{place.name}.lock")
    with folders(path.parent):
        made = not path.exists()
        with _locked(path):
            try:
                yield
            finally:
                if made and not place.exists():
                    with contextlib.suppress(OSError):
                        path.unlink()  # while it is held; see _locked


@contextlib.contextmanager
def writing(root: str | Path, name: str) -> Iterator[Writer]:
    """A set to write, which takes its place when the block ends, and leaves nothing if it fails.

    What a process that was killed left behind is begun anew, less what it noted as done; of one that was interrupted
    that is kept too. One process at a time writes a set.
    """
    place = folder(root, name)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_alone(place))
        except BlockingIOError:
            raise UserError(f"another process is making the set {name!r} below {str(root)!r}; wait for it") from None
        except OSError as error:
            raise UserError(f"cannot write below {str(root)!r}: {error.strerror}") from None
        part, old = place.with_name(f".{name}.part"), place.with_name(f".{name}.old")
        if not (part / DONE).is_file():
            shutil.rmtree(part, ignore_errors=True)
        kept = False
        try:
            part.mkdir(exist_ok=True)
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
        except KeyboardInterrupt:
            kept = (part / DONE).is_file()
            raise
        finally:
            if not kept:
                shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
