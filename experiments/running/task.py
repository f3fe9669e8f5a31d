"""One run of a sweep as a Slurm task: `python -m experiments.running.task RUNS.json`, which `slurm` submits.

The run's command is started on every rank that sbatch was asked for. A run that stopped before its end without having
failed, at the warning before the time limit or because a rank was lost, is put back into the queue and resumes; so is
one that Slurm itself preempts or requeues.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from experiments.running import folders, launch
from experiments.running.launch import Event, Job
from experiments.running.slurm import TEXT, one_line
from train.exit_codes import RESTART


def main(record: str, environ: Mapping[str, str] = os.environ) -> int:
    run = folders.read_json(Path(record), runs=list)["runs"][int(environ["SLURM_ARRAY_TASK_ID"])]
    job = Job(run["name"], run["command"], Path(run["folder"]))
    if folders.finished(job.folder):
        return 0
    (job.folder / "failed.json").unlink(missing_ok=True)
    n = ranks(environ)
    with launch.signals() as received:
        code = subprocess.run(step(job, n), stdin=subprocess.DEVNULL, env=step_environment(environ)).returncode
    if received:  # Slurm ends this task, and has put it back into the queue or not, as it was asked to
        return 128 + signal.SIGTERM
    event = outcome(job, code, n)
    if event.kind == "again":
        event = requeue(job, environ["SLURM_JOB_ID"], event)
    print(f"{event.kind} {event.name} {event.detail}".strip(), flush=True)
    return int(event.kind == "fail")


def ranks(environ: Mapping[str, str]) -> int:
    """The processes that srun will start: as many as were asked for, or one a node."""
    return int(environ.get("SLURM_NTASKS") or environ.get("SLURM_JOB_NUM_NODES") or 1)


def step(job: Job, n: int) -> list[str]:
    """The command that starts all ranks. Each ends by itself when another is lost, so none has to be killed."""
    log = str(job.folder / "log.txt").replace("%", "%%")
    words = ["srun", "--kill-on-bad-exit=0", "--open-mode=append", f"--output={log}", f"--error={log}"]
    return [*words, *job.command, *(["--distributed"] if n > 1 else [])]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """srun takes the number of cores a rank from a variable of its own since Slurm 22.05."""
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return {**({"SRUN_CPUS_PER_TASK": cores} if cores else {}), **environ}


def outcome(job: Job, code: int, n: int) -> Event:
    """What srun's exit code, the highest of all ranks' with 128 added to a signal's, means for the run."""
    if code - 128 in {number.value for number in signal.Signals}:
        # One of several was killed, and the others ended because of that; or it was told to stop before it could save.
        code = RESTART if n > 1 or code == 128 + signal.SIGTERM else 128 - code
    if code == 0 and not folders.finished(job.folder):
        return launch.again(job, "stopped before its last step")
    event = launch.ended(job, code)
    return launch.again(job, event.detail) if event.kind == "wait" else event


def requeue(job: Job, number: str, event: Event) -> Event:
    done = subprocess.run(["scontrol", "requeue", number], **TEXT)
    if done.returncode:
        return launch.failed(job, RESTART, f"{event.detail}; scontrol cannot requeue it: {one_line(done.stderr)}")
    return event


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
