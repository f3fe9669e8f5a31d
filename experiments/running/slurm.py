"""Runs as tasks of Slurm job arrays.

A sweep submits and watches; what a task does with its run is in `task`, so runs go on when the sweep is gone. Each
array has a name of its own, and OUT/slurm/NAME.json, written before it is submitted, says which run each task is:
whoever comes later learns from the queue which runs are on their way. What Slurm says of a task is in NAME-INDEX.txt.
"""

import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.running import folders, launch
from experiments.running.launch import Event, Job
from model.errors import UserError

TICK_S = 0.5
TICKS = 10  # between questions to the queue, which serves others too
WARNING_S = 120  # before the time limit, for runs to save
LARGEST = 1000  # tasks of an array, which Slurm's MaxArraySize allows where nobody has changed it
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
OVER |= {"DEADLINE", "REVOKED"}
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}


class Task(NamedTuple):
    array: str  # its name
    index: int


class Standing(NamedTuple):
    """What the queue says of a task."""

    state: str
    number: str  # as scancel and scontrol take it
    reason: str


def slurm(jobs: Sequence[Job], slots: int | None = None, options: str = "") -> Iterator[Event]:
    """Runs jobs as tasks of job arrays, `slots` at a time or as many as the cluster lets.

    options: for sbatch, as on its command line. SIGTERM or SIGINT ends the watching, and the jobs go on.
    """
    for name in ("sbatch", "squeue", "scontrol", "srun"):
        if shutil.which(name) is None:
            raise UserError(
                f"--launcher=slurm needs Slurm, and {name} was not found; closest: --launcher=local or print"
            )
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UserError(f"--slurm={options} is no part of a command line: {str(error).lower()}") from None
    return _watch(jobs, slots, words)


def _watch(jobs: Sequence[Job], slots: int | None, options: Sequence[str]) -> Iterator[Event]:
    yield from (Event("skip", job.name) for job in jobs if folders.finished(job.folder))
    todo = {job.name: job for job in jobs if not folders.finished(job.folder)}
    tasks = under_way(todo.values())
    started: set[str] = set()
    with launch.signals() as received:
        while todo and not received:
            yield from _submit_ready(todo, tasks, slots, options)
            yield from _look(todo, tasks, started)
            for _ in range(TICKS):
                if todo and not received:
                    yield Event("tick")
                    time.sleep(TICK_S)
    if received:
        if numbers := sorted({found.number.partition("_")[0] for found in (_queue_of(tasks) or {}).values()}):
            told = "the same command takes up watching them; to end them: scancel"
            yield Event("note", detail=f"Slurm goes on with the runs; {told} {' '.join(numbers)}")
        yield Event("stop", detail=signal.Signals(received[0]).name)


def _submit_ready(todo: dict[str, Job], tasks: dict[str, Task], slots: int | None, options) -> Iterator[Event]:
    """Submits what waits for nothing: neither for the result of another run nor for another process in its folder."""
    ready = []
    for job in [job for name, job in todo.items() if name not in tasks]:
        if job.after in todo:
            continue
        if job.after and not folders.finished(job.folder.parent / job.after):
            del todo[job.name]
            yield launch.without_source(job)
        elif folders.in_use(job.folder):
            yield Event("wait", job.name, launch.IN_USE)
        elif folders.finished(job.folder):  # by the process that it waited for
            del todo[job.name]
            yield launch.ended(job, 0)
        else:
            ready.append(job)
    for first in range(0, len(ready), LARGEST):
        part = ready[first : first + LARGEST]
        array, number = submit(part, slots, options)
        tasks |= {job.name: Task(array, index) for index, job in enumerate(part)}
        yield Event("note", detail=f"{len(part)} submitted as Slurm job {number}")


def _look(todo: dict[str, Job], tasks: dict[str, Task], started: set[str]) -> Iterator[Event]:
    """Takes out the runs that are over, and tells of those that have begun or were put back into the queue."""
    standings = _queue_of(tasks)
    if standings is None:  # the controller is busy, or being restarted
        return
    for name, task in list(tasks.items()):
        found = standings.get(task)
        if found is None or found.state in OVER:
            del tasks[name]
            yield ended(todo.pop(name), task, found)
            continue
        if found.state == "RUNNING" and name not in started:
            started.add(name)
            yield Event("start", name)
        elif found.state in QUEUED and name in started:
            started.remove(name)
            yield Event("again", name, f"back in the queue ({found.reason})")


def submit(jobs: Sequence[Job], slots: int | None, options: Sequence[str]) -> tuple[str, str]:
    """Submits runs as one job array; its name and number."""
    folder = _folder(jobs[0])
    folders.make(folder)
    name = f"longview-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    record = folder / f"{name}.json"
    runs = [{"name": job.name, "folder": str(job.folder), "command": job.command} for job in jobs]
    folders.write_json(record, {"runs": runs})
    for job in jobs:
        (job.folder / "failed.json").unlink(missing_ok=True)
    script = f"#!/bin/sh\nexec {shlex.join([sys.executable, '-m', 'experiments.running.task', str(record)])}\n"
    done = subprocess.run(["sbatch", *own_options(folder, name, len(jobs), slots), *options], input=script, **TEXT)
    if done.returncode:
        record.unlink()
        raise UserError(f"sbatch refused the runs: {one_line(done.stderr)}")
    return name, done.stdout.strip().partition(";")[0]


TEXT = dict(capture_output=True, text=True, start_new_session=True)  # Ctrl-C is for the sweep alone


def own_options(folder: Path, name: str, count: int, slots: int | None) -> list[str]:
    """What sbatch is asked for whatever the user asks for."""
    return [
        "--parsable",
        f"--job-name={name}",
        f"--array=0-{count - 1}" + (f"%{slots}" if slots else ""),
        "--requeue",
        f"--signal=TERM@{WARNING_S}",
        "--open-mode=append",
        f"--output={str(folder).replace('%', '%%')}/{name}-%a.txt",
    ]


def under_way(jobs: Iterable[Job]) -> dict[str, Task]:
    """By run the tasks that are in the queue, submitted by whom ever."""
    wanted = {job.name: job for job in jobs}
    known: dict[str, Task] = {}
    for record in sorted({path for job in wanted.values() for path in _folder(job).glob("*.json")}):
        runs = folders.read_json(record, runs=list)["runs"]
        known |= {run["name"]: Task(record.stem, i) for i, run in enumerate(runs) if run["name"] in wanted}
    standings = _queue_of(known)
    if standings is None:
        raise UserError("squeue does not answer, so it cannot be known which runs are under way; try again later")
    return {name: task for name, task in known.items() if task in standings and standings[task].state not in OVER}


def _queue_of(tasks: dict[str, Task]) -> dict[Task, Standing] | None:
    """What the queue says of all tasks of these arrays; None where it says nothing now."""
    if not tasks:
        return {}
    arrays = ",".join(sorted({task.array for task in tasks.values()}))
    words = ["squeue", "--me", "--array", "--noheader", "--states=all", f"--name={arrays}", "--format=%j|%K|%T|%i|%r"]
    done = subprocess.run(words, **TEXT)
    return None if done.returncode else read_queue(done.stdout)


def read_queue(text: str) -> dict[Task, Standing]:
    """A line has the array's name, the task's index, its state, its number and why it waits."""
    lines = [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]
    return {
        Task(name, int(index)): Standing(state, number, reason)
        for name, index, state, number, reason in lines
        if index.isdecimal()
    }


def ended(job: Job, task: Task, found: Standing | None) -> Event:
    """What became of a run whose task is over."""
    if folders.finished(job.folder):
        return launch.ended(job, 0)
    failure = folders.read_json(job.folder / "failed.json", error=str)
    if failure is not None:
        return Event("fail", job.name, failure["error"])
    what = f"Slurm task {found.number} is {found.state}" if found else "its Slurm task is no longer in the queue"
    return launch.failed(job, 1, f"{what}; see {_folder(job) / f'{task.array}-{task.index}.txt'}")


def one_line(text: str) -> str:
    return " ".join(text.split()) or "it did not say why"


def _folder(job: Job) -> Path:
    return job.folder.parent / "slurm"
