"""What the data room keeps in memory: what will be asked for again, and no more than has room."""

import tracemalloc

import numpy as np
import pytest

from data import Task, build, pipeline
from data.kept import Blocks, FixedSets, narrowest
from data.pipeline import batch_at, gather

LISTOPS = {"length": 100, "max_depth": 6, "min_length": 10, "max_length": 100, "n_train": 50}

pytestmark = pytest.mark.quick


def counted(monkeypatch, task: Task) -> list[int]:
    """The first example of every block that is made from now on."""
    made, original = [], type(task).examples

    def examples(self, split, index, rng):
        made.append(index)
        return original(self, split, index, rng)

    monkeypatch.setattr(type(task), "examples", examples)
    return made


def bits(batch: dict[str, np.ndarray]) -> dict[str, tuple]:
    return {key: (array.dtype, array.shape, array.tobytes()) for key, array in batch.items()}


def each(make):
    """Makes blocks one after another."""
    return lambda keys: ((key, make(key)) for key in keys)


def test_an_endless_stream_takes_no_more_memory_the_longer_it_runs():
    task = build("induction", {"length": 4096})
    tracemalloc.start()
    for step in range(80):
        batch_at(task, 0, "train", 64, step)  # 1 MiB of them each
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 40 * pipeline.MiB


@pytest.mark.parametrize(("name", "section"), [("listops", LISTOPS), ("mqar", {"n_train": 150})])
def test_a_fixed_training_set_is_made_once(name, section, monkeypatch):
    monkeypatch.setattr(pipeline, "FIXED", FixedSets(1 << 20))
    task = build(name, section)
    n = task.size("train")
    made = counted(monkeypatch, task)
    epochs = [batch_at(task, 0, "train", n, epoch)["inputs"] for epoch in range(3)]
    assert sorted(made) == list(range(0, n, task.block))
    assert not np.array_equal(epochs[0], epochs[1]), "every epoch in another order"
    assert len({np.sort(epoch, axis=0).tobytes() for epoch in epochs}) == 1


def test_a_training_set_that_changes_by_epoch_is_not_the_first_one_again(book):
    task = build("text", {"length": 16, "path": str(book)})
    first, second = (batch_at(task, 0, "train", task.size("train"), epoch)["inputs"] for epoch in range(2))
    assert not {row.tobytes() for row in first} & {row.tobytes() for row in second}


@pytest.mark.parametrize("room", [1 << 20, 1000], ids=["kept", "too large to keep"])
@pytest.mark.parametrize(("name", "section"), [("listops", LISTOPS), ("mqar", {"n_train": 150, "min_pairs": 2})])
def test_what_is_kept_has_the_bits_of_what_was_made(name, section, room, monkeypatch):
    monkeypatch.setattr(pipeline, "FIXED", FixedSets(room))
    task, places = build(name, section), np.array([3, 40, 41, 3, 7])
    for _ in range(2):
        assert bits(pipeline.fixed(task, 0, "train", places)) == bits(gather(task, 0, "train", 0, places, places))
        assert pipeline.FIXED.bytes <= room
    assert (pipeline.FIXED.bytes > 0) == (room > 1000)


def test_what_every_evaluation_asks_of_an_endless_split_is_made_once(monkeypatch):
    monkeypatch.setattr(pipeline, "ASKED", Blocks(1 << 20))
    task = build("induction", {"length": 20})
    made = counted(monkeypatch, task)
    for _ in range(3):
        for batch in pipeline.eval_batches(task, 0, "validation", 32, 6):
            batch.rows(np.arange(32))
        batch_at(task, 0, "train", 32, 0)
    assert made.count(0) == 2 and len(made) == 4, "three blocks to evaluate on, and one to train on"


def test_blocks_make_room_for_each_other():
    kept, made, empty = Blocks(4000), each(lambda key: {"x": np.zeros(1000, np.uint8)}), each(lambda key: {})
    for key in [0, 1, 0, 2, 3]:
        kept.get([key], made)
    assert kept.bytes <= 4000
    gone = [kept.get([key], empty)[key] == {} for key in (0, 3, 1)]
    assert gone == [False, False, True], "the one used longest ago is gone"
    large = Blocks(10)
    assert large.get("x", made)["x"] is large.get("x", empty)["x"], "a block serves its neighbours"
    assert large.get("yxy", made).keys() == {"x", "y"}, "more than there is room for, for whoever asks"


def test_idle_hands_make_what_follows():
    kept, made = FixedSets(1 << 20), []

    def make(firsts):
        made.append([first // 4 for first in firsts])
        return ((first, {"x": np.arange(first, first + 4)}) for first in reversed(firsts))

    def ask(*places, hands):
        rows = kept.rows("set", 40, 4, make, np.array(places), hands)
        assert rows["x"].tolist() == list(places)
        return made.pop()

    assert ask(9, 10, hands=1) == [2]
    assert ask(1, hands=3) == [0, 1, 3]
    assert ask(6, 13, hands=3) == []
    assert ask(20, 3, 30, 36, hands=3) == [5, 7, 9]
    assert ask(33, hands=3) == [8], "there is none after it"


def test_sets_make_room_for_each_other():
    kept, places = FixedSets(250), np.arange(100)
    for key in (1, 2, 3):
        rows = kept.rows(key, 100, 1, each(lambda i, key=key: {"x": np.full((1,), key)}), places)
        assert (rows["x"] == key).all() and kept.bytes <= 250
    made = []
    for key in (3, 2, 1):
        kept.rows(key, 100, 1, each(lambda i: made.append(i) or {"x": np.zeros((1,), int)}), places[:1])
    assert len(made) == 1, "of the first"


def test_a_set_grows_wider_than_its_first_examples():
    kept, places = FixedSets(4096), np.arange(4)
    values = [1, 200, 40_000, -5]
    rows = kept.rows("x", 4, 1, each(lambda i: {"x": np.array([values[i]], np.int32)}), places)
    assert rows["x"].tolist() == values and rows["x"].dtype == np.int32


@pytest.mark.parametrize(
    ("array", "narrow"),
    [
        (np.array([0, 255], np.int32), np.uint8),
        (np.array([0, 256], np.int32), np.uint16),
        (np.array([-1, 3], np.int32), np.int32),
        (np.array([0, 1], np.float32), np.uint8),
        (np.array([0.5, 1], np.float32), np.float32),
        (np.array([np.nan, 1], np.float32), np.float32),
        (np.array([-0.0, 1], np.float32), np.float32),
        (np.array([3], np.uint8), np.uint8),
    ],
)
def test_no_bit_is_lost_in_a_narrower_type(array, narrow):
    assert narrowest(array) == narrow
