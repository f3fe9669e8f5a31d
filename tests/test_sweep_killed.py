"""A sweep that is killed anywhere, again and again, ends with the rows of one that was not, and repeats nothing."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from experiments.running import folders
from experiments.tables import rows
from tests.processes import fork, wait_until
from tests.test_nothing_lost import losses

pytestmark = pytest.mark.scale

RUNS = 10  # 24 take six minutes
# One program for all: neither kind of seed is compiled into it.
SETTINGS = {"steps": 12, "checkpoint_every": 4, "eval_every": 6, "eval_batches": 1, "test_at": "best"}
SMALL = {"batch_size": 4, "model.width": 16, "model.layers": 1, "data.mqar.length": 16}
VOLATILE = ("wall_s", "steps_per_s", "data_wait", "goodput", "date")


def start(out: Path) -> fork:
    words = ["experiments.sweep", "--config=configs/debug.py", "--jobs=2"]
    words += ["--grid=data.seed=0,1", f"--seeds={RUNS // 2}"]
    words += [f"--config.{key}={value}" for key, value in (SETTINGS | SMALL).items()]
    return fork(*words, f"--out={out}", LONGVIEW_REVISION="tested")


def finished(out: Path) -> dict[Path, tuple]:
    """The results that are there, and what would show that one was made anew."""
    found = {path: path.stat() for path in out.glob("*/result.json")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def interrupt(out: Path, done: int, how: str, rng: random.Random) -> None:
    """Lets the sweep finish some more runs, and ends it at a moment of no meaning."""
    sweep = start(out)
    wait_until(lambda: children(sweep.pid) and len(finished(out)) >= done, 400)
    time.sleep(rng.uniform(0, 2))
    runs, asked = children(sweep.pid), how == "asked to stop"
    sweep.send(signal.SIGTERM if asked else signal.SIGKILL)
    if how == "all killed":  # as when the machine goes down; else runs, which have sessions of their own, go on alone
        for pid in runs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert sweep.wait(120) == (128 + signal.SIGTERM if asked else -signal.SIGKILL)


def lasting(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in VOLATILE} for row in rows.read_rows(out / "rows.jsonl")]


@pytest.mark.long
def test_a_sweep_killed_five_times_ends_like_one_left_alone(tmp_path):
    calm, killed, rng, seen = tmp_path / "calm", tmp_path / "killed", random.Random(0), {}
    assert start(calm).wait(900) == 0
    ends = ("launcher killed", "all killed", "asked to stop", "all killed", "asked to stop")
    for done, how in zip((1, 2, 3, 5, 6), ends, strict=True):
        interrupt(killed, done, how, rng)
        assert len(finished(killed)) < RUNS
        seen |= {path: stamp for path, stamp in finished(killed).items() if path not in seen}
    assert start(killed).wait(900) == 0

    assert len(seen) >= 6 and {path: finished(killed)[path] for path in seen} == seen, "a finished run was repeated"
    assert len(lasting(killed)) == RUNS and lasting(killed) == lasting(calm)
    for row in lasting(calm):
        assert row["status"] == "finished" and losses(killed / row["run"]) == losses(calm / row["run"])
        assert not folders.in_use(killed / row["run"])
        assert (killed / row["run"] / "log.txt").read_text().count("finished after 12 steps") <= 1
