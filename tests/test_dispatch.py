"""Several steps in one dispatch: the same run to the bit, wherever groups of steps begin and end."""

import dataclasses
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from data import build, pipeline
from data.pipeline import Batch
from experiments.measurements import overhead
from model.errors import UserError
from tests.test_hosts import command, losses, pair, train_until
from tests.test_train import break_at, load
from train import config as configs
from train import dispatch, feed, identity, log, loop, sharding
from train.checkpoint import Checkpoints
from train.clock import Clock
from train.dispatch import steps_from
from train.feed import Feed
from train.run import Run, prepare

SMALL = [("model.layers", "1"), ("model.mlp", "none"), ("eval_batches", "1"), ("steps", "14"), ("log_every", "1")]
GROUPED = [*SMALL, ("steps_per_dispatch", "4"), ("eval_every", "0"), ("checkpoint_every", "0")]
MESHES = {
    "data": [],
    "fsdp, tensor, sequence": [("mesh.data", "1"), ("mesh.fsdp", "2"), ("mesh.tensor", "2"), ("mesh.sequence", "2")],
}


@pytest.fixture(scope="module", params=MESHES)
def run(request) -> Run:
    return prepare(load(*GROUPED, *MESHES[request.param]))


def with_changes(config: ConfigDict, **changes: Any) -> ConfigDict:
    with config.copy_and_resolve_references().unlocked() as changed:
        changed.update(changes)
    return changed


def trained(run: Run, folder: Path, **changes: Any) -> tuple[dict[str, Any] | None, list[dict], list[bytes]]:
    """The result, what was logged of each step, and the bits of the last checkpoint, of a run by the same programs."""
    c = with_changes(run.config, **changes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "prepare", lambda config: dataclasses.replace(run, config=c))
        result = loop.train(c, str(folder))
    return result, *left(run, folder)


def left(run: Run, folder: Path) -> tuple[list[dict], list[bytes]]:
    lines = [line for line in log.read_metrics(folder / "metrics.jsonl") if "loss" in line]
    with Checkpoints(folder / "checkpoints", 1) as checkpoints:
        found = checkpoints.restore(run.abstract)
    return [{k: v for k, v in line.items() if k != "data_wait"} for line in lines], bits_of(found)


def bits_of(state: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.device_get(jax.tree.leaves(state))]


@pytest.fixture(scope="module")
def calm(run, tmp_path_factory):
    """In groups of 4, 4, 4 and 2."""
    result, lines, bits = trained(run, tmp_path_factory.mktemp("calm"))
    assert [line["step"] for line in lines] == list(range(1, 15)) and result["steps"] == 14
    return lines, bits


def interrupted(run: Run, dispatches: int, how: signal.Signals | None) -> Run:
    """Killed before another dispatch, or sent a signal in the last."""
    left = [dispatches]

    def steps(*args):
        if how is None and not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        if how is not None and not left[0]:
            os.kill(os.getpid(), how)
        return run.train_steps(*args)

    return dataclasses.replace(run, train_steps=steps)


# Groups


@pytest.mark.quick
def test_a_group_ends_where_something_is_due():
    def groups(most: int, **changes) -> list[int]:
        c, ends = load(*((key, str(value)) for key, value in changes.items())), [0]
        while ends[-1] < c.steps:
            ends.append(ends[-1] + steps_from(ends[-1], c, most))
        return ends[1:]

    assert groups(4, steps=10, eval_every=0, checkpoint_every=0) == [4, 8, 10]
    assert groups(4, steps=10, eval_every=3, checkpoint_every=0) == [3, 6, 9, 10]
    assert groups(4, steps=10, eval_every=0, checkpoint_every=6) == [4, 6, 10]
    assert groups(4, steps=13, eval_every=6, checkpoint_every=5) == [4, 5, 6, 10, 12, 13]
    assert groups(10, steps=40, eval_every=20, checkpoint_every=10) == [10, 20, 30, 40]
    assert groups(1, steps=3, eval_every=2, checkpoint_every=0) == [1, 2, 3]


@pytest.mark.quick
def test_steps_are_grouped_where_they_are_small():
    example = {"inputs": np.zeros((1, 64), np.int32)}

    def most(platform: str = "gpu", devices: int = 1, length: int = 64, params: int = 10**5, asked: int = 0) -> int:
        mesh = SimpleNamespace(devices=np.full(devices, SimpleNamespace(platform=platform)))
        rows = SimpleNamespace(mesh=mesh, shard_shape=lambda shape: (shape[0] // devices,))
        c = load(("steps_per_dispatch", str(asked)), ("batch_size", "64"))
        return dispatch.most_steps(c, rows, params, length, example)

    assert most() == most("tpu") == dispatch.MOST and most("cpu") == 1
    assert most("cpu", asked=3) == most(params=10**9, asked=3) == 3 and most(asked=1) == 1
    assert most(params=10**8) == 1 and most(params=10**8, devices=64) == dispatch.MOST
    assert most(length=2**16) == 1, "scores"
    example = {"inputs": np.zeros((1, 2**17), np.int32)}  # half a megabyte a row
    assert most() == 4 and most(devices=2) == 8
    example = {"inputs": np.zeros((1, 2**23), np.int32)}
    assert most() == 1


@pytest.mark.quick
def test_a_number_of_steps_that_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"steps_per_dispatch is -1; allowed: .* from 0 to 100; closest: 0"):
        load(("steps_per_dispatch", "-1"))


@pytest.mark.quick
def test_another_number_of_steps_may_go_on_with_a_run(tmp_path):
    changes = configs.changes(load(), load(("steps_per_dispatch", "4")))
    assert set(changes) == {"steps_per_dispatch"}
    identity.refuse_changes(changes, load(), tmp_path)


@pytest.mark.quick
def test_a_clock_counts_steps_not_dispatches(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock()
    clock.tick(4)
    for seconds, n in [(2, 4), (2, 4), (9, 1)]:
        now[0] += seconds
        clock.tick(n)
    assert clock.steps_per_s() == 2


# Batches


@pytest.mark.quick
@pytest.mark.parametrize("axis", sharding.AXES)
def test_every_device_gets_its_rows_of_every_batch(axis):
    mesh = sharding.make_mesh(load(("mesh.data", "1"), (f"mesh.{axis}", "8")).mesh)
    rows = sharding.batch_sharding(mesh, sharding.rules_of(load().mesh))
    batches = [Batch(build("mqar", {}), 0, "train", 16, step) for step in range(3)]
    whole = [batch.rows(np.arange(16)) for batch in [*batches, batches[-1]]]
    for key, array in sharding.put_batches(batches, 4, rows).items():
        stacked = np.stack([batch[key] for batch in whole])
        assert array.shape == stacked.shape and array.dtype == stacked.dtype
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, stacked[shard.index])
            assert shard.data.shape[:2] == (4, 2 if axis in ("data", "fsdp", "expert") else 16)


@pytest.mark.quick
def test_a_feed_groups_batches_as_the_loop_does(monkeypatch):
    run = prepare(load(*GROUPED, ("eval_every", "5")))
    assert feed.depth(run) == 2
    with Feed(run, SimpleNamespace(step=3, data_offset=1)) as batches:
        for steps in ([3, 4], [5, 6, 7, 8], [9], [10, 11, 12, 13]):
            found = next(batches)
            for i, step in enumerate(steps):
                expected = pipeline.batch_at(run.task, 0, "train", 16, step + 1)
                assert all(np.array_equal(found[key][i], expected[key]) for key in expected)
        with pytest.raises(StopIteration):
            next(batches)
    monkeypatch.setattr(feed, "ROOM", 1)
    assert feed.depth(run) == 1


# Bits


DUE = [dict(eval_every=5), dict(checkpoint_every=3), dict(eval_every=6, checkpoint_every=4), dict(checkpoint_every=1)]


@pytest.mark.few(3)
@pytest.mark.parametrize("due", DUE, ids=lambda due: ", ".join(f"{key}={value}" for key, value in due.items()))
def test_what_is_due_in_between_changes_no_bits(run, calm, due, tmp_path):
    _, lines, bits = trained(run, tmp_path, **due)
    assert lines == calm[0] and bits == calm[1]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("how", "moments"), [(None, (1, 3, 1)), (signal.SIGTERM, (1, 1, 1))], ids=["killed", "terminated"]
)
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(run, calm, how, moments, tmp_path):
    every = dict(checkpoint_every=7)
    for dispatches in moments:
        try:
            assert trained(interrupted(run, dispatches, how), tmp_path, **every)[0] is None
        except KeyboardInterrupt:
            assert how is None
    _, lines, bits = trained(run, tmp_path, **every)
    assert lines == calm[0] and bits == calm[1]


def test_all_numbers_of_steps_are_one_program(run, calm, tmp_path):
    trained(run, tmp_path, eval_every=3)
    assert run.train_steps._cache_size() == 1


def one_by_one(run: Run, steps: int) -> tuple[list[float], list[bytes]]:
    """The loss of each step, and the bits of the last and of its number, by the program of one step."""
    state, found = run.init(), []
    for step in range(steps):
        batch = Batch(run.task, 0, "train", run.config.batch_size, step)
        state, sums = run.train_step(state, sharding.put_batch(batch, run.batch_sharding))
        found.append(float(sums["loss"][0] / sums["loss"][1]))
    return found, bits_of((steps, state))


def test_steps_taken_at_once_are_the_steps(run, calm):
    """To the bit on CPUs. Elsewhere another number is another program, which may round otherwise."""
    found, bits = one_by_one(run, 14)
    assert found == [line["loss"] for line in calm[0]] and bits == calm[1]


def test_steps_of_a_scan_taken_at_once_are_the_steps():
    """Where layers loop over tokens themselves; 4 at once, and 2 of 4."""
    run = prepare(load(*GROUPED, spec="configs/debug.py:arch=mamba"))
    state, found = run.init(), []
    for start, n in [(0, 4), (4, 2)]:
        batches = [Batch(run.task, 0, "train", run.config.batch_size, start + i) for i in range(n)]
        state, sums = run.train_steps(state, sharding.put_batches(batches, 4, run.batch_sharding), n)
        found += np.divide(*jax.device_get(sums["loss"]))[:n].tolist()
    assert (found, bits_of((6, state))) == one_by_one(run, 6)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["rollback", "stop", "skip"])
def test_a_step_that_breaks_is_dealt_with_alike_however_steps_are_grouped(run, policy, tmp_path, monkeypatch):
    break_at(monkeypatch, {5, 7, 9})
    # A best score would be saved, and gone back to, wherever it is found.
    monkeypatch.setattr(loop, "validate", lambda *args: {"validation/accuracy": 0.5, "validation/loss": 1.0})
    asked, ends = dict(nonfinite=policy, checkpoint_every=4), []
    for i, due in enumerate([{}, dict(eval_every=3), dict(eval_every=1)]):
        result, lines, bits = trained(run, tmp_path / str(i), **asked, **due)
        ends.append((lines, bits, *(result[key] for key in ("status", "steps", "nonfinite"))))
    assert ends[0] == ends[1] == ends[2]
    assert (
        ends[0][2:]
        == {"rollback": ("finished", 14, 3), "stop": ("nonfinite", 6, 1), "skip": ("finished", 14, 3)}[policy]
    )


# Hosts and benches


@pytest.mark.scale
def test_hosts_group_alike_and_stop_together(tmp_path):
    several, workdir = {"steps_per_dispatch": 4}, tmp_path / "two"
    words = command(workdir, **several)
    hosts = pair(words, words)
    train_until(workdir, 4, hosts)
    hosts[1].send(signal.SIGTERM)
    assert [host.wait(60) for host in hosts] == [0, 0], [host.stderr for host in hosts]
    hosts = pair(words, words)
    assert [host.wait(200) for host in hosts] == [0, 0], [host.stderr for host in hosts]
    (one,) = pair(command(tmp_path / "one", **several))
    assert one.wait(200) == 0
    expected = losses(tmp_path / "one")
    assert list(losses(workdir)) == list(expected) == list(range(1, 21))
    assert list(losses(workdir).values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.scale
def test_the_bench_of_the_loop_counts_steps_not_dispatches(run):
    calls, seconds = 0, 0.05

    def slow(state, batches, n):
        nonlocal calls
        calls += 1
        time.sleep(n * seconds)
        return run.train_steps(state, batches, n)

    longer = with_changes(run.config, steps=overhead.WARM + 8)
    found = overhead.step_in_loop(dataclasses.replace(run, config=longer, train_steps=slow))
    assert seconds < found < 2 * seconds and calls == 5
    asked = [*GROUPED, ("model.width", "16"), ("data.mqar.length", "16")]
    found = overhead.measure("configs/debug.py", asked, steps=8, rounds=1)
    assert found["steps_per_dispatch"] == 4 and 0 < found["loop_ms"]


@pytest.mark.quick
def test_a_bench_of_the_loop_that_is_too_short_is_refused():
    asked = [*GROUPED, ("model.width", "16"), ("data.mqar.length", "16")]
    with pytest.raises(UserError, match=r"8 steps .* 5 at once; allowed: at least 10"):
        overhead.measure("configs/debug.py", [*asked, ("steps_per_dispatch", "5")], steps=8, rounds=1)
