"""Where the time went, whatever befell the run: every second is counted once, and steps that were lost are known."""

import dataclasses
import json
import time

import pytest

from tests.test_train import load
from train import goodput, loop
from train.clock import Clock
from train.goodput import EMPTY, Ledger, attempt, between, read, report
from train.loop import train


def at(seconds: float, boot: str | None = "a", shift: float = 0.0) -> dict:
    return {"unix": 1e9 + seconds + shift, "boot": boot, "monotonic": seconds}


NOTED = EMPTY | dict(
    attempts=1,
    spent={"start": 5.0, "compile": 10.0, "step": 50.0, "save": 5.0},
    taken=100,
    last={"step": 100, "moment": at(70), "over": False},
)


@pytest.mark.quick
def test_seconds_between_attempts():
    assert between(at(70), at(90)) == 20
    assert between(at(70), at(90, shift=-3600)) == between(at(70), at(90, shift=3600)) == 20, "a clock was set"
    assert between(at(70), at(5, boot="b", shift=100)) == 35, "another machine, or this one anew"
    assert between(at(70), at(5, boot="b")) == 0, "its clock is behind"
    assert between(at(70, boot=None), at(5, boot=None, shift=100)) == 35, "no boots are told apart here"


@pytest.mark.quick
def test_a_kill_costs_what_was_not_saved_and_what_followed():
    noted = attempt(NOTED, step=80, reached=104, now=at(100), running=8)
    assert (noted["attempts"], noted["repeated_steps"], noted["repeated_s"], noted["down_s"]) == (2, 24, 10, 22)
    told = report(noted)
    assert told["wall_s"] == 92 and told["productive_s"] == 40 and told["goodput"] == round(40 / 92, 4)
    assert told["wall_s"] == pytest.approx(told["productive_s"] + sum(told["lost_s"].values()))
    assert told["lost_s"] | {"start": 5, "compile": 10, "save": 5, "repeated": 10, "down": 22} == told["lost_s"]
    saved = attempt(NOTED, step=100, reached=100, now=at(100), running=8)
    assert (saved["repeated_steps"], saved["repeated_s"]) == (0, 0)
    over = NOTED | {"last": NOTED["last"] | {"over": True}}
    assert attempt(over, step=100, reached=100, now=at(1e6), running=8)["down_s"] == 0, "it was finished"
    assert report(EMPTY)["goodput"] == 0


@pytest.mark.quick
@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "5", json.dumps(NOTED | {"last": {}}), json.dumps(NOTED | {"spent": {"step": "x"}})]
)
def test_a_damaged_account_costs_no_run(text, tmp_path):
    (tmp_path / goodput.FILE).write_text(text)
    assert read(tmp_path / goodput.FILE) == EMPTY
    (tmp_path / goodput.FILE).write_text(json.dumps(NOTED))
    assert read(tmp_path / goodput.FILE) == NOTED


@pytest.mark.quick
def test_notes_are_taken_while_nothing_else_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(goodput, "EVERY", 0.05)
    clock = Clock()
    with Ledger(clock, tmp_path) as ledger:
        assert not list(tmp_path.iterdir()), "not before it is known from where the run goes on"
        ledger.begin(4, 4)
        clock.enter("step")
        ledger.take(3)
        time.sleep(0.3)
        killed = read(tmp_path / goodput.FILE)
        assert killed["last"]["step"] == 7 and killed["taken"] == 3 and 0.1 < killed["spent"]["step"] < 0.4
    again = Ledger(Clock(), tmp_path)
    again.begin(5, 7)
    told = again.end()
    assert (told["attempts"], told["repeated_steps"]) == (2, 2) and told["lost_s"]["repeated"] > 0


@pytest.mark.quick
def test_going_back_is_work_in_vain(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock()
    ledger = Ledger(clock)
    ledger.begin(0, 0)
    clock.enter("step")
    ledger.take(8)
    now[0] += 4
    clock.enter("restore")
    ledger.go_back(6)
    told = ledger.end()
    assert (told["repeated_steps"], told["lost_s"]["repeated"], told["productive_s"]) == (2, 1, 3)


SHORT = [("steps", "12"), ("checkpoint_every", "4"), ("eval_every", "0"), ("eval_batches", "1"), ("model.layers", "1")]


def test_a_row_tells_where_the_time_of_all_attempts_went(tmp_path, monkeypatch):
    """A run that was killed after step 10, and saved at step 8."""
    config, prepare, began = load(*SHORT), loop.prepare, time.monotonic()

    class Killed(BaseException):
        pass

    def deadly(config):
        run, left = prepare(config), [10]

        def steps(*args):
            if not left[0]:
                raise Killed
            left[0] -= 1
            return run.train_steps(*args)

        return dataclasses.replace(run, train_steps=steps)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(loop, "prepare", deadly)
        train(config, str(tmp_path))
    time.sleep(1)
    row = train(config, str(tmp_path))["goodput"]
    took = time.monotonic() - began
    assert (row["attempts"], row["repeated_steps"]) == (2, 2)
    assert row["wall_s"] == pytest.approx(took, abs=0.5)
    assert 1 <= row["lost_s"]["down"] < 2 and row["lost_s"]["repeated"] > 0
    assert all(row["lost_s"][cause] > 0 for cause in ("start", "restore", "compile", "evaluate", "save"))
    assert 0 < row["goodput"] < 1 and row["productive_s"] > 0
