"""Launchers: start runs, a few at a time, and tell what becomes of them as a stream of events."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments import folders

POLL_S = 0.1
IN_USE = "another process is training it"
STRAYED = "its config file was changed after the sweep began"


@dataclass(frozen=True)
class Job:
    name: str
    command: list[str]
    folder: Path


@dataclass(frozen=True)
class Event:
    kind: Literal["skip", "start", "done", "fail", "wait", "tick", "stop"]
    name: str = ""
    detail: str = ""


Running = dict[int, tuple[Job, subprocess.Popen]]  # by slot
Launcher = Callable[[Sequence[Job], int], Iterator[Event]]


def local(jobs: Sequence[Job], slots: int) -> Iterator[Event]:
    """Runs jobs as processes of this machine, `slots` at a time.

    SIGTERM or SIGINT is passed on as SIGTERM, so that every run saves before it ends; a second one kills.
    """
    yield from (Event("skip", job.name) for job in jobs if folders.finished(job.folder))
    todo = [job for job in jobs if not folders.finished(job.folder)]
    running: Running = {}
    with _signals() as received:
        try:
            while (todo or running) and not received:
                yield from _reap(running, todo)
                yield from _fill(running, todo, slots)
                yield Event("tick")
                time.sleep(POLL_S)
        finally:
            _end([process for _, process in running.values()], received)
    if received:
        yield Event("stop", detail=signal.Signals(received[0]).name)


def _reap(running: Running, todo: list[Job]) -> Iterator[Event]:
    """Takes out the processes that have ended."""
    for slot, (job, process) in list(running.items()):
        if process.poll() is not None:
            del running[slot]
            event = ended(job, process.returncode)
            if event.kind == "wait":
                todo.append(job)
            yield event


def _fill(running: Running, todo: list[Job], slots: int) -> Iterator[Event]:
    """Starts jobs in the free slots; one that another process is training already waits for that process."""
    free = sorted(set(range(slots)) - set(running))
    for job in list(todo):
        if not free:
            break
        if folders.in_use(job.folder):
            yield Event("wait", job.name, IN_USE)
            continue
        todo.remove(job)
        if folders.finished(job.folder):
            yield Event("done", job.name)
        else:
            slot = free.pop(0)
            running[slot] = job, _start(job, slot, slots)
            yield Event("start", job.name)


LAUNCHERS: Mapping[str, Launcher] = {"local": local}


def ended(job: Job, code: int) -> Event:
    """What the end of a run's process means; a failure is also left in the folder, for the table."""
    if folders.strayed(job.folder):
        return Event("fail", job.name, STRAYED)
    if folders.finished(job.folder):
        return Event("done", job.name)
    error = folders.last_line(job.folder / "log.txt")
    if code == 2 and " is in use by " in error:  # another process was first by a moment
        return Event("wait", job.name, IN_USE)
    if code == 0:
        error = "stopped before its last step; run again to continue"
    elif code < 0:
        error = f"killed by {signal.Signals(-code).name}"
    folders.write_json(job.folder / "failed.json", {"code": code, "error": error})
    return Event("fail", job.name, error)


def share(cores: Sequence[int], slot: int, slots: int) -> Sequence[int]:
    """The cores of one of several runs at once; all of them where there are not enough to divide."""
    if slots > len(cores):
        return cores
    return cores[slot * len(cores) // slots : (slot + 1) * len(cores) // slots]


def default_slots() -> int:
    """Runs at once if nothing is asked: one on an accelerator, which runs share badly, else one per core."""
    if os.environ.get("JAX_PLATFORMS") != "cpu" and any(map(_exists, ("nvidia0", "accel0", "vfio/0"))):
        return 1
    return min(len(_cores()), 8)  # each takes about half a gigabyte


def _exists(device: str) -> bool:
    return Path("/dev", device).exists()


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _start(job: Job, slot: int, slots: int) -> subprocess.Popen:
    (job.folder / "failed.json").unlink(missing_ok=True)
    # Runs that share an accelerator must share its memory, most of which JAX otherwise takes at the start.
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / slots:.3f}", **os.environ} if slots > 1 else None
    with (job.folder / "log.txt").open("ab") as log:
        # In a session of its own, so that Ctrl-C reaches the runs once, as our SIGTERM.
        process = subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
    if slots > 1 and hasattr(os, "sched_setaffinity"):
        # Long before JAX counts the cores: each run sizes its thread pool to its share.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, share(_cores(), slot, slots))
    return process


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list instead of acting on them."""
    received: list[int] = []
    former = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(processes: Iterable[subprocess.Popen], received: list[int]) -> None:
    """Asks every process to save and end, and waits for it; with a second signal it is killed."""
    for process in processes:
        process.terminate()
    for process in processes:
        while process.poll() is None:
            if len(received) > 1:
                process.kill()
            time.sleep(POLL_S)
