"""Checkpoints of the whole run state: written in the background, proven good before they are read.

Orbax stores the arrays; around it stands what it leaves out. A step's folder is committed by `manifest.json`,
written last: the SHA-256 of every other file, the shape of every leaf, the score. A folder without one is an
unfinished save; a folder that does not match its own is damaged.

`steps`, `best_step` and `load` only read, so they may look into a run that is still going. `Checkpoints`
writes, and needs the folder to itself (see `train.workdir.open_workdir`).
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from model.errors import UserError
from train.workdir import sync_folder, write_text

State = Any  # a pytree of jax.Array
MANIFEST = "manifest.json"


def step_folder(directory: str | Path, step: int) -> Path:
    return Path(directory).absolute() / f"{step:08d}"


def steps(directory: str | Path) -> list[int]:
    """The committed steps, oldest first."""
    found = [path.parent.name for path in Path(directory).glob(f"*/{MANIFEST}")]
    return sorted(int(name) for name in found if name.isdigit())


def best_step(directory: str | Path) -> int | None:
    """The committed step with the highest score, the newest of equals; None where no step has one."""
    scores = []
    for step in steps(directory):
        try:
            score = read_manifest(step_folder(directory, step))["score"]
        except DamagedManifest:
            continue
        if score is not None and not math.isnan(score):
            scores.append((score, step))
    return max(scores)[1] if scores else None


def load(directory: str | Path, like: State, step: int) -> State:
    """The state of one committed step, on the shardings of `like`, a pytree of jax.ShapeDtypeStruct."""
    folder = step_folder(directory, step)

    def check() -> None:
        committed = steps(directory)
        if step not in committed:
            raise UserError(f"no checkpoint of step {step} in {directory}; there: {committed or 'none'}")
        if found := damage(folder):
            raise UserError(f"checkpoint {folder} is damaged: {found}")
        _check_fit(folder, like)

    _on_first_process(check)
    return _read(folder, like)


# The manifest


class DamagedManifest(Exception):
    """The manifest itself cannot be believed."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """What was recorded with a step: `step`, `score`, `extra`, `leaves` and `files`."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        content = json.loads(text)["content"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedManifest(f"{MANIFEST} is unreadable") from error
    if text != _manifest_text(content):
        raise DamagedManifest(f"{MANIFEST} does not match its own SHA-256")
    return content


def _write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Commits a step. Every file is on the disk before the manifest vouches for it."""
    content = content | {"files": _hash_files(folder, flush=True)}
    write_text(folder / MANIFEST, _manifest_text(content))
    sync_folder(folder.parent)


def _manifest_text(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"content": content, "sha256": digest}, indent=1) + "\n"


def _hash_files(folder: Path, flush: bool = False) -> dict[str, list[Any]]:
    """Size and SHA-256 of every file below the folder but the manifest."""

    def one(path: Path) -> list[Any]:
        with open(path, "rb") as file:
            if flush:
                os.fsync(file.fileno())
            return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]

    paths = sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)
    with ThreadPoolExecutor(4) as pool:
        return {path.relative_to(folder).as_posix(): h for path, h in zip(paths, pool.map(one, paths), strict=True)}


def damage(folder: Path) -> str | None:
    """The first file that is not as it was saved, and how; None for a good checkpoint."""
    try:
        saved, now = read_manifest(folder)["files"], _hash_files(folder)
    except DamagedManifest as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} is unreadable: {error.strerror}"
    for name in sorted(saved.keys() | now.keys()):
        if name not in now:
            return f"{name} is missing"
        if name not in saved:
            return f"{name} does not belong there"
        if now[name][0] != saved[name][0]:
            return f"{name} has {now[name][0]} bytes, saved were {saved[name][0]}"
        if now[name] != saved[name]:
            return f"{name} does not match its SHA-256"
    return None


# The arrays


def _flat(tree: State) -> dict[str, Any]:
    """Leaves by path. What has none (None, optax's EmptyState) comes back from `like` and is not stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state have the same path")
    return flat


def _signature(flat: dict[str, Any]) -> dict[str, str]:
    return {path: f"{x.dtype}[{','.join(map(str, x.shape))}]" for path, x in flat.items()}


def _stored(flat: dict[str, Any]) -> dict[str, Any]:
    """All but empty arrays, which Orbax refuses."""
    return {path: x for path, x in flat.items() if math.prod(x.shape)}


def _check_fit(folder: Path, like: State) -> None:
    saved, asked = read_manifest(folder)["leaves"], _signature(_flat(like))
    for path in [*asked, *saved]:
        there, here = saved.get(path, "absent"), asked.get(path, "absent")
        if there != here:
            raise UserError(f"checkpoint {folder} does not fit: {path} is {there} there, {here} in this run")


def _read(folder: Path, like: State) -> State:
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    flat = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one_device)
        for path, x in _flat(like).items()
    }
    stored = _stored(flat)
    args = ocp.args.PyTreeRestore(stored, restore_args=ocp.checkpoint_utils.construct_restore_args(stored))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(folder, args=args)
    empty = {path: jnp.zeros(x.shape, x.dtype, device=x.sharding) for path, x in flat.items() if path not in stored}
    return jax.tree.unflatten(jax.tree.structure(like), [(arrays | empty)[path] for path in flat])


def _on_first_process(compute: Callable[[], Any]) -> Any:
    """Computes on the first process, which reads the files for all; each gets the value or the error."""
    if jax.process_count() == 1:
        return compute()
    text = np.zeros(4096, np.uint8)
    if jax.process_index() == 0:
        try:
            answer = {"value": compute()}
        except UserError as error:
            answer = {"error": str(error)[:600]}
        encoded = json.dumps(answer).encode()
        text[: len(encoded)] = list(encoded)
    answer = json.loads(bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b"\0"))
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["value"]


class Checkpoints:
    """Saves a run's steps in the background; keeps the newest `keep` and the best.

    What goes wrong in the background is raised by the next `save`, `wait`, `restore` or `close`. `reports`
    lists, a line each, what was found unfinished or damaged.
    """

    def __init__(self, directory: str | Path, keep: int):
        if keep < 1:
            raise UserError(f"keep={keep} checkpoints; keep at least 1")
        self.directory = Path(directory).absolute()
        self.reports: list[str] = []
        self._keep = keep
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()

    def steps(self) -> list[int]:
        return steps(self.directory)

    def best_step(self) -> int | None:
        return best_step(self.directory)

    def save(self, step: int, state: State, score: float | None = None, extra: dict | None = None) -> None:
        """Begins a save; returns once the state is copied, so that the caller may donate it.

        Higher scores are better. A step that is already committed is left as it is.
        """
        self.wait()
        if _on_first_process(lambda: step in self.steps()):
            return
        flat = _flat(state)
        score = None if score is None else float(score)
        content = {"step": int(step), "score": score, "extra": extra or {}, "leaves": _signature(flat)}
        content = json.loads(json.dumps(content))  # ours, should the caller go on filling `extra`
        folder = step_folder(self.directory, step)
        try:
            self._orbax.save(folder, args=ocp.args.PyTreeSave(_stored(flat)))
        except (OSError, ValueError) as error:
            raise _failure(folder, error) from error
        self._thread = threading.Thread(target=self._commit, args=(folder, content), name="checkpoint")
        self._thread.start()

    def _commit(self, folder: Path, content: dict[str, Any]) -> None:
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                _write_manifest(folder, content)
                self._prune()
        except Exception as error:
            self._error = _failure(folder, error)
            self._remove_unfinished()  # a full disk needs the room

    def wait(self) -> None:
        """Returns once the last save is committed, or raises why it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if jax.process_count() > 1:  # one process may have failed alone; none may go on without it
            failed = multihost_utils.process_allgather(np.int32(error is not None))
            if error is None and failed.any():
                error = UserError(f"process {failed.argmax()} could not write to {self.directory}")
        if error is not None:
            raise error

    def restore(self, like: State, step: int | None = None) -> tuple[int, State] | None:
        """The newest good step, or exactly the one asked for, and its state on the shardings of `like`.

        Newer damaged ones are put aside. None where there is no checkpoint yet.
        """
        self.wait()
        if step is not None:
            return step, load(self.directory, like, step)
        newest = _on_first_process(lambda: self._newest_good(like))
        return None if newest is None else (newest, _read(step_folder(self.directory, newest), like))

    def _newest_good(self, like: State) -> int | None:
        damaged: dict[Path, str] = {}
        for step in reversed(self.steps()):
            folder = step_folder(self.directory, step)
            if found := damage(folder):
                damaged[folder] = found
                continue
            _check_fit(folder, like)
            for bad, what in damaged.items():
                self._put_aside(bad, what)
            return step
        if damaged:  # left in place, so that the next start says so too instead of beginning anew
            found = "; ".join(f"{folder.name}: {what}" for folder, what in damaged.items())
            raise UserError(f"every checkpoint in {self.directory} is damaged ({found}); remove them to start anew")
        return None

    def _put_aside(self, folder: Path, what: str) -> None:
        """Out of the way of retention and of the next save of this step, but kept for a look."""
        taken = len(list(self.directory.glob(f"{folder.name}.damaged*")))
        aside = folder.with_name(f"{folder.name}.damaged{taken or ''}")
        folder.rename(aside)
        self._report(f"checkpoint {folder.name} is damaged: {what}; put aside as {aside.name}")

    def _remove_unfinished(self) -> None:
        if jax.process_index() != 0:
            return
        for path in sorted(self.directory.iterdir()):
            ours = re.fullmatch(r"\d+(\.orbax-checkpoint-tmp.*)?", path.name)
            if ours and not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)
                self._report(f"checkpoint {path.name} has no {MANIFEST}: an unfinished save, removed")

    def _prune(self) -> None:
        """Runs after a commit, so the newest step it sees is whole."""
        for step in set(self.steps()[: -self._keep]) - {self.best_step()}:
            folder = step_folder(self.directory, step)
            (folder / MANIFEST).unlink()  # first, so that a half removed step is no longer a committed one
            shutil.rmtree(folder)

    def _report(self, line: str) -> None:
        logging.warning("%s", line)
        self.reports.append(line)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: Any) -> None:
        if exc_type is None:
            return self.close()
        # An error is on its way: finish the save, but neither hide that error nor wait for other processes.
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            logging.error("%s", self._error)


def _failure(folder: Path, error: Exception) -> UserError:
    # The layers below each put their own words in front; the cause ("No space left on device") comes last.
    text = re.sub(r"\[[^\[\]]*\]", "", (str(error).splitlines() or [""])[0]).strip()
    reason = ": ".join(text.split(": ")[-2:]) or type(error).__name__
    failure = UserError(f"checkpoint {folder} could not be written: {reason}")
    failure.__cause__ = error
    return failure
