"""Launching runs, with a stand-in for training that keeps to the same files."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.running import campaign, folders, launch, progress
from experiments.running.launch import Event, Job, local
from experiments.running.runs import RunSpec
from experiments.tables import rows
from tests.processes import wait_until

ROOT = Path(__file__).parent.parent
DEBUG = "configs/debug.py"

STAND_IN = """
import fcntl, json, pathlib, signal, sys, time
folder, how, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
lock = open(folder / ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
def stop(*_):
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with open(folder.parent / "alive.txt", "a") as alive:
    alive.write("+")
    alive.flush()
    time.sleep(seconds)
    alive.write("-")
if how == "crash":
    sys.exit("first line\\nit broke")
if how == "leave":
    sys.exit(0)
if how.isdecimal():  # saves a step before it hangs, so often but once, then hangs twice more
    tries = len((folder / "log.txt").read_text().splitlines()) + 1
    if tries < int(how):
        (folder / "checkpoints" / f"{tries:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"{tries:08d}" / "manifest.json").touch()
    if tries <= int(how) + 1:
        print(f"hung at try {tries}")
        sys.exit(75)
if how == "stuck":
    print("hung")
    sys.exit(75)
result = {"status": "finished", "seed": 0, "metrics": {}, "config_hash": sys.argv[4]}
(folder / "result.json").write_text(json.dumps(result))
"""


def job(out: Path, name: str, how: str = "finish", seconds: float = 0.2, config: str = "abc") -> Job:
    folders.claim(out / name, RunSpec(DEBUG, {"seed": 0}, {"name": name}), "abc")
    return Job(name, [sys.executable, "-c", STAND_IN, str(out / name), how, str(seconds), config], out / name)


def outcome(events) -> dict[str, tuple[str, str]]:
    """Each job's last word."""
    return {event.name: (event.kind, event.detail) for event in events if event.kind != "tick"}


def test_runs_are_skipped_finished_or_failed_and_one_failure_stops_nothing(tmp_path):
    done = job(tmp_path, "done")
    folders.write_json(done.folder / "result.json", {"status": "finished", "config_hash": "abc"})
    jobs = [
        done,
        job(tmp_path, "a"),
        job(tmp_path, "b", "crash"),
        job(tmp_path, "c", "leave"),
        job(tmp_path, "d"),
    ]
    result = outcome(local(jobs, 2))
    assert {name: kind for name, (kind, _) in result.items()} == {
        "done": "skip",
        "a": "done",
        "b": "fail",
        "c": "fail",
        "d": "done",
    }
    assert result["b"][1] == "it broke"
    assert "before its last step" in result["c"][1]
    marks = (tmp_path / "alive.txt").read_text()
    assert marks.count("+") == 4
    assert max(marks[:i].count("+") - marks[:i].count("-") for i in range(len(marks) + 1)) == 2
    # The next call tries again what failed, and a row keeps the reason until then.
    assert rows.row_of(tmp_path / "b")["error"] == "it broke"
    assert outcome(local([job(tmp_path, "b"), done], 1)) == {"b": ("done", ""), "done": ("skip", "")}
    assert rows.row_of(tmp_path / "b")["status"] == "finished"


def test_a_result_of_another_config_is_a_failure(tmp_path):
    """As when a config file is edited while a sweep that read it is running."""
    result = outcome(local([job(tmp_path, "a"), job(tmp_path, "b", config="def")], 2))
    assert result == {"a": ("done", ""), "b": ("fail", launch.STRAYED)}
    assert [row["status"] for row in rows.collect(tmp_path)] == ["finished", "failed"]


def test_a_run_that_asks_to_be_started_again_is(tmp_path):
    """As often as it likes while it saves further steps, and three times where it does not."""
    events = list(local([job(tmp_path, "moving", "5", 0.01), job(tmp_path, "stuck", "stuck", 0.01)], 2))
    told = [event for event in events if event.name == "moving"]
    assert [event.kind for event in told] == ["start", "again"] * 6 + ["start", "done"]
    assert told[1].detail == "hung at try 1"
    told = [event for event in events if event.name == "stuck"]
    assert [event.kind for event in told] == ["start", "again"] * 3 + ["start", "fail"]
    assert told[-1].detail == "started again 3 times and came no further than step 0: hung"
    assert rows.row_of(tmp_path / "stuck")["error"] == told[-1].detail
    # Called again it is tried anew, as often.
    kinds = [event.kind for event in local([job(tmp_path, "stuck", "stuck", 0.01)], 1) if event.kind != "tick"]
    assert kinds == ["start", "again"] * 3 + ["start", "fail"]


def test_a_run_comes_after_the_one_it_begins_with(tmp_path):
    """And has failed with it; one whose source was finished before does not wait."""
    old = job(tmp_path, "old")
    folders.write_json(old.folder / "result.json", {"status": "finished", "config_hash": "abc"})
    asked = [("b", "a"), ("c", "b"), ("e", "d"), ("f", "e"), ("g", "old")]
    later = [replace(job(tmp_path, name), after=source) for name, source in asked]
    events = list(local([*later, old, job(tmp_path, "a"), job(tmp_path, "d", "crash")], 2))
    told = [(event.kind, event.name) for event in events if event.kind in ("start", "done", "fail")]
    for name, source in (("b", "a"), ("c", "b")):
        assert told.index(("done", source)) < told.index(("start", name))
    assert {name for kind, name in told if kind == "done"} == set("abcg")
    assert {name for kind, name in told if kind == "fail"} == set("def") and ("start", "e") not in told
    assert rows.row_of(tmp_path / "e")["error"] == "it begins with the parameters of d, which has no result"


def test_a_killed_run_says_so(tmp_path):
    long = job(tmp_path, "long", seconds=60)
    events = local([long], 1)
    while not (tmp_path / "alive.txt").exists():
        next(events)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (child,) = [int(pid) for pid in children if _runs(int(pid), str(long.folder))]
    os.kill(child, signal.SIGKILL)
    assert outcome(events) == {"long": ("fail", "killed by SIGKILL")}


def _runs(pid: int, word: str) -> bool:
    return word in Path(f"/proc/{pid}/cmdline").read_text()


def test_a_run_that_another_process_trains_is_waited_for(tmp_path):
    taken = job(tmp_path, "taken", seconds=1.5)
    with subprocess.Popen(taken.command) as other:
        wait_until(lambda: folders.in_use(taken.folder))
        seen = [event.kind for event in local([taken, job(tmp_path, "free")], 2) if event.name == "taken"]
    assert other.returncode == 0
    assert set(seen[:-1]) == {"wait"}
    assert seen[-1] == "done"
    assert not folders.in_use(taken.folder)


def test_a_run_that_loses_the_race_for_its_folder_is_not_a_failure(tmp_path):
    folder = job(tmp_path, "late").folder
    (folder / "log.txt").write_text("error: workdir x is in use by pid 7 on host; stop that run\n")
    assert launch.ended(Job("late", [], folder), 2).kind == "wait"
    (folder / "log.txt").write_text("error: unknown config key\n")
    assert launch.ended(Job("late", [], folder), 2).kind == "fail"


def test_a_signal_lets_every_run_save_and_none_start(tmp_path):
    jobs = [job(tmp_path, name, seconds=60) for name in "abc"]
    folders.write_json(tmp_path / "a" / "failed.json", {"code": 1, "error": "an earlier try"})
    kinds = []
    for event in local(jobs, 2):
        kinds.append((event.kind, event.name, event.detail))
        if event.kind == "tick" and (tmp_path / "alive.txt").exists():
            wait_until(lambda: (tmp_path / "alive.txt").read_text() == "++")
            os.kill(os.getpid(), signal.SIGTERM)
    assert kinds[-1] == ("stop", "", "SIGTERM")
    assert [(tmp_path / name / "saved").exists() for name in "abc"] == [True, True, False]
    assert not any(folders.in_use(tmp_path / name) for name in "abc")
    assert rows.row_of(tmp_path / "a")["status"] == "missing"


@pytest.mark.quick
def test_progress_counts(tmp_path, capsys):
    events = [Event("skip", "a"), Event("start", "b"), Event("start", "c"), Event("tick"), Event("wait", "d")]
    events += [Event("wait", "d"), Event("done", "b"), Event("fail", "c", "it broke"), Event("done", "d")]
    tally = progress.follow(iter(events), tmp_path, total=4)
    assert (tally.done, tally.skipped, tally.failed) == (["b", "d"], ["a"], {"c": "it broke"})
    assert campaign.exit_code(tally) == 1
    printed = capsys.readouterr().out.splitlines()
    assert sum("wait" in line for line in printed) == 1
    assert printed[-2:] == [
        "4 runs: 2 done, 1 finished before, 1 failed",
        f"failed: {tmp_path / 'c'}: it broke",
    ]
