"""Runs as Slurm tasks: what is submitted, what the queue's answers mean, and all of it on a real cluster of one."""

import json
import os
import signal
from pathlib import Path

import pytest

from experiments.running import campaign, folders, launch, slurm, task
from experiments.running.launch import Job
from experiments.running.runs import RunSpec
from experiments.running.slurm import Standing, Task
from experiments.tables import rows
from model.errors import UserError
from tests import cluster
from tests.flags import FAST
from tests.processes import fork, wait_until
from tests.test_hosts import losses
from tests.test_sweep_killed import lasting

DEBUG = "configs/debug.py"

# They note what they were called with; what the queue says is in a file.
STAND_INS = {
    "sbatch": 'printf "%s\\n" "$@" > "$HERE/sbatch.txt"; cat > "$HERE/script.txt"; '
    'test ! -e "$HERE/refuse" || { cat "$HERE/refuse" >&2; exit 1; }; echo "7;cluster"',
    "squeue": 'printf "%s\\n" "$@" > "$HERE/squeue.txt"; test ! -e "$HERE/busy" && cat "$HERE/queue"',
    "scontrol": 'printf "%s\\n" "$@" >> "$HERE/scontrol.txt"; test ! -e "$HERE/refuse"',
    "srun": 'printf "%s\\n" "$@" > "$HERE/srun.txt"; exit "$(cat "$HERE/code")"',
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The folder that stand-ins for Slurm's commands write to."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(folder))
    monkeypatch.setattr(slurm, "TICK_S", 0.01)
    monkeypatch.setattr(slurm, "TICKS", 1)
    return folder


def job(out: Path, name: str, **more) -> Job:
    folders.claim(out / name, RunSpec(DEBUG, {"seed": 0}, {"name": name}), "abc")
    return Job(name, ["python", "-m", "train", f"--workdir={out / name}"], out / name, **more)


def finish(one: Job) -> None:
    folders.write_json(one.folder / "result.json", {"status": "finished", "config_hash": "abc"})


def say(here: Path, array: str, **states: str) -> None:
    """What the queue says from now on, by index."""
    lines = [f"{array}|{index[1:]}|{state}|7_{index[1:]}|BeginTime\n" for index, state in states.items()]
    (here / "queue").write_text("".join(lines))


def until(events, *kinds: str) -> list[tuple[str, str]]:
    """Events up to the first of some kind, without ticks."""
    seen, ticks = [], 0
    for event in events:
        ticks += event.kind == "tick"
        assert ticks < 300, f"waited in vain for {kinds}, after {seen}"
        if event.kind != "tick":
            seen.append((event.kind, event.name))
        if event.kind in kinds:
            break
    return seen


def submitted(out: Path) -> list[Path]:
    return sorted((out / "slurm").glob("*.json"))


@pytest.mark.quick
def test_runs_are_submitted_followed_and_taken_up(here, tmp_path):
    a, b, c, d = (job(tmp_path, name) for name in "abcd")
    finish(d)
    events = slurm.slurm([a, b, c, d], 2, "--partition=gpu --comment='two words'")
    assert until(events, "note") == [("skip", "d"), ("note", "")]
    (record,) = submitted(tmp_path)
    asked = (here / "sbatch.txt").read_text().splitlines()
    assert {"--array=0-2%2", "--requeue", "--signal=TERM@120", f"--job-name={record.stem}"} <= set(asked)
    assert asked[-2:] == ["--partition=gpu", "--comment=two words"]
    assert (here / "script.txt").read_text().endswith(f"-m experiments.running.task {record}\n")

    say(here, record.stem, _0="RUNNING", _1="PENDING", _2="PENDING")
    assert until(events, "start") == [("start", "a")]
    assert f"--name={record.stem}" in (here / "squeue.txt").read_text()
    (here / "busy").touch()  # the controller does not answer: nothing is known, so nothing is said
    assert [next(events).kind for _ in range(3)] == ["tick"] * 3
    (here / "busy").unlink()
    for passing in ("SIGNALING", "COMPLETING"):  # neither over nor back in the queue
        say(here, record.stem, _0=passing, _1="PENDING", _2="PENDING")
        assert [next(events).kind for _ in range(3)] == ["tick"] * 3
    say(here, record.stem, _0="COMPLETING", _1="RUNNING", _2="PENDING")
    assert until(events, "start") == [("start", "b")]
    say(here, record.stem, _0="PENDING", _1="RUNNING", _2="CANCELLED")
    assert until(events, "fail") == [("again", "a"), ("fail", "c")]
    assert rows.row_of(c.folder)["error"].startswith("Slurm task 7_2 is CANCELLED; see ")
    events.close()

    # Another sweep: it submits what is not in the queue, and waits for the rest.
    finish(b)
    say(here, record.stem, _0="RUNNING", _1="RUNNING")
    events = slurm.slurm([a, b, c, d])
    assert until(events, "note") == [("skip", "b"), ("skip", "d"), ("note", "")]
    (newer,) = set(submitted(tmp_path)) - {record}
    assert [run["name"] for run in json.loads(newer.read_text())["runs"]] == ["c"]
    assert f"--job-name={newer.stem}" in (here / "sbatch.txt").read_text() and not rows.row_of(c.folder).get("error")
    finish(a)
    folders.write_json(c.folder / "failed.json", {"code": 1, "error": "it broke"})
    say(here, newer.stem)
    assert until(events) == [("done", "a"), ("fail", "c")]


@pytest.mark.quick
def test_a_signal_ends_the_watching_and_not_the_jobs(here, tmp_path):
    events = slurm.slurm([job(tmp_path, "a")])
    until(events, "note")
    say(here, submitted(tmp_path)[0].stem, _0="RUNNING")
    until(events, "start")
    os.kill(os.getpid(), signal.SIGINT)
    told = [event for event in events if event.kind != "tick"]
    assert [event.kind for event in told] == ["note", "stop"] and told[1].detail == "SIGINT"
    assert told[0].detail.endswith("to end them: scancel 7") and not (here / "scontrol.txt").exists()


@pytest.mark.quick
def test_a_run_waits_for_its_source(here, tmp_path):
    a, b, c = job(tmp_path, "a"), job(tmp_path, "b", after="a"), job(tmp_path, "c", after="b")
    events = slurm.slurm([b, c, a])
    until(events, "note")
    (first,) = submitted(tmp_path)
    finish(a)
    assert until(events, "note") == [("done", "a"), ("note", "")]
    (second,) = set(submitted(tmp_path)) - {first}
    assert [run["name"] for run in json.loads(second.read_text())["runs"]] == ["b"]
    assert until(events) == [("fail", "b"), ("fail", "c")]
    assert rows.row_of(c.folder)["error"] == "it begins with the parameters of b, which has no result"


@pytest.mark.quick
def test_what_another_process_finishes_is_not_submitted(here, tmp_path, monkeypatch):
    a, b = job(tmp_path, "a"), job(tmp_path, "b", after="a")
    training = [True, False]
    monkeypatch.setattr(folders, "in_use", lambda folder: folder == a.folder and training.pop(0))
    events = slurm.slurm([a, b])
    assert until(events, "wait") == [("wait", "a")]
    finish(a)
    assert until(events, "note") == [("done", "a"), ("note", "")]
    (record,) = submitted(tmp_path)
    assert [run["name"] for run in json.loads(record.read_text())["runs"]] == ["b"]


@pytest.mark.quick
def test_mistakes_are_told_before_anything_is_made(here, tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    (here / "refuse").write_text("sbatch: error: invalid partition specified: gpx\nsbatch: error: Batch job failed\n")
    with pytest.raises(UserError, match=r"sbatch refused the runs: .*invalid partition specified: gpx"):
        list(slurm.slurm([job(out, "a")], None, "--partition=gpx"))
    assert not submitted(out), "no trace of an array that there is not"
    (here / "refuse").unlink()
    with pytest.raises(UserError, match="--slurm=--comment='a is no part of a command line: no closing quotation"):
        slurm.slurm([], None, "--comment='a")
    (out / "slurm" / "longview-old.json").write_text(json.dumps({"runs": [{"name": "a"}]}))
    (here / "busy").touch()
    with pytest.raises(UserError, match="squeue does not answer"):
        list(slurm.slurm([job(out, "a")]))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--launcher=slurm needs Slurm, and sbatch was not found"):
        campaign.carry_out({}, tmp_path / "none", launcher="slurm")
    assert not (tmp_path / "none").exists()


@pytest.mark.quick
def test_a_sweep_says_what_its_launcher_cannot_take(tmp_path):
    swept = ["experiments.sweep", f"--config={DEBUG}", f"--out={tmp_path / 'o'}"]
    told = {
        "--launcher=slrum": "--launcher is 'slrum'; allowed: local, slurm, print; closest: slurm",
        "--slurm=--time=5": "--slurm=--time=5 is for --launcher=slurm, and --launcher is local",
    }
    for flag, words in told.items():
        command = fork(*swept, flag)
        assert command.wait() == 2 and command.stderr == f"error: {words}\n"
    assert not (tmp_path / "o").exists()


def play(out: Path, here: Path, code: int, **environ: str) -> tuple[int, Job]:
    """Runs a task whose ranks end with this code."""
    one = job(out, "a")
    record = out / "record.json"
    folders.write_json(record, {"runs": [{"name": "a", "folder": str(one.folder), "command": one.command}]})
    (here / "code").write_text(str(code))
    (one.folder / "log.txt").write_text("error: what it said last\n")
    return task.main(str(record), {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "12", **environ}), one


@pytest.mark.quick
def test_a_task_starts_its_run_on_all_ranks(here, tmp_path):
    _, one = play(tmp_path, here, 1)
    log = f"{one.folder}/log.txt"
    first = ["--kill-on-bad-exit=0", "--open-mode=append", f"--output={log}", f"--error={log}"]
    assert (here / "srun.txt").read_text().splitlines() == [*first, *one.command]
    for ranks in ({"SLURM_NTASKS": "2"}, {"SLURM_JOB_NUM_NODES": "2"}):
        play(tmp_path, here, 1, **ranks)
        assert (here / "srun.txt").read_text().splitlines() == [*first, *one.command, "--distributed"]
    assert task.step_environment({"SLURM_CPUS_PER_TASK": "8"})["SRUN_CPUS_PER_TASK"] == "8"
    finish(one)
    (here / "srun.txt").unlink()
    assert play(tmp_path, here, 1)[0] == 0 and not (here / "srun.txt").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "ranks", "back"),
    [
        *[(0, 1, True), (75, 1, True), (75, 2, True), (137, 2, True), (143, 1, True)],
        *[(137, 1, False), (1, 2, False), (2, 2, False), (255, 2, False)],
    ],
)
def test_what_the_end_of_a_task_means(code, ranks, back, here, tmp_path):
    """It goes back into the queue if it was stopped, or asks to be started again, or lost a rank; but not for ever."""
    ended, one = play(tmp_path, here, code, SLURM_NTASKS=str(ranks))
    assert (here / "scontrol.txt").exists() == back == (not ended)
    assert (one.folder / "failed.json").exists() != back
    assert back or rows.row_of(one.folder)["error"] == {137: "killed by SIGKILL"}.get(code, "error: what it said last")
    if back:
        assert (here / "scontrol.txt").read_text().split() == ["requeue", "12"]
        for _ in range(launch.RESTARTS):
            ended, _ = play(tmp_path, here, code, SLURM_NTASKS=str(ranks))
        assert ended == 1 and (here / "scontrol.txt").read_text().count("requeue") == launch.RESTARTS
        assert "came no further than step 0" in rows.row_of(one.folder)["error"]


@pytest.mark.quick
def test_a_task_that_may_not_queue_again_has_failed(here, tmp_path):
    (here / "refuse").touch()
    ended, one = play(tmp_path, here, 75)
    assert ended == 1 and "scontrol cannot requeue it" in rows.row_of(one.folder)["error"]


@pytest.mark.quick
def test_the_queue_is_read():
    text = "longview-a|3|RUNNING|12_3|None\nlongview-a|4|PENDING|12_4|(ReqNodeNotAvail, UnavailableNodes:|x)\n"
    text += "other|N/A|RUNNING|9|\n"
    assert slurm.read_queue(text) == {
        Task("longview-a", 3): Standing("RUNNING", "12_3", "None"),
        Task("longview-a", 4): Standing("PENDING", "12_4", "(ReqNodeNotAvail, UnavailableNodes:|x)"),
    }
    assert slurm.own_options(Path("runs/50%"), "n", 3, None)[-1] == "--output=runs/50%%/n-%a.txt"


SETTINGS = {"steps": 150, "eval_every": 100, "eval_batches": 1, "checkpoint_every": 1000, "log_every": 1}
SMALL = {"batch_size": 4, "model.width": 16, "model.layers": 1, "data.mqar.length": 16}


def sweep(out: Path, *more: str, **environment: str) -> fork:
    words = ["experiments.sweep", f"--config={DEBUG}", "--seeds=2", f"--out={out}"]
    words += [f"--config.{key}={value}" for key, value in (SETTINGS | SMALL).items()]
    return fork(*words, *more, LONGVIEW_REVISION="tested", **environment)


def rank_of(folder: Path, rank: int) -> int:
    """The process that trains in a folder as one of several."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if {f"--workdir={folder}".encode(), b"train"} <= set(words) and f"SLURM_PROCID={rank}".encode() in variables:
            return int(path.name)
    raise LookupError(f"nobody trains in {folder}")


@pytest.mark.scale
@pytest.mark.long
@pytest.mark.skipif(bool(cluster.MISSING), reason=f"no {', '.join(cluster.MISSING)} here; as root: make slurm")
def test_runs_of_two_ranks_that_are_requeued_stopped_and_killed_have_the_rows_of_a_calm_sweep(tmp_path):
    calm, out = tmp_path / "calm", tmp_path / "slurm"
    first, second = out / "seed=0", out / "seed=1"

    def reached(folder: Path, step: int) -> None:
        wait_until(lambda: max(losses(folder), default=0) >= step, 240)

    def resumed(folder: Path) -> int:
        log = folder / "log.txt"
        return log.read_text().count("resumed at step") if log.exists() else 0

    with cluster.cluster() as conf:
        options = ["--launcher=slurm", "--slurm=--ntasks=2"]
        refused = sweep(tmp_path / "refused", *options, "--slurm=--partition=none", SLURM_CONF=conf)
        assert refused.wait() == 2 and "sbatch refused the runs: sbatch: error: " in refused.stderr
        assert "invalid partition specified: none" in refused.stderr

        watched = sweep(out, *options, SLURM_CONF=conf)
        reached(first, 20)
        (number,) = {line.partition("_")[0] for line in cluster.ask(conf, "squeue", "-ah", "-o%i").split()}
        cluster.ask(conf, "scontrol", "requeue", f"{number}_0")  # as a preemption does
        reached(second, 20)
        cluster.ask(conf, "scancel", "--signal=TERM", f"{number}_1")  # as Slurm does before the time is up
        watched.send(signal.SIGINT)
        assert watched.wait() == 128 + signal.SIGINT and f"scancel {number}" in watched.stdout

        watched = sweep(out, *options, SLURM_CONF=conf)
        wait_until(lambda: resumed(first) == 2, 240)
        before = max(losses(first))
        reached(first, before + 10)
        os.kill(rank_of(first, 1), signal.SIGKILL)
        assert watched.wait(400) == 0, watched.stdout

    assert (resumed(first), resumed(second)) == (4, 2)  # both ranks say so
    assert len(submitted(out)) == 1, "runs that were in the queue were submitted again"
    assert sweep(calm, XLA_FLAGS=f"{FAST} --xla_force_host_platform_device_count=2").wait(240) == 0
    assert len(lasting(calm)) == 2 and lasting(out) == lasting(calm)
    for name in ("seed=0", "seed=1"):
        assert len(losses(calm / name)) == 150 and losses(out / name) == losses(calm / name)
