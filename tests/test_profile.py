"""A trace holds the steps that were asked for, opens in the usual viewers, and changes no bit."""

import dataclasses
import gzip
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from model.errors import UserError
from tests.test_nothing_lost import losses
from tests.test_train import load
from train import profile
from train.clock import Clock
from train.loop import train

SHORT = [("steps", "12"), ("checkpoint_every", "4"), ("eval_every", "0"), ("eval_batches", "1"), ("model.layers", "1")]


@pytest.mark.quick
def test_what_is_asked_for():
    assert profile.parse(None) == range(0)
    assert profile.parse("1:1") == range(1, 2) and profile.parse("100:20") == range(100, 120)
    wrong = {
        "": "1:1",
        "5": "1:1",
        "5:": "1:1",
        "a:b": "1:1",
        "0:3": "1:3",
        "5:0": "5:1",
        "5:2000": "5:1000",
        "-1:3": "1:1",
    }
    for text, near in wrong.items():
        with pytest.raises(UserError, match=rf"--profile is '{text}'; allowed: STEP:N, .*; closest: {near}$"):
            profile.parse(text)
    profile.check(range(0), 10)
    profile.check(range(10, 11), 10)
    with pytest.raises(UserError, match=r"--profile=9:4 asks for step 12 of 10; .*; closest: 9:2"):
        profile.check(range(9, 13), 10)
    with pytest.raises(UserError, match=r"--profile=20:4 asks for step 23 of 10; .*; closest: 10:1"):
        profile.check(range(20, 24), 10)


def events_in(folder) -> list[dict]:
    (file,) = folder.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def steps_in(folder) -> list[int]:
    """The numbers of the steps in a trace, as a viewer finds them."""
    return sorted(int(event["args"]["step_num"]) for event in events_in(folder) if event.get("name") == profile.NAME)


def names_in(folder) -> set[str]:
    return {event.get("name", "") for event in events_in(folder)}


def test_a_trace_of_some_steps(tmp_path, capsys):
    config = load(*SHORT, ("log_every", "1"))
    train(config, str(tmp_path / "calm"))
    train(config, str(tmp_path / "traced"), range(5, 8))
    assert steps_in(tmp_path / "traced" / "profile") == [5, 6, 7]
    names = {path.name for path in (tmp_path / "traced" / "profile").rglob("*")}
    assert any(name.endswith(".xplane.pb") for name in names), "what TensorBoard and XProf read"
    assert "perfetto_trace.json.gz" in names, "what Perfetto reads"
    assert losses(tmp_path / "traced") == losses(tmp_path / "calm")
    assert "a trace of steps up to 7 is in" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True)
class Played:
    """A run that only counts."""

    train_steps: Callable


class Counted(NamedTuple):
    step: jax.Array


def test_what_is_past_what_is_cut_short_and_what_comes_again(tmp_path, capsys):
    def steps(state, batches, n):
        with jax.profiler.TraceAnnotation(f"really {int(state.step) + 1}"):
            return Counted(state.step + n), {}

    played = Played(steps)

    def take(folder, traced: range, first: int, groups: list[int], back: int | None = None) -> None:
        state = Counted(jnp.int32(first))
        with profile.of(played, traced, folder, Clock()) as run:
            for n in groups:
                state, _ = run.train_steps(state, None, n)
                if back is not None and int(state.step) == 6:
                    state, back = Counted(jnp.int32(back)), None

    take(tmp_path / "past", range(5, 8), 12, [1, 1])
    assert "nothing is profiled: step 7 is past, the next one is 13" in capsys.readouterr().out
    assert not (tmp_path / "past").exists()
    take(tmp_path / "grouped", range(6, 11), 0, [4, 4, 4, 4])
    assert steps_in(tmp_path / "grouped") == [5, 9], "steps that are taken at once are traced together"
    take(tmp_path / "cut", range(3, 9), 0, [1, 1, 1, 1])
    assert steps_in(tmp_path / "cut") == [3, 4]
    take(tmp_path / "back", range(8, 9), 0, 12 * [1], back=3)
    assert steps_in(tmp_path / "back") == [8] and "really 8" in names_in(tmp_path / "back")
    take(tmp_path / "never", range(8, 9), 0, [1, 1])
    assert not (tmp_path / "never").exists()
