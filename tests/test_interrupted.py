"""What befalls a run beside its steps: signals in its tests, readers that leave, evaluations that fail."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from model.errors import UserError
from tests.processes import PLAIN, ROOT
from tests.test_train import load
from train import loop
from train.checkpoint import steps
from train.clock import Clock
from train.log import read_metrics
from train.loop import train
from train.workdir import read_json

SHORT = [("steps", "4"), ("checkpoint_every", "0"), ("eval_every", "0"), ("eval_batches", "1"), ("model.layers", "1")]


def config(**settings):
    return load(*SHORT, *((key, str(value)) for key, value in settings.items()))


def stop_from(ask: int):
    """In the place of `graceful_stop`: a stop has been requested when that is asked for so many times, and stays so."""
    asked = itertools.count(1)
    return lambda: contextlib.nullcontext(lambda: next(asked) >= ask)


# As a shell in a terminal starts it, even where these tests are run by nohup.
START = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
runpy.run_module("train", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_run_whose_readers_are_gone_is_saved_all_the_same(tmp_path, number):
    """As by Ctrl-C under `2>&1 | tee`, which ends `tee` too, or when a terminal is closed."""
    flags = ["--config.steps=1000000", "--config.checkpoint_every=0", "--config.eval_every=0", "--config.log_every=1"]
    command = [sys.executable, "-c", START, "--config=configs/debug.py", f"--workdir={tmp_path}", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | PLAIN, **pipes) as process:
        log = tmp_path / "metrics.jsonl"
        while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 3):
            time.sleep(0.1)
        process.stdout.close()
        process.stderr.close()
        process.send_signal(number)
        try:
            assert process.wait(120) == 0
        finally:
            process.kill()
    assert steps(tmp_path / "checkpoints") == [read_metrics(log)[-1]["step"]]


@pytest.mark.parametrize("ask", [4, 5, 6])  # after the last step, before the tests, before those of another length
def test_a_stop_after_the_last_step_ends_the_tests(tmp_path, monkeypatch, ask):
    with monkeypatch.context() as patched:
        patched.setattr(loop, "graceful_stop", stop_from(ask))
        assert train(config(test_lengths="16"), str(tmp_path)) is None
    assert steps(tmp_path / "checkpoints") == [4] and not (tmp_path / "result.json").exists()
    row = train(config(test_lengths="16"), str(tmp_path))
    assert (row["status"], row["steps"]) == ("finished", 4) and "test/length_16/loss" in row["metrics"]


def test_an_evaluation_that_fails_costs_no_step(tmp_path, monkeypatch):
    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(loop, "validate", fails)
        with pytest.raises(MemoryError):
            train(config(eval_every=3), str(tmp_path))
    assert steps(tmp_path / "checkpoints") == [3]
    assert train(config(eval_every=3), str(tmp_path))["steps"] == 4


def test_validation_scores_are_of_as_many_batches_as_those_of_the_test(tmp_path):
    few = train(config(), str(tmp_path / "once"))
    more = train(config(eval_batches=4), str(tmp_path / "once"))
    fresh = train(config(eval_batches=4), str(tmp_path / "fresh"))
    assert more["metrics"] == fresh["metrics"] != few["metrics"]
    assert more["steps_per_s"] == few["steps_per_s"], "no step was taken since"


def test_a_run_goes_no_step_back(tmp_path):
    train(config(), str(tmp_path))
    with pytest.raises(UserError, match="steps is 3, and this run has taken 4 already; closest: 4"):
        train(config(steps=3), str(tmp_path))


def test_a_damaged_best_step_is_put_aside_and_the_next_best_tested(tmp_path, monkeypatch):
    said = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.1}
    monkeypatch.setattr(loop, "validate", lambda run, state, split: {"validation/accuracy": said[int(state.step)]})
    asked = dict(steps=8, eval_every=2, checkpoint_every=4, test_at="best", keep=5)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "graceful_stop", stop_from(7))
        assert train(config(**asked), str(tmp_path)) is None
    checkpoints = tmp_path / "checkpoints"
    assert steps(checkpoints) == [2, 4, 7]
    some = next(path for path in (checkpoints / "00000004").rglob("*") if path.is_file() and "params" in str(path))
    some.write_bytes(some.read_bytes() + b"x")
    row = train(config(**asked), str(tmp_path))
    assert (row["tested_step"], row["metrics"]["validation/accuracy"]) == (2, 0.5)
    assert (checkpoints / "00000004.damaged").is_dir()


def test_every_step_is_timed_but_the_one_that_compiles(monkeypatch):
    """Also where each is followed by an evaluation."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(start=0.0)

    def step(seconds: float) -> None:
        clock.enter("data")
        clock.take_steps()
        now[0] += seconds
        clock.tick()
        clock.pause()
        clock.enter("evaluate")
        now[0] += 100

    step(50.0)
    assert clock.steps_per_s() is None
    step(2.0)
    step(2.0)
    assert clock.steps == [2.0, 2.0] and clock.steps_per_s() == 0.5


def test_a_step_that_is_fetched_late_is_timed_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(start=0.0)
    for late in range(4):  # dispatched one after another, each done three seconds after the one before
        clock.enter("data")
        clock.take_steps()
        if late:
            now[0] += 3
            clock.tick()
    assert clock.steps == [3.0, 3.0]


def test_what_a_result_says_is_what_its_folder_says(tmp_path):
    row = train(config(eval_every=1), str(tmp_path))
    assert row == read_json(tmp_path / "result.json") and row["steps_per_s"] > 0
