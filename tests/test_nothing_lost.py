"""A run that is killed, again and again, is the run that was not."""

import random
import signal
import time

import pytest

from tests.processes import fork, run
from train.checkpoint import steps
from train.log import read_metrics
from train.workdir import read_json

pytestmark = pytest.mark.scale

STEPS = 100


def command(workdir, **more) -> list[str]:
    small = {"batch_size": 4, "eval_batches": 1, "model.width": 16, "data.mqar.length": 16}
    settings = dict(steps=STEPS, checkpoint_every=2, eval_every=25, **small) | more
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["train", "--config=configs/debug.py", f"--workdir={workdir}", *overrides]


def losses(workdir) -> list[tuple[int, str]]:
    """Every logged step with the bits of its loss, in the order of the file."""
    return [(line["step"], line["loss"].hex()) for line in read_metrics(workdir / "metrics.jsonl") if "loss" in line]


def logged(workdir) -> int:
    try:
        return len(losses(workdir))
    except FileNotFoundError:
        return 0


def interrupt(workdir, sign: signal.Signals, rng: random.Random, ahead: int = 9, settings=None, **environment) -> fork:
    """Starts the run, lets it get a little further, and sends the signal at a moment of no meaning."""
    settings = settings or {}
    process = fork(*command(workdir, **settings), **environment)
    goal = max(steps(workdir / "checkpoints"), default=0) + rng.randint(1, ahead)
    while process.running() and logged(workdir) < min(goal, settings.get("steps", STEPS) - 1):
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.2))
    process.send(sign)
    process.wait(60)
    return process


@pytest.mark.long
def test_killed_and_terminated_runs_equal_an_undisturbed_one(tmp_path):
    rng = random.Random(0)
    assert run(*command(tmp_path / "calm"), timeout=300).returncode == 0
    calm = losses(tmp_path / "calm")
    assert [step for step, _ in calm] == list(range(1, STEPS + 1))

    for _ in range(10):
        interrupt(tmp_path / "killed", signal.SIGKILL, rng)
        assert not (tmp_path / "killed" / "result.json").exists()
    for _ in range(2):
        process = interrupt(tmp_path / "terminated", signal.SIGTERM, rng)
        assert process.wait() == 0 and "saved" in process.stdout

    for name in ("killed", "terminated"):
        assert fork(*command(tmp_path / name)).wait(300) == 0
        assert losses(tmp_path / name) == calm
        results = [read_json(tmp_path / run / "result.json") for run in (name, "calm")]
        assert results[0]["metrics"] == results[1]["metrics"]


def test_a_second_process_is_refused(tmp_path):
    first = fork(*command(tmp_path))
    while logged(tmp_path) < 1 and first.running():
        time.sleep(0.01)
    second = fork(*command(tmp_path))
    assert second.wait(60) == 2
    assert f"in use by pid {first.pid}" in second.stderr
    first.send(signal.SIGKILL)
    first.wait()
