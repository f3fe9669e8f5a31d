"""Batches on their way to the devices: whole, in order, ahead of the loop, and no further ahead than there is room."""

import itertools
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from data import build, pipeline
from data.ahead import Ahead
from data.pipeline import Batch
from model.errors import UserError
from tests.test_train import load
from train import config as configs
from train import feed, sharding
from train.feed import Feed
from train.loop import Clock
from train.run import prepare

pytestmark = pytest.mark.quick


def threads() -> int:
    return sum(thread.name == "ahead" for thread in threading.enumerate())


def eventually(true) -> bool:
    for _ in range(500):
        if true():
            return True
        time.sleep(0.01)
    return False


# Rows on devices


@pytest.mark.parametrize("axis", sharding.AXES)
def test_every_device_gets_the_rows_it_holds(axis):
    mesh = sharding.make_mesh(load(("mesh.data", "1"), (f"mesh.{axis}", "8")).mesh)
    rules = sharding.rules_of(load().mesh)
    batch = Batch(build("mqar", {}), 0, "train", 16, 3)
    whole = batch.rows(np.arange(16))
    put = sharding.put_batch(batch, sharding.batch_sharding(mesh, rules))
    assert put.keys() == whole.keys()
    for key, array in put.items():
        assert array.shape == whole[key].shape and array.dtype == whole[key].dtype
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[key][shard.index])
            # Nobody does work that another device has done; what an axis does not share out it holds in full.
            assert shard.data.shape[0] == (2 if axis in ("data", "fsdp", "expert") else 16)


def test_a_host_makes_the_rows_of_its_devices_alone_and_each_once():
    """Of a mesh on which the host's devices hold rows that do not lie together, some of them twice."""
    held = [(slice(0, 2),), (slice(0, 2),), (slice(4, 6),), (slice(None, None),)]

    def host(n):
        return SimpleNamespace(addressable_devices_indices_map=lambda shape: dict(enumerate(held[:n])))

    assert sharding.held_rows.__wrapped__(host(3), 6).tolist() == [0, 1, 4, 5]
    assert sharding.held_rows.__wrapped__(host(4), 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_rules_say_what_shares_out_a_batch():
    rules = [("batch", ("data",)), ("length", ("sequence",))]
    mesh = sharding.make_mesh(load(("mesh.data", "2"), ("mesh.expert", "4")).mesh)
    assert sharding.batch_sharding(mesh, rules).shard_shape((16,)) == (8,)
    sharding.check_batch(mesh, rules, 2, 16, 1)
    with pytest.raises(UserError, match=r"batch_size 3 .* does not divide over mesh.data = 2; closest that does: 4"):
        sharding.check_batch(mesh, rules, 3, 16, 1)
    assert sharding.batch_sharding(mesh, []).is_fully_replicated


# Ahead of the loop


def state(step: int = 0, data_offset: int = 0) -> SimpleNamespace:
    return SimpleNamespace(step=step, data_offset=data_offset)


def same(put: dict[str, jax.Array], run, step: int) -> bool:
    batch = pipeline.batch_at(run.task, 0, "train", 16, step)
    return all(np.array_equal(put[key], batch[key]) for key in batch)


def test_a_feed_has_the_batches_of_the_state_it_was_sent_to():
    run = prepare(load(("steps", "50")))
    with Feed(run, state(47)) as batches:
        assert all(same(next(batches), run, step) for step in (47, 48, 49))
        with pytest.raises(StopIteration):
            next(batches)
        batches.seek(state(1, data_offset=6))
        assert threads() == 1 and same(next(batches), run, 7)
    assert threads() == 0


def test_no_more_is_made_ahead_than_there_is_room_for(monkeypatch):
    run = prepare(load(("steps", "100")))
    size = sum(array.nbytes for array in pipeline.batch_at(run.task, 0, "train", 16, 0).values())
    assert feed.depth(run) == feed.DEPTH
    monkeypatch.setattr(feed, "ROOM", 3 * size + 1)
    assert feed.depth(run) == 3
    monkeypatch.setattr(feed, "ROOM", 1)
    assert feed.depth(run) == 1

    made = []
    with Ahead((made.append(i) or i for i in itertools.count()), depth=3) as ahead:
        assert eventually(lambda: len(made) == 4), "three in line and one in hand"
        time.sleep(0.05)
        assert len(made) == 4 and next(ahead) == 0
        assert eventually(lambda: len(made) == 5)
    assert threads() == 0


def test_what_goes_wrong_in_making_a_batch_is_told_in_the_loop():
    def items():
        yield 1
        raise UserError("the file is gone")

    with Ahead(items(), depth=4) as ahead:
        assert next(ahead) == 1
        for _ in range(2):
            with pytest.raises(UserError, match="the file is gone"):
                next(ahead)
    assert threads() == 0


def test_a_corpus_that_shrinks_under_a_run_is_named(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("a line of text\n" * 400)
    text = [("data.task", "text"), ("data.text.path", str(book)), ("data.text.length", "16")]
    run = prepare(configs.load("configs/debug.py", [("model.width", "16"), ("steps", "1000"), *text]))
    with Feed(run, state()) as batches:
        next(batches)
        book.write_text("gone")
        with pytest.raises(UserError, match=r"book.txt has become shorter .*; put it back") as error:
            for _ in range(2 * feed.DEPTH):
                next(batches)
    assert "\n" not in str(error.value) and threads() == 0


def test_a_corpus_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text("a line of text\n" * 400)
    monkeypatch.setattr("os.pread", lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    task = build("text", {"path": str(tmp_path), "length": 16})
    with pytest.raises(UserError, match=r"cannot read .*book.txt: Input/output error"):
        pipeline.batch_at(task, 0, "train", 4, 0)


def test_the_share_of_time_spent_waiting_for_data(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    clock = Clock(start=now[0])
    passes(3)
    with clock.waiting():
        passes(1)
    assert clock.data_wait() == 0.25
    passes(2)
    assert clock.data_wait() == 0.0, "since it was last asked"
    assert (clock.waited, clock.wall()) == (1, 6)
    later = Clock(start=now[0])
    later.resume(wall=6, waited=1)
    with later.waiting():
        passes(2)
    assert later.data_wait() == 1.0 and (later.waited, later.wall()) == (3, 8)


def test_evaluating_all_of_what_never_ends_is_refused_before_anything_runs():
    with pytest.raises(UserError, match=r"eval_batches is 0, but mqar has an endless validation split; .* at least 1"):
        prepare(load(("eval_batches", "0")))
