"""Runs as a few files of bounded size, and back: what each run needs to go on somewhere else, bit for bit.

A pack is a folder of `part-0000`, `part-0001`, ..., which put together are a gzipped tar archive, and `pack.json`,
which has the size and SHA-256 of every part and of every file in them. Checkpoints are compressed as they are saved: of
one of 3.1 MB zlib at its fastest takes a tenth off, and lzma a hundredth more in ten times as long.
"""

import gzip
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from experiments.running import folders
from experiments.running.runs import RunSpec
from model.errors import UserError
from train import checkpoint, goodput, manifest
from train import config as configs
from train.workdir import sync_folder, write_text

INDEX = "pack.json"
# Of a run's files those that decide how it goes on, or what its row says.
SMALL = ("config.json", "run.json", "data.json", "changes.json", "init.json", "metrics.jsonl", "result.json")
SMALL += ("failed.json", "restarts.json", goodput.FILE)
CHUNK = 2**20


def pack(folder: Path, out: Path, size: int, all_checkpoints: bool = False) -> dict[str, Any]:
    """Packs the run in a folder, or the runs in the folders in it, into files of at most `size` bytes; the index.

    Runs that are over go without their checkpoints, unless asked for with them, or others have yet to begin with them.
    """
    runs = find_runs(folder)
    begun = {run.parent / source_name(run) for run in runs if not over(run)}
    chosen = {
        path.relative_to(folder).as_posix(): path
        for run in runs
        for path in files(run, all_checkpoints or run in begun)
    }
    with _made(out) as made:
        parts, found = _Parts(made, size), {}
        with (
            gzip.GzipFile(fileobj=parts, mode="wb", compresslevel=1, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, path in sorted(chosen.items()):
                with path.open("rb") as file:
                    info = tarfile.TarInfo(name)
                    info.size = os.fstat(file.fileno()).st_size
                    hashed = _Hashed(file)
                    archive.addfile(info, hashed)
                    found[name] = [info.size, hashed.digest.hexdigest()]
        parts.close()
        content = {"runs": len(runs), "parts": parts.made, "files": found}
        text = json.dumps(content | {"sha256": _seal(content)}, indent=1) + "\n"
        if len(text) > size:
            raise UserError(
                f"the list of {len(found)} files has {len(text)} bytes and is to fit in {size}; allow larger files"
            )
        write_text(made / INDEX, text)
    return content


def find_runs(folder: Path) -> list[Path]:
    """The folder, if it is a run's, or those of runs in it, none of them being trained now."""
    marks = ("config.json", "run.json")
    found = [path for path in (folder, *sorted(folder.glob("*/"))) if any((path / mark).is_file() for mark in marks)]
    if not found:
        raise UserError(f"no run in {folder}; give the folder of a run, or the --out of a sweep or a table")
    for path in found:
        if folders.in_use(path):
            raise UserError(f"{path} is being trained; stop it first: SIGTERM saves and ends it")
    return found


def over(run: Path) -> bool:
    """Whether a run has come to its end; one that diverged has not."""
    result = folders.read_json(run / "result.json", status=str)
    return result is not None and result["status"] != "nonfinite"


def source_name(run: Path) -> str:
    """The folder, beside a run's, of the run that it begins with; empty where a sweep asked for none."""
    asked = configs.tuples(folders.read_json(run / "run.json") or {})
    return RunSpec("", asked.get("overrides", {}), {}, asked.get("source")).source_name


def files(run: Path, with_checkpoints: bool) -> list[Path]:
    """Those of a run's files that are packed: of its checkpoints the newest whole one, and the best."""
    small = [run / name for name in SMALL if (run / name).is_file()]
    if over(run) and not with_checkpoints:
        return small
    directory, damaged = run / "checkpoints", {}
    for step in reversed(checkpoint.steps(directory)):
        damaged[step] = manifest.damage(manifest.step_folder(directory, step))
        if damaged[step] is None:
            break
    if damaged and None not in damaged.values():
        raise UserError(f"every checkpoint in {directory} is damaged; step {min(damaged)}: {damaged[min(damaged)]}")
    best = checkpoint.best_step(directory)
    if best is not None and best not in damaged and (told := manifest.damage(manifest.step_folder(directory, best))):
        raise UserError(f"checkpoint {manifest.step_folder(directory, best)}, the best one, is damaged: {told}")
    whole = {step for step, told in damaged.items() if told is None} | ({best} - {None} - damaged.keys())
    saved = [path for step in sorted(whole) for path in (directory / f"{step:08d}").rglob("*") if path.is_file()]
    return small + saved


def unpack(source: Path, out: Path) -> dict[str, Any]:
    """Puts the runs of a pack into a new folder, all of it or nothing; the index."""
    index = read_index(source)
    for part in index["parts"]:
        _check_part(source / part["name"], part)
    with _made(out) as made:
        left = dict(index["files"])
        try:
            stream = _Joined([source / part["name"] for part in index["parts"]])
            with gzip.GzipFile(fileobj=stream) as zipped, tarfile.open(fileobj=zipped, mode="r|") as archive:
                for info in archive:
                    if info.name not in left or not info.isreg() or info.size != left[info.name][0]:
                        raise UserError(f"{source} holds {info.name!r}, which is not in its {INDEX}")
                    _extract(archive.extractfile(info), made / info.name, left.pop(info.name)[1])
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{source} is damaged: {error}") from error
        if left:
            raise UserError(f"{source} is damaged: it lacks {min(left)}")
    return index


def read_index(source: Path) -> dict[str, Any]:
    """What is in a pack, every name in it being one of a file below the folder it is unpacked to."""
    path = source / INDEX
    if not path.is_file():
        raise UserError(f"no {INDEX} in {source}; give the folder that a pack was written to")
    content = folders.read_json(path, runs=int, parts=list, files=dict, sha256=str)
    told = content.pop("sha256")
    if told != _seal(content):
        raise UserError(f"{path} is damaged: it does not match its own SHA-256")
    parts, digests = content["parts"], content["files"].values()
    whole = all(isinstance(part, dict) and {"name", "bytes", "sha256"} <= part.keys() for part in parts)
    if not whole or not all(isinstance(digest, list) and len(digest) == 2 for digest in digests):
        raise UserError(f"{path} is damaged: it does not say what its parts and files are")
    for name in (*content["files"], *(str(part["name"]) for part in parts)):
        plain = PurePosixPath(name)
        if plain.is_absolute() or {"..", "."} & {*plain.parts, name} or plain.as_posix() != name or "\0" in name:
            raise UserError(f"{path} names {name!r}, which is no file below the folder; nothing was unpacked")
    return content


def _check_part(path: Path, part: dict[str, Any]) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; all parts that {INDEX} names are needed")
    with path.open("rb") as file:
        size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    if size != part["bytes"]:
        raise UserError(f"{path} is damaged: it has {size} bytes, packed were {part['bytes']}")
    if digest != part["sha256"]:
        raise UserError(f"{path} is damaged: it does not match its SHA-256")


def _extract(file: BinaryIO, path: Path, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as written:
        hashed = _Hashed(file)
        shutil.copyfileobj(hashed, written, CHUNK)
        written.flush()
        os.fsync(written.fileno())
    if hashed.digest.hexdigest() != digest:
        raise UserError(f"{path.name} does not match its SHA-256 in {INDEX}")


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _made(out: Path) -> Iterator[Path]:
    """A new folder, under its name once the block has ended well; after an error there is nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already; give an --out that is not")
    folders.make(out.parent)
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:  # which names the folder that was not asked for
        raise UserError(f"cannot make the folder {out}: {error.strerror}; give another --out") from error
    try:
        yield made
        made.chmod(0o755)
        for path in (*made.rglob("*/"), made):
            sync_folder(path)
        os.rename(made, out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO):
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


class _Parts:
    """A stream written into files of at most so many bytes."""

    def __init__(self, folder: Path, size: int):
        self._folder, self._size = folder, size
        self._file: BinaryIO | None = None
        self.made: list[dict[str, Any]] = []

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            if self._file is None or self._left == 0:
                self._begin()
            piece, rest = rest[: self._left], rest[self._left :]
            self._file.write(piece)
            self._digest.update(piece)
            self._left -= len(piece)
        return len(data)

    def flush(self) -> None:
        """What gzip asks for; parts are flushed as they end."""

    def _begin(self) -> None:
        self.close()
        self._name, self._left, self._digest = f"part-{len(self.made):04d}", self._size, hashlib.sha256()
        self._file = (self._folder / self._name).open("xb")

    def close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        written = {"name": self._name, "bytes": self._size - self._left, "sha256": self._digest.hexdigest()}
        self._file = None
        self.made.append(written)


class _Joined:
    """Files read one after another, as one stream."""

    def __init__(self, paths: list[Path]):
        self._paths, self._file = iter(paths), None

    def read(self, size: int = CHUNK) -> bytes:
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return b""
                self._file = path.open("rb")
            if data := self._file.read(size):
                return data
            self._file.close()
            self._file = None
