"""What vouches for the files of a step: signatures and the manifest.

Each host signs the files it wrote itself: `signed.3.json` holds their sizes and SHA-256. The first host then writes
`manifest.json`, which holds the same for all that nobody else signed, the signatures among it, and what was recorded
with the step. A folder with a manifest is committed; one that does not match it is damaged.

Nothing here knows of JAX or Orbax: a folder goes in, files are read or written.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train.workdir import sync_folder, write_text

MANIFEST = "manifest.json"

Digest = list[Any]  # [size in bytes, SHA-256]


class DamagedManifest(Exception):
    """The manifest, or a signature, cannot be believed; says why."""


def step_folder(directory: str | Path, step: int) -> Path:
    return Path(directory).absolute() / f"{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder is named after; None for a name that we never give."""
    if not re.fullmatch("[0-9]{8,}", folder.name) or f"{int(folder.name):08d}" != folder.name:
        return None
    return int(folder.name)


def steps(directory: str | Path) -> list[int]:
    """The committed steps, oldest first."""
    found = [step_of(path.parent) for path in Path(directory).glob(f"*/{MANIFEST}")]
    return sorted(step for step in found if step is not None)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What was recorded with a step: `step`, `score`, `extra`, `leaves`, `hosts` and `files`."""
    content = _read_sealed(folder / MANIFEST)
    _expect(content, MANIFEST, step=int, score=(int, float, type(None)), extra=dict, leaves=dict, hosts=int, files=dict)
    if content["step"] != step_of(folder):
        raise DamagedManifest(f"{MANIFEST} is that of step {content['step']}")
    return content


def sign(folder: Path, host: int, record: dict[str, Any] | None = None) -> None:
    """Signs for the files that this host wrote, once they are on the disk; with them for what the first recorded."""
    own = [name for name in _files(folder) if _writer(name) == host]
    content = {"files": _digests(folder, own, flush=True)} | ({} if record is None else {"record": record})
    _sync_folders(folder, own)
    write_text(folder / signature(host), _sealed(content))


def record_of(folder: Path) -> dict[str, Any] | None:
    """What is to be recorded with a step that every host has signed; None while one has not."""
    try:
        content = _read_sealed(folder / signature(0))
        _expect(content, signature(0), record=dict)
        _expect(content["record"], signature(0), step=int, hosts=int)
    except DamagedManifest:
        return None
    return None if unsigned(folder, content["record"]) else content["record"]


def unsigned(folder: Path, record: dict[str, Any]) -> list[int]:
    """The hosts whose signature is still missing."""
    return [host for host in range(record["hosts"]) if not (folder / signature(host)).exists()]


def seal(folder: Path, record: dict[str, Any]) -> None:
    """Writes the manifest of a step that every host has signed. Every file is on the disk before it is vouched for."""
    (folder / f"{MANIFEST}.tmp").unlink(missing_ok=True)  # of a seal that was killed; no file of the step
    signed = {
        name for host in range(record["hosts"]) for name in _read_sealed(folder / signature(host)).get("files", {})
    }
    rest = [name for name in _files(folder) if name not in signed]
    digests = _digests(folder, rest, flush=True)
    _sync_folders(folder, [*signed, *rest])
    write_text(folder / MANIFEST, _sealed(record | {"files": digests}))


def signature(host: int) -> str:
    return f"signed.{host}.json"


def damage(folder: Path, below: str = "", share: tuple[int, int] = (0, 1)) -> str | None:
    """The first file that is not as it was saved, and how; None where all is well.

    `below` looks only at the files of one subfolder, besides the signatures. `share` (i, n) hashes only the i-th of n
    shares of the bytes, so that hosts can divide the work.
    """
    try:
        saved = _vouched_for(folder)
    except DamagedManifest as error:
        return str(error)
    there = set(_files(folder))
    names = [name for name in sorted(saved.keys() | there) if "/" not in name or name.startswith(below)]
    for name in names:
        if name not in there:
            return f"{name} is missing"
        if name not in saved:
            return f"{name} does not belong there"
    try:
        for name in names:
            if (size := (folder / name).stat().st_size) != saved[name][0]:
                return f"{name} has {size} bytes, saved were {saved[name][0]}"
        own = sorted(names, key=lambda name: -saved[name][0])[share[0] :: share[1]]
        now = _digests(folder, own)
    except OSError as error:
        return f"{error.filename} is unreadable: {error.strerror}"
    return next((f"{name} does not match its SHA-256" for name in sorted(own) if now[name] != saved[name]), None)


def fingerprint(folder: Path, below: str) -> str:
    """SHA-256 of the names and hashes of the files of one subfolder, as the step vouches for them."""
    own = {name: digest for name, digest in sorted(_vouched_for(folder).items()) if name.startswith(below)}
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()


def _vouched_for(folder: Path) -> dict[str, Digest]:
    """Every file that belongs to a step, as the manifest and the signatures have it."""
    manifest = read_manifest(folder)
    files = dict(manifest["files"])
    for host in range(manifest["hosts"]):
        name = signature(host)
        signed = _read_sealed(folder / name)
        _expect(signed, name, files=dict)
        files |= signed["files"]
    for name, digest in files.items():
        if not (isinstance(digest, list) and len(digest) == 2 and isinstance(digest[0], int)):
            raise DamagedManifest(f"{MANIFEST} does not say what {name} holds")
    return files


def _sealed(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1) + "\n"


def _read_sealed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DamagedManifest(f"{path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise DamagedManifest(f"{path.name} is unreadable") from error
    try:
        content = json.loads(text)["content"]
        whole = text == _sealed(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedManifest(f"{path.name} is unreadable") from error
    if not whole:
        raise DamagedManifest(f"{path.name} does not match its own SHA-256")
    if not isinstance(content, dict):
        raise DamagedManifest(f"{path.name} holds no record")
    return content


def _expect(content: dict[str, Any], name: str, **kinds: type | tuple[type, ...]) -> None:
    for key, kind in kinds.items():
        if key not in content:
            raise DamagedManifest(f"{name} lacks {key!r}: not written by this version")
        if not isinstance(content[key], kind) or isinstance(content[key], bool):
            raise DamagedManifest(f"{name} has {key!r} = {str(content[key])[:40]}")


def _files(folder: Path) -> list[str]:
    """Every file below a folder but the manifest, by its path from there."""
    below = [Path(root, name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names]
    return sorted(name for name in below if name != MANIFEST)


def _writer(name: str) -> int:
    """Whose file it is, by its name: Orbax's `ocdbt.process_3/...` and `array_metadatas/process_3`, `signed.3.json`.

    What bears no host's number is the first one's.
    """
    found = re.search(r"(?:^|[./])process_([0-9]+)(?:/|$)|^signed\.([0-9]+)\.", name)
    return int(found[1] or found[2]) if found else 0


def _digests(folder: Path, names: Iterable[str], flush: bool = False) -> dict[str, Digest]:
    """Size and SHA-256 of files, several at a time."""

    def one(name: str) -> Digest:
        with open(folder / name, "rb") as file:
            if flush:
                os.fsync(file.fileno())
            return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]

    names = list(names)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Makes the names of files survive a power cut: every folder between them and the step's own."""
    for path in {parent for name in names for parent in Path(name).parents}:
        sync_folder(folder / path)
