"""The run folder: one run at a time owns it, its small files are written whole or not at all, and a signal
ends the run after a step instead of in the middle of one.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from model.errors import UserError
from train import hosts

VISIBLE = 20  # seconds that a network file system may take to show another host's file


def write_text(path: str | Path, text: str, ending: str = ".tmp") -> None:
    """Replaces a file at once: a kill or a full disk at any moment leaves the old text or the new, never a part.

    ending: of the file's name until it is whole; processes that may write the same file at once need one each.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ending)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power cut, as fsync does for the contents of a file."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: str | Path, obj: Any, ending: str = ".tmp") -> None:
    write_text(path, json.dumps(obj, indent=1) + "\n", ending)


DEEPEST = 100  # levels of a JSON file; functions that walk down one have room for more


def parse_json(text: str) -> Any:
    """What a text holds that people or disks may have harmed; ValueError says why it holds nothing."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return found
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_json(path: str | Path, **kinds: type) -> dict[str, Any]:
    """The JSON object in a file, in which each of these keys must hold a value of its type."""
    try:
        found = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it holds {str(found)[:40]!r}, not an object")
    for key, kind in kinds.items():
        if key not in found:
            raise UserError(f"{path} is damaged: it has no {key!r}")
        if not isinstance(found[key], kind):
            raise UserError(f"{path} is damaged: {key!r} is {str(found[key])[:40]!r}, not a {kind.__name__}")
    return found


def refuse_remote(name: str, path: str | Path) -> None:
    """Refuses an object store. Orbax could write there; the rest of a run could not, and half a run is none."""
    if "://" in str(path):
        raise UserError(
            f"{name} is {str(path)!r}, a URL; allowed: a folder, since locks, appended logs and renamed checkpoints "
            "need a file system; mount the bucket, or copy the folder there afterwards"
        )


@contextlib.contextmanager
def open_workdir(path: str | Path) -> Iterator[Path]:
    """Creates the folder and holds it against a second run until the block ends or the process dies.

    A run of many processes is one run: its first process holds the folder, which all of them must share.
    """
    refuse_remote("workdir", path)
    folder, lock = Path(path).absolute(), contextlib.ExitStack()

    def take() -> str:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            lock.callback(os.close, descriptor)
            return _lock(descriptor, path)
        except OSError as error:
            raise UserError(f"cannot write to workdir {path}: {error.strerror}; give a writable folder") from error

    with lock:
        owner = hosts.agree(take)
        strangers = [rank for rank, sees in enumerate(hosts.gather("workdir", _sees(folder, owner))) if not sees]
        if strangers:
            where = ", ".join(f"process {rank} on {hosts.the_line().names[rank]}" for rank in strangers)
            raise hosts.Agreed(
                f"workdir {path} must be a folder that all hosts share; another one is there for {where}"
            )
        yield folder


def _sees(folder: Path, owner: str) -> bool:
    """Whether this process finds the first one's lock; a file of another host may take a while to show."""
    deadline = time.monotonic() + VISIBLE
    while hosts.the_line() is not None:
        with contextlib.suppress(OSError):
            if (folder / ".lock").read_text(encoding="utf-8") == owner:
                break
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _lock(lock: int, path: str | Path) -> str:
    # The kernel drops a flock when its process dies, however it dies, so none is ever stale.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        raise UserError(f"workdir {path} is in use by {holder}; stop that run or give another folder") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        logging.warning("workdir %s: its file system has no locks; a second run here is not refused", path)
    owner = f"pid {os.getpid()} on {socket.gethostname()}\n"
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, owner.encode(), 0)
        os.fsync(lock)
    except OSError as error:
        raise UserError(f"cannot write to workdir {path}: {error.strerror}") from error
    return owner


@contextlib.contextmanager
def graceful_stop() -> Iterator[Callable[[], bool]]:
    """Yields `stop_requested()`, to be asked after every dispatch: true once SIGTERM, SIGINT or SIGHUP has come.

    With several processes a signal to any of them counts, and all stop at the same step.
    """
    received: list[int] = []
    line = hosts.the_line()

    def handler(number: int, frame: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        if line is not None:
            line.stop()
        # Not print: the handler may have interrupted one. Who was to read it may be gone, by the same Ctrl-C.
        with contextlib.suppress(OSError):
            os.write(2, f"{signal.Signals(number).name}: stopping after this step; Ctrl-C again: now\n".encode())

    heeded = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is by nohup
        heeded.append(signal.SIGHUP)  # a terminal was closed
    previous = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield (lambda: bool(received)) if line is None else line.stop_requested
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
