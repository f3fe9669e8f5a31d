"""Launchers: start runs, a few at a time, and tell what becomes of them as a stream of events."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.running import folders
from experiments.running.machine import Grant, Slots, look
from train.exit_codes import RESTART

POLL_S = 0.1
RESTARTS = 3  # of a run that comes no further, until it has failed
IN_USE = "another process is training it"
NO_DEVICE = "its accelerators serve another sweep"
STRAYED = "its config file was changed after the sweep began"


@dataclass(frozen=True)
class Job:
    name: str
    command: list[str]
    folder: Path
    after: str = ""  # the job that must have a result first


@dataclass(frozen=True)
class Event:
    kind: Literal["skip", "start", "done", "fail", "wait", "again", "note", "tick", "stop"]
    name: str = ""
    detail: str = ""


Running = dict[int, tuple[Job, subprocess.Popen]]  # by slot


def local(jobs: Sequence[Job], slots: int | None = None) -> Iterator[Event]:
    """Runs jobs as processes of this machine, `slots` at a time, each on its share of the cores and accelerators.

    SIGTERM or SIGINT is passed on as SIGTERM, so that every run saves before it ends; a second one kills.
    """
    yield from (Event("skip", job.name) for job in jobs if folders.finished(job.folder))
    todo = [job for job in jobs if not folders.finished(job.folder)]
    running: Running = {}
    machine = look()
    places = Slots(machine, slots or machine.slots)
    with signals() as received:
        try:
            while (todo or running) and not received:
                yield from _reap(running, todo)
                places.keep(running)
                yield from _fill(running, todo, places)
                yield Event("tick")
                time.sleep(POLL_S)
        finally:
            _end([process for _, process in running.values()], received)
            places.keep(())
    if received:
        yield Event("stop", detail=signal.Signals(received[0]).name)


def _reap(running: Running, todo: list[Job]) -> Iterator[Event]:
    """Takes out the processes that have ended."""
    for slot, (job, process) in list(running.items()):
        if process.poll() is not None:
            del running[slot]
            event = ended(job, process.returncode)
            if event.kind in ("wait", "again"):
                todo.append(job)
            yield event


def _fill(running: Running, todo: list[Job], places: Slots) -> Iterator[Event]:
    """Starts jobs in the free slots; one that another process is training already waits for that process.

    One that comes after another waits for its result, and without one has failed too.
    """
    for job in list(todo):
        free = [slot for slot in range(len(places)) if slot not in running]
        if not free:
            break
        if job.after in {other.name for other in (*todo, *(other for other, _ in running.values()))}:
            continue
        if job.after and not folders.finished(job.folder.parent / job.after):
            todo.remove(job)
            yield without_source(job)
            continue
        if folders.in_use(job.folder):
            yield Event("wait", job.name, IN_USE)
            continue
        if folders.finished(job.folder):
            todo.remove(job)
            yield Event("done", job.name)
            continue
        slot, grant = next(((slot, grant) for slot in free if (grant := places.take(slot))), (None, None))
        if grant is None:
            yield Event("wait", job.name, NO_DEVICE)
            break
        todo.remove(job)
        running[slot] = job, _start(job, grant)
        yield Event("start", job.name)


def ended(job: Job, code: int) -> Event:
    """What the end of a run's process means; a failure is also left in the folder, for the table."""
    if folders.strayed(job.folder):
        return Event("fail", job.name, STRAYED)
    if folders.finished(job.folder):
        return Event("done", job.name)
    error = folders.last_line(job.folder / "log.txt")
    if code == 2 and " is in use by " in error:  # another process was first by a moment
        return Event("wait", job.name, IN_USE)
    if code == RESTART:
        return again(job, error)
    if code == 0:
        error = "stopped before its last step; run again to continue"
    elif code < 0:
        error = f"killed by {signal.Signals(-code).name}"
    return failed(job, code, error)


def again(job: Job, error: str) -> Event:
    """A run that asks to be started again; a failure once it has asked too often without having saved a later step.

    The count is left in the folder: whoever starts the run next goes on with it.
    """
    file, saved = job.folder / "restarts.json", folders.saved(job.folder)
    before = folders.read_json(file, saved=int, times=int) or {"saved": saved, "times": 0}
    times = 1 + (before["times"] if before["saved"] == saved else 0)
    if times > RESTARTS:
        file.unlink()
        return failed(job, RESTART, f"started again {RESTARTS} times and came no further than step {saved}: {error}")
    folders.write_json(file, {"saved": saved, "times": times})
    return Event("again", job.name, error)


def without_source(job: Job) -> Event:
    return failed(job, 2, f"it begins with the parameters of {job.after}, which has no result")


def failed(job: Job, code: int, error: str) -> Event:
    """A failure, left in the folder."""
    folders.write_json(job.folder / "failed.json", {"code": code, "error": error})
    return Event("fail", job.name, error)


def _start(job: Job, grant: Grant) -> subprocess.Popen:
    (job.folder / "failed.json").unlink(missing_ok=True)
    with (job.folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **grant.environment},
            pass_fds=grant.files,
            start_new_session=True,  # so that Ctrl-C reaches the runs once, as our SIGTERM
        )
    if grant.cores:
        # Long before JAX counts the cores: each run sizes its thread pool to its share.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, grant.cores)
    return process


@contextmanager
def signals() -> Iterator[list[int]]:
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
