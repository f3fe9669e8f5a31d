"""Examples that took long to make are kept where other runs find them, and nothing else about them changes."""

import numpy as np
import pytest

import data
from data import kept, pipeline, shelf

FIELDS = dict(side=32, difficulty="easy", protocol="s4", n_train=128, n_validation=64, n_test=64)


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process: nothing in memory."""

    def begin(root=None):
        monkeypatch.setattr(pipeline, "FIXED", kept.FixedSets(2**24))
        monkeypatch.setenv(shelf.VARIABLE, str(root or ""))

    return begin


def batch(**changes):
    return pipeline.batch_at(data.build("pathfinder", FIELDS | changes), 0, "train", 16, 3)


def same(one, other):
    return all(one[key].dtype == other[key].dtype and np.array_equal(one[key], other[key]) for key in one | other)


def test_what_one_run_made_the_next_one_reads(fresh, tmp_path, monkeypatch):
    fresh()
    plain = batch()
    assert not list(tmp_path.rglob("*"))
    fresh(tmp_path)
    assert same(batch(), plain) and len(list(tmp_path.rglob("*.npz"))) == 2
    fresh(tmp_path)
    monkeypatch.setattr(shelf.Block, "make", lambda block: pytest.fail("made again"))
    assert same(batch(), plain)


def test_other_data_has_another_place(fresh, tmp_path):
    fresh(tmp_path)
    one, other = batch(), batch(difficulty="hard")
    assert not same(one, other) and len({file.parent for file in tmp_path.rglob("*.npz")}) == 2
    fresh()
    assert same(batch(difficulty="hard"), other)


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: flipped(raw)])
def test_what_is_damaged_is_made_again(fresh, tmp_path, damage):
    fresh(tmp_path)
    plain = batch()
    for file in tmp_path.rglob("*.npz"):
        file.write_bytes(damage(file.read_bytes()))
    fresh(tmp_path)
    assert same(batch(), plain)
    assert all(shelf.read(file) is not None for file in tmp_path.rglob("*.npz"))


def flipped(raw: bytes) -> bytes:
    at = len(raw) // 3
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def test_a_run_needs_no_shelf(fresh, tmp_path):
    """Where the folder cannot be made, it is said and nothing else happens."""
    (tmp_path / "file").write_text("in the way")
    fresh(tmp_path / "file")
    with pytest.warns(UserWarning, match=shelf.VARIABLE):
        found = batch()
    fresh()
    assert same(batch(), found)


def test_what_is_made_at_once_is_not_kept(fresh, tmp_path):
    fresh(tmp_path)
    pipeline.batch_at(data.build("mqar", dict(n_train=64)), 0, "train", 16, 0)
    assert not list(tmp_path.rglob("*.npz"))
