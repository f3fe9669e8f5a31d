"""Checkpoints of the whole run state: written in the background, proven good before they are read.

Each host writes its own shards into a folder that is not yet named as a step, hashes them and signs for them; once all
have signed, the first commits the step (see `train.manifest`) and gives the folder its name. A kill before the last
signature loses the step; a kill after it does not, for the next start commits it.

Nothing is deleted but the run's own old steps and saves that were never finished. What is damaged, or lies where a
step should and is none, is put aside under another name and reported.

`steps`, `best_step`, `load` and `load_params` only read, so they may look into a run that is still going.
`Checkpoints` writes, and needs the folder to itself (see `train.workdir.open_workdir`).
"""

import functools
import itertools
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging

from model.errors import UserError, closest
from train import arrays, hosts, manifest
from train.arrays import State
from train.manifest import MANIFEST, DamagedManifest, read_manifest, step_folder, step_of, steps
from train.workdir import sync_folder

UNFINISHED = ".orbax-checkpoint-tmp"  # ends the name of a step on its way in; Orbax's own tools know it too
PRUNED = ".pruned"  # of one on its way out


def best_step(directory: str | Path) -> int | None:
    """The committed step with the highest score, the newest of equals; None where no step has one."""
    return _best(directory)[1]


def _best(directory: str | Path) -> tuple[float, int | None]:
    scores = []
    for step in steps(directory):
        try:
            score = read_manifest(step_folder(directory, step))["score"]
        except DamagedManifest:
            continue
        if score is not None and not math.isnan(score):
            scores.append((score, step))
    return max(scores, default=(-math.inf, None))


def choose_step(checkpoints: Path, asked: str) -> int:
    """The committed step that is asked for."""
    there = steps(checkpoints)
    if not there:
        raise UserError(f"no checkpoint in {checkpoints}; train until the first one is saved")
    if asked == "latest":
        return there[-1]
    if asked == "best":
        best = best_step(checkpoints)
        if best is None:
            raise UserError(f"no checkpoint in {checkpoints} has a validation score; closest: latest")
        return best
    if asked.isdecimal() and int(asked) in there:
        return int(asked)
    allowed = ["best", "latest", *map(str, there)]
    if asked.isdecimal():
        near = f"; closest: {min(there, key=lambda step: abs(step - int(asked)))}"
    else:
        near = closest(asked, allowed)
    raise UserError(f"no step {asked!r} in {checkpoints}; choose from {', '.join(allowed)}{near}")


def load(directory: str | Path, like: State, step: int) -> State:
    """The state of one committed step, on the shardings of `like`, a pytree of jax.ShapeDtypeStruct."""
    return _load(directory, like, step)


def load_params(directory: str | Path, like: State, step: int) -> State:
    """The parameters of one committed step: what `load` gives under `params`, of which `like` is the abstract tree.

    Only their files are read and hashed, a third of the bytes where an optimizer keeps two moments.
    """
    return _load(directory, like, step, f"{arrays.PARAMS}/")


def load_some(directory: str | Path, like: State, step: int) -> State:
    """Some of the parameters of one committed step, by their paths."""
    return _load(directory, like, step, f"{arrays.PARAMS}/", whole=False)


def parameters(directory: str | Path, step: int) -> tuple[dict[str, str], str]:
    """What the parameters of one committed step are, by path, and a hash of their files; nothing of these is read."""
    folder, prefix = step_folder(directory, step), f"{arrays.PARAMS}/"
    try:
        leaves, digest = read_manifest(folder)["leaves"], manifest.fingerprint(folder, prefix)
    except DamagedManifest as error:
        raise UserError(f"checkpoint {folder} is damaged: {error}") from None
    return {path.removeprefix(prefix): x for path, x in leaves.items() if path.startswith(prefix)}, digest


def _load(directory: str | Path, like: State, step: int, prefix: str = "", whole: bool = True) -> State:
    folder = step_folder(directory, step)

    def find() -> None:
        if step not in (committed := steps(directory)):
            raise UserError(f"no checkpoint of step {step} in {directory}; there: {committed or 'none'}")

    hosts.agree(find)
    if found := _damage(folder, prefix):
        raise UserError(f"checkpoint {folder} is damaged: {found}")
    if whole:
        hosts.agree(lambda: _check_fit(folder, like, prefix))
    return arrays.read_arrays(folder, like, prefix, whole)


def _damage(folder: Path, below: str = "") -> str | None:
    """What is wrong with a step, every host having read its share of the files."""
    host, n = jax.process_index(), jax.process_count()
    if blind := _any_process(None if folder.is_dir() else f"process {host} of {n} does not see {folder}"):
        raise UserError(blind)
    return _any_process(manifest.damage(folder, below, (host, n)))


def _check_fit(folder: Path, like: State, prefix: str = "") -> None:
    saved, asked = read_manifest(folder)["leaves"], arrays.describe(arrays.flatten(like, prefix))
    for path in [*asked, *(path for path in saved if path.startswith(prefix))]:
        there, here = saved.get(path, "absent"), asked.get(path, "absent")
        if there != here:
            raise UserError(f"checkpoint {folder} does not fit: {path} is {there} there, {here} in this run")


class Checkpoints:
    """Saves a run's steps in the background; keeps the newest `keep` and the best.

    What goes wrong in the background is raised by the next `check`, `save`, `wait`, `restore` or `close`. `reports`
    lists, a line each, what was found unfinished or damaged. Every process of a run calls every method.
    """

    def __init__(self, directory: str | Path, keep: int):
        if keep < 1:
            raise UserError(f"keep={keep} checkpoints; keep at least 1")
        self.directory = Path(directory).absolute()
        self.reports: list[str] = []
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        hosts.agree(self._tidy)

    def steps(self) -> list[int]:
        return steps(self.directory)

    def best_step(self) -> int | None:
        return best_step(self.directory)

    def good_best(self) -> int | None:
        """The best step whose parameters are as they were saved; better ones that are damaged are put aside."""
        while (step := hosts.agree(self.best_step)) is not None:
            folder = step_folder(self.directory, step)
            if (found := _damage(folder, f"{arrays.PARAMS}/")) is None:
                break
            hosts.agree(functools.partial(self._put_aside, folder, "damaged", f"is damaged: {found}"))
        return step

    def best_score(self) -> float:
        """The score of the best step, minus infinity where no step has one."""
        return hosts.agree(lambda: _best(self.directory)[0])

    def save(self, step: int, state: State, score: float | None = None, extra: dict | None = None) -> None:
        """Begins a save; returns once the state is copied, so that the caller may donate it.

        Higher scores are better. A step that is already committed is left as it is.
        """
        self.wait()
        flat, folder = arrays.flatten(state), step_folder(self.directory, step)
        if not hosts.agree(lambda: self._open(folder, flat)):
            return
        record = {
            "step": int(step),
            "score": None if score is None else float(score),
            "extra": extra or {},
            "leaves": arrays.describe(flat),
            "hosts": jax.process_count(),
        }
        record = json.loads(json.dumps(record))  # ours, should the caller go on filling `extra`
        try:
            writing = arrays.write(_unfinished(folder), flat)
        except (OSError, ValueError) as error:
            writing = [_Failed(error)]  # raised by `_commit`, so that all hosts still meet there
        self._thread = threading.Thread(
            target=self._commit,
            args=(folder, record, writing, _barrier()),
            name="checkpoint",
            daemon=jax.process_count() > 1,  # waiting for a lost host must not keep this one
        )
        self._thread.start()

    def _open(self, folder: Path, flat: dict[str, Any]) -> bool:
        """Makes room for a save; whether one is needed."""
        if (folder / MANIFEST).exists():
            return False
        try:
            if folder.exists():
                self._put_aside(folder, "unsigned", f"has no {MANIFEST}")
            if _unfinished(folder).exists():
                shutil.rmtree(_unfinished(folder))
            arrays.open_folder(_unfinished(folder), flat)
        except OSError as error:
            raise _failure(folder, error) from error
        return True

    def _commit(self, folder: Path, record: dict[str, Any], writing: list[Any], meet: Callable[[], None]) -> None:
        first, unfinished = jax.process_index() == 0, _unfinished(folder)
        try:
            try:
                arrays.wait(writing)
                manifest.sign(unfinished, jax.process_index(), record if first else None)
            finally:
                meet()  # a host that could not sign comes too, so that none waits for it
            if first:
                if missing := manifest.unsigned(unfinished, record):
                    raise OSError(f"process {missing[0]} of {record['hosts']} has not signed")
                _complete(folder, record)
                self._prune()
        except Exception as error:
            self._error = _failure(folder, error)
            if jax.process_count() > 1:
                logging.error("%s", self._error)
            if first and manifest.record_of(unfinished) is None:
                shutil.rmtree(unfinished, ignore_errors=True)  # a full disk needs the room

    def check(self) -> None:
        """Raises why the save in the background has failed, as soon as it has.

        With several processes that is logged at once, and raised where they next wait for each other.
        """
        if jax.process_count() == 1 and self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Returns once the last save is committed, or raises why it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        # One process may have failed alone; none may go on without it.
        said = _any_process(None if error is None else str(error))
        if said is not None:
            raise error or UserError(said)

    def restore(self, like: State) -> tuple[int, State] | None:
        """The newest good step, and its state on the shardings of `like`.

        Newer damaged ones are put aside. None where there is no checkpoint yet.
        """
        self.wait()
        damaged: dict[Path, str] = {}
        for step in reversed(hosts.agree(self.steps)):
            folder = step_folder(self.directory, step)
            if found := _damage(folder):
                damaged[folder] = found
                continue
            hosts.agree(functools.partial(self._settle_on, folder, like, damaged))
            return step, arrays.read_arrays(folder, like)
        if damaged:  # left in place, so that the next start says so too instead of beginning anew
            found = "; ".join(f"{folder.name}: {what}" for folder, what in damaged.items())
            raise UserError(f"every checkpoint in {self.directory} is damaged ({found}); remove them to start anew")
        return None

    def _settle_on(self, folder: Path, like: State, damaged: dict[Path, str]) -> None:
        _check_fit(folder, like)
        for newer, what in damaged.items():
            self._put_aside(newer, "damaged", f"is damaged: {what}")

    def _put_aside(self, folder: Path, label: str, why: str) -> None:
        """Out of the way of retention, of readers and of the next save of this step, but kept for a look."""
        names = (f"{folder.name}.{label}{number or ''}" for number in itertools.count())
        aside = next(path for path in map(folder.with_name, names) if not path.exists())
        folder.rename(aside)
        self._report(f"checkpoint {folder.name} {why}; put aside as {aside.name}")

    def _tidy(self) -> None:
        """Ends what an earlier process began: commits what all its hosts have signed, removes what they have not."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not os.access(self.directory, os.W_OK):
            raise UserError(f"cannot write checkpoints to {self.directory}: it is read-only")
        for path in sorted(path for path in self.directory.iterdir() if path.is_dir()):
            if re.fullmatch(f"[0-9]+{re.escape(UNFINISHED)}.*", path.name):
                self._finish(path)
            elif step_of(path) is not None and not (path / MANIFEST).exists():
                self._put_aside(path, "unsigned", f"has no {MANIFEST}")
            elif step_of(path) is None and path.name.isdigit():
                self._report(f"{path} is ignored: no step is named like this")
        self._remove_pruned()

    def _finish(self, unfinished: Path) -> None:
        record, folder = manifest.record_of(unfinished), unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
        if record is None or record["step"] != step_of(folder) or folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            self._report(f"checkpoint {unfinished.name} is an unfinished save: removed")
            return
        try:
            _complete(folder, record)
            self._report(f"checkpoint {folder.name} was signed by every host but not yet committed: now it is")
        except Exception as error:
            self._report(str(_failure(folder, error)))

    def _prune(self) -> None:
        """Takes old steps out. Runs after a commit, so the newest step it sees is whole."""
        try:
            for step in set(self.steps()[: -self._keep]) - {self.best_step()}:
                folder = step_folder(self.directory, step)
                try:
                    read_manifest(folder)
                except DamagedManifest as error:
                    self._put_aside(folder, "damaged", f"is damaged: {error}")
                else:
                    folder.rename(folder.with_name(folder.name + PRUNED))  # whole or gone, for whoever reads
            self._remove_pruned()
        except OSError as error:
            logging.warning("old checkpoints in %s could not be removed: %s", self.directory, error)

    def _remove_pruned(self) -> None:
        for folder in self.directory.glob(f"*{PRUNED}"):
            try:
                shutil.rmtree(folder)
            except OSError as error:  # as over NFS, while someone reads there
                logging.warning("%s could not be removed: %s; the next save tries again", folder, error.strerror)

    def _report(self, line: str) -> None:
        logging.warning("%s", line)
        self.reports.append(line)

    def close(self) -> None:
        self.wait()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: Any) -> None:
        if exc_type is None:
            return self.close()
        # An error is on its way: finish the save, but neither hide that error nor wait long for other processes.
        if self._thread is not None:
            self._thread.join(None if jax.process_count() == 1 else 10)
        if self._error is not None:
            logging.error("%s", self._error)


class _Failed:
    """In the place of a file being written: what prevented it."""

    def __init__(self, error: Exception):
        self._error = error

    def result(self) -> None:
        raise self._error


def _unfinished(folder: Path) -> Path:
    return folder.with_name(folder.name + UNFINISHED)


def _complete(folder: Path, record: dict[str, Any]) -> None:
    """Commits a step that every host has signed: index, manifest, name, in this order."""
    unfinished = _unfinished(folder)
    if not (unfinished / MANIFEST).exists():
        arrays.merge(unfinished)
        manifest.seal(unfinished, record)
    os.rename(unfinished, folder)
    sync_folder(folder.parent)


def _failure(folder: Path, error: Exception) -> UserError:
    # The layers below each put their own words in front; the cause ("No space left on device") comes last.
    text = re.sub(r"\[[^\[\]]*\]", "", (str(error).splitlines() or [""])[0]).strip()
    reason = ": ".join(text.split(": ")[-2:]) or type(error).__name__
    failure = UserError(f"checkpoint {folder} could not be written: {reason}")
    failure.__cause__ = error
    return failure


_saves = itertools.count()


def _barrier() -> Callable[[], None]:
    """Returns once every process has called it, in the background too."""
    topic = f"checkpoint {next(_saves)} signed"
    return lambda: hosts.gather(topic, None)


def _any_process(text: str | None) -> str | None:
    """The text of the lowest process that has one, for all of them; None where none has."""
    return next(filter(None, hosts.gather("checkpoint", text)), None)
