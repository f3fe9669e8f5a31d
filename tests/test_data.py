"""The data room: purity, hosts, restarts, mistakes."""

import dataclasses
import itertools
from typing import Literal, get_args, get_origin

import numpy as np
import pytest

from data import SPLITS, TASKS, Task, bins, build
from data.pipeline import Batch, batch_at, eval_batches, gather, stream
from data.rng import Stream, distinct
from data.stored import Stored
from model.asked import Vectors
from model.errors import UserError
from tests.sets import ready
from tests.stores import stores

SHORT_LISTOPS = {"length": 100, "max_depth": 6, "min_length": 10, "max_length": 100}
SECTIONS = {
    "mqar": {"length": 32, "vocab_size": 64, "n_pairs": 6, "min_pairs": 2, "random_fillers": True},
    "mqar_mix": {"length": 32, "vocab_size": 64, "train": ((16, 2, 40), (32, 6, 30)), "test": ((16, 4), (32, 8))},
    "selective_copying": {"length": 40, "n_tokens": 5},
    "copying": {"length": 40, "n_tokens": 5},
    "induction": {"length": 20},
    "lookup": {"length": 60, "vocab_size": 30, "n_questions": 3, "digits": 2},
    "delayed_recall": {"length": 33, "min_distance": 2},
    "mad_recall": {"length": 32, "n_train": 70, "n_test": 20},
    "mad_fuzzy_recall": {"length": 40, "n_train": 70, "n_test": 20},
    "mad_noisy_recall": {"length": 32, "n_train": 70, "n_test": 20, "noise": 0.4},
    "mad_selective_copying": {"length": 40, "n_tokens": 5, "n_train": 70, "n_test": 20},
    "mad_compression": {"length": 20, "n_train": 70, "n_test": 20},
    "mad_memorization": {"length": 20, "n_train": 70, "n_test": 20},
    "listops": SHORT_LISTOPS | {"n_train": 50, "n_validation": 21, "n_test": 10},
    "running_sum": {"length": 20, "modulus": 3},
    "permutations": {"length": 20},
    "majority": {"length": 12, "vocab_size": 6},
    "text": {"length": 16},
    "noise": {"length": 16},
    "adding": {"length": 20},
    "shapes": {"side": 16},
    "shape_questions": {"side": 20},
    "matching": {"length": 12},
    "copy": {"length": 9, "min_length": 6, "vocab_size": 8},
    "reverse": {"length": 9, "min_length": 5},
    "sort": {"length": 9, "min_length": 6},
    "dates": {},
    "translate": {"length": 12, "nouns": 5, "verbs": 3, "adjectives": 2},
    "smnist": {"n_validation": 21},
    "psmnist": {"n_validation": 21},
    "sfashion": {"n_validation": 21},
    "scifar": {"n_validation": 21},
    "image": {"n_validation": 21},
    "imdb": {"length": 64, "n_validation": 21},
    "pathfinder": {"difficulty": "easy", "n_train": 70, "n_validation": 30, "n_test": 30},
    "aan": {"length": 30},
    "wiki_links": {"length": 30},
    "passkey": {"length": 24, "digits": 3},
    "needle": {"length": 24, "value_words": 2},
    "multi_key": {"length": 24, "n_needles": 3},
    "multi_value": {"length": 32, "n_values": 3},
    "multi_query": {"length": 32, "n_queries": 3},
    "variable_tracking": {"length": 40, "n_chains": 2, "n_hops": 2},
    "common_words": {"length": 64, "names": 64, "n_common": 3, "common_times": 10, "other_times": 2},
}


# Of fields that are neither numbers nor one of a few, another value.
OTHERWISE = {"train": ((16, 2, 40),), "test": ((16, 4),)}


@pytest.fixture(scope="session")
def root(sets_root):
    """Where small sets are prepared."""
    for name, arrays in stores().items():
        ready(sets_root, name, **arrays)
    return sets_root


@pytest.fixture(params=TASKS)
def task(request, book, root) -> Task:
    lies = {"path": str(book), "root": str(root)}
    lies = {field.name: lies[field.name] for field in dataclasses.fields(TASKS[request.param]) if field.name in lies}
    return build(request.param, SECTIONS[request.param] | lies)


def examples(task: Task, split: str, n: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    made = gather(task, seed, split, 0, np.arange(n), np.arange(n))
    return [{key: array[i] for key, array in made.items()} for i in range(n)]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def whole(batch: Batch) -> dict[str, np.ndarray]:
    return batch.rows(np.arange(batch.size))


def joined(parts: list[dict]) -> dict:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def holds(label: str, x: int) -> bool:
    """Whether a bin's label, "4-7" or "1", covers a number."""
    low, _, high = label.partition("-")
    return int(low) <= x <= int(high or low)


# --- every task ---


def test_a_task_whose_answers_stand_among_its_inputs_says_so(task):
    """Else a model that sees ahead would copy them."""
    batch = whole(Batch(task, 0, "test", 20, 0, order=None))
    if task.kind != "lm" or "source" in batch or batch["inputs"].dtype != np.int32:
        return
    inputs, targets, weights = (batch[key] for key in ("inputs", "targets", "weights"))
    at = batch.get("at", np.broadcast_to(np.arange(targets.shape[1]), targets.shape))
    following = np.take_along_axis(inputs, np.minimum(at + 1, inputs.shape[1] - 1), axis=1)
    shown = (following == targets) & (at + 1 < inputs.shape[1])
    often = [shown[asked, i].mean() for i, asked in enumerate((weights > 0).T) if asked.sum() > 4]
    assert (max(often, default=0) > 0.95) == task.shows_answers


@pytest.mark.quick
def test_batches_are_pure(task):
    forward = [batch_at(task, 3, "train", 4, step) for step in range(4)]
    backward = [batch_at(task, 3, "train", 4, step) for step in reversed(range(4))][::-1]
    assert all(map(same, forward, backward))
    assert not same(forward[0], forward[1])
    if task.name != "text" and not (isinstance(task, Stored) and task.on_disk):
        assert not same(forward[0], batch_at(task, 4, "train", 4, 0)), "another seed makes other examples"


@pytest.mark.quick
@pytest.mark.parametrize("split", SPLITS)
def test_examples_keep_the_contract(task, split):
    B = 8
    batch = batch_at(task, 0, split, B, 0)
    reals = {"weights", "image"} | ({"inputs"} if task.inputs else set())
    if task.inputs is None:
        assert batch["inputs"].shape == (B, task.target_length)
        assert 0 <= batch["inputs"].min() <= batch["inputs"].max() < task.vocab_size
    elif isinstance(task.inputs, Vectors):
        assert batch["inputs"].shape == (B, task.length, task.inputs.channels)
    else:
        assert batch["inputs"].shape == (B, *dataclasses.astuple(task.inputs))
    if task.asked.source:
        assert batch["source"].shape == batch["source_segments"].shape == (B, task.length)
        assert 0 <= batch["source"].min() <= batch["source"].max() < task.vocab_size
    assert ("image" in batch) == (task.image is not None)
    assert task.image is None or batch["image"].shape == (B, *dataclasses.astuple(task.image))
    assert ("other" in batch) == task.pair
    assert not task.pair or batch["other"].shape == batch["other_segments"].shape == batch["inputs"].shape
    assert all(a.dtype == (np.float32 if key in reals else np.int32) for key, a in batch.items())
    for key in {"segments", "source_segments", "other_segments"} & set(batch):
        assert set(np.unique(batch[key])) <= {0, 1} and (np.diff(batch[key]) <= 0).all(), "padding is behind a row"
    if task.kind == "lm":
        assert batch["targets"].max() < task.vocab_size
        at = batch.get("at", batch["inputs"])
        assert at.shape == batch["targets"].shape == batch["weights"].shape
        assert "at" not in batch or 0 <= at.min() <= at.max() < task.length
    elif task.kind == "label":
        assert batch["targets"].shape == batch["weights"].shape == batch.get("at", batch["inputs"]).shape
        assert batch["targets"].max() < task.n_classes
    else:
        assert task.kind == "classify"
        assert batch["targets"].shape == batch["weights"].shape == (B,)
        assert batch["targets"].max() < task.n_classes
    assert {key for key in batch if key.startswith("attr_")} == {f"attr_{name}" for name in task.attributes}
    for name, labels in task.attributes.items():
        assert batch[f"attr_{name}"].shape == batch["targets"].shape
        assert 0 <= batch[f"attr_{name}"].min() <= batch[f"attr_{name}"].max() < len(labels)


@pytest.mark.quick
@pytest.mark.parametrize("size", [8, 13])  # of which 13 shares out evenly among nobody
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_made_apart_are_those_of_the_whole_batch(task, split, size):
    whole = batch_at(task, 0, split, size, 2)
    cut = [np.arange(0, 3), np.arange(3, 4), np.arange(4, size)]
    dealt = [np.arange(i, size, 3) for i in range(3)]
    held_twice = [np.array([5, 1, 5, 6])]
    for shares in (cut, dealt, held_twice):
        made = joined([batch_at(task, 0, split, size, 2, rows) for rows in shares])
        assert same(made, {key: array[np.concatenate(shares)] for key, array in whole.items()})


@pytest.mark.quick
def test_a_restarted_stream_is_the_tail_of_the_first(task):
    first = list(stream(task, 0, 4, stop=9))
    assert first[5:] == list(stream(task, 0, 4, start=5, stop=9)) == list(itertools.islice(stream(task, 0, 4, 5), 4))
    assert all(same(whole(first[step]), batch_at(task, 0, "train", 4, step)) for step in range(9))
    rolled_back = next(stream(task, 0, 4, start=5, offset=3))
    assert same(whole(rolled_back), whole(first[8]))


def test_splits_differ(task):
    seen = {
        s: {e.get("image", e["inputs"]).tobytes() for e in examples(task, s, min(10, task.size(s) or 10))}
        for s in SPLITS
    }
    assert all(len(seen[s]) == min(10, task.size(s) or 10) for s in SPLITS)
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


@pytest.mark.quick
def test_fingerprint_changes_with_anything_that_changes_the_data(task, monkeypatch):
    prints = {task.fingerprint(0), task.fingerprint(1)}
    assert task.fingerprint(0) in prints and len(prints) == 2
    changes = 2
    for field in dataclasses.fields(task):
        value = getattr(task, field.name)
        if field.name in ("path", "root", "source", "random_fillers"):
            continue
        if task.name == "listops":  # room for larger trees, smaller bounds
            step = {"length": 8, "min_length": -1, "max_length": -1}.get(field.name, 1)
        else:
            step = -0.01 if isinstance(value, float) and value > 0.01 else 0.5 if value == 0.01 else 2
        one_of = get_args(field.type) if get_origin(field.type) is Literal else ()
        if one_of:
            other = next(name for name in one_of if name != value)
        else:
            other = OTHERWISE[field.name] if isinstance(value, tuple) else value + step
        held_out = {"n_validation": 2500} if (task.name, field.name) == ("imdb", "validation") else {}  # of none
        try:
            prints.add(dataclasses.replace(task, **{field.name: other}, **held_out).fingerprint(0))
        except UserError:
            bytes_alone = field.name == "fillers" and task.path
            assert bytes_alone or (task.name, field.name) == ("scifar", "protocol"), "a token has no colours"
            continue
        changes += 1
    assert len(prints) == changes
    made = type(task).examples
    monkeypatch.setattr(type(task), "examples", lambda *args: made(*args) | {"targets": made(*args)["targets"] + 1})
    assert task.fingerprint(0) not in prints, "changed code shows"


def test_baselines_are_accuracies(task):
    assert task.baselines() and all(0 < value < 1 for value in task.baselines().values())


@pytest.mark.quick
def test_every_task_is_listed_under_its_name_with_one_line():
    for name, cls in TASKS.items():
        assert cls.name == name
        assert len(cls.__doc__.splitlines()[0]) < 110
        for field in dataclasses.fields(cls):
            assert isinstance(field.default, int | float | str | bool | tuple)


# --- the pipeline ---


def identities(batches: list[dict]) -> list[bytes]:
    return [row.tobytes() for batch in batches for row in batch["inputs"]]


@pytest.mark.quick
def test_epochs_are_different_permutations_of_a_finite_set():
    task = build("mqar", {"n_train": 10})
    rows = identities([batch_at(task, 0, "train", 4, step) for step in range(10)])  # batches straddle epochs
    epochs = [rows[e : e + 10] for e in range(0, 40, 10)]
    assert all(len(set(epoch)) == 10 and set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = identities([batch_at(task, 0, "train", 10, 0, order=1)])
    assert set(other) == set(epochs[0]) and other != epochs[0], "another order, the same examples"
    assert not set(identities([batch_at(task, 1, "train", 10, 0)])) & set(rows), "another seed, other examples"


@pytest.mark.quick
def test_order_draws_other_training_examples_but_the_same_validation():
    task = build("induction", {})
    assert not same(batch_at(task, 0, "train", 4, 0), batch_at(task, 0, "train", 4, 0, order=1))
    assert same(batch_at(task, 0, "test", 4, 0), batch_at(task, 0, "test", 4, 0, order=1))


@pytest.mark.parametrize("split", ["validation", "train"])
def test_evaluation_goes_once_through_a_finite_split_in_order(split):
    n = 21
    task = build("listops", SHORT_LISTOPS | {"n_train": n, "n_validation": n})
    batches = [whole(batch) for batch in eval_batches(task, 0, split, 8)]
    assert [batch["inputs"].shape for batch in batches] == [(8, 100)] * 3
    assert np.concatenate([batch["weights"] for batch in batches]).tolist() == [1] * n + [0] * 3
    assert identities(batches)[:n] == [e["inputs"].tobytes() for e in examples(task, split, n)]
    assert len(list(eval_batches(task, 0, split, 8, 2))) == 2
    assert len(list(eval_batches(task, 0, split, 8, 9))) == 3, "there is no more than the split"


@pytest.mark.quick
def test_evaluation_of_an_endless_split_needs_a_number_of_batches():
    task = build("induction", {})
    got = [whole(batch) for batch in eval_batches(task, 0, "validation", 4, 3)]
    assert len(got) == 3 and all(batch["weights"].all() for batch in got)
    with pytest.raises(UserError, match="endless validation split"):
        next(eval_batches(task, 0, "validation", 4, 0))


@pytest.mark.quick
def test_streams_of_numbers_restart_exactly_and_differ_by_every_part_of_the_address():
    random = Stream(0, "train")
    first = random.at(7).random(5)
    assert np.array_equal(random.at(7).random(5), first)
    words = random.at(7).integers(2**32, size=3, dtype=np.uint32)  # leaves half a word behind
    assert np.array_equal(random.at(7).integers(2**32, size=3, dtype=np.uint32), words)
    plain = np.random.Generator(np.random.Philox(key=random.key, counter=[0, 0, 7, 0]))
    assert np.array_equal(plain.random(5), first), "the stream is Philox at counter (0, 0, index, 0)"
    others = [Stream(1, "train").at(7), Stream(0, "test").at(7), Stream(0, "train", 1).at(7)]
    others.append(Stream(0, "train").at(8))
    assert all(not np.isin(other.random(5), first).any() for other in others)


@pytest.mark.quick
@pytest.mark.parametrize(("n", "k"), [(12, 3), (5, 4), (12, 6)])
def test_distinct_numbers_are_uniform(n, k):
    rng, trials = Stream(0, "train").at(0), 4000
    draws = distinct(rng, trials, n, k)
    assert all(len(set(row)) == k for row in draws.tolist())
    for column in draws.T:
        share = np.bincount(column, minlength=n) / trials
        assert np.abs(share - 1 / n).max() < 4 * np.sqrt(1 / n / trials)


@pytest.mark.quick
def test_power_of_two_bins():
    assert bins.labels(9) == ("1", "2-3", "4-7", "8-15")
    assert bins.number(np.array([1, 2, 3, 4, 7, 8, 2**30 - 1, 2**30])).tolist() == [0, 1, 1, 2, 2, 3, 29, 30]


# --- mistakes ---


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "section", "says"),
    [
        ("mqra", {}, "unknown task 'mqra'; choose from .*; closest: mqar"),
        ("mqar", {"lenght": 8}, "unknown field data.mqar.lenght; choose from length, .*; closest: length"),
        ("mqar", {"length": "64"}, "data.mqar.length is '64'; allowed: a whole number from 4 "),
        ("mqar", {"random_fillers": 1}, "data.mqar.random_fillers is 1; allowed: True or False"),
        ("mqar", {"length": 63}, "data.mqar.length is 63; allowed: .* that is even; closest: 64"),
        (
            "mqar",
            {"n_pairs": 17},
            r"n_pairs is 17; allowed: 1 to 16 \(a quarter of length 64\); closest: 16",
        ),
        ("mqar", {"min_pairs": 5}, r"min_pairs is 5; allowed: 0 to 4 \(n_pairs\); closest: 4"),
        ("mqar", {"vocab_size": 9}, "vocab_size is 9; allowed: at least 10 .*; closest: 10"),
        ("mqar", {"alpha": 0.0}, "alpha is 0.0; allowed: a number of at least 0.001; closest: 0.001"),
        ("mqar", {"n_train": -1}, "n_train is -1; allowed: a whole number from 0 .*; closest: 0"),
        ("selective_copying", {"n_tokens": 0}, "n_tokens is 0; allowed: a whole number from 1 .*; closest: 1"),
        ("selective_copying", {"length": 30, "n_tokens": 16}, "allowed: 1 to 15 .*; closest: 15"),
        ("selective_copying", {"vocab_size": 2}, "vocab_size is 2; allowed: a whole number from 3 .*; closest: 3"),
        ("induction", {"length": 2}, "length is 2; allowed: a whole number from 3 .*; closest: 3"),
        ("induction", {"vocab_size": 2}, "vocab_size is 2; allowed: a whole number from 3 .*; closest: 3"),
        ("listops", {"length": 1998}, "length is 1998; allowed: at least 1999 .*; closest: 1999"),
        ("listops", {"max_length": 501}, "max_length is 501; allowed: at least 502"),
        ("listops", {"min_length": 0}, "min_length is 0; allowed: a whole number from 1 "),
        (
            "listops",
            {"max_depth": 3, "max_args": 3},
            "min_length is 500; allowed: 1 to 16 .*largest tree has 17",
        ),
        ("listops", {"n_test": 0}, "n_test is 0; allowed: a whole number from 1 "),
        ("text", {"length": 0}, "length is 0; allowed: a whole number from 1 "),
        ("text", {"test": 0.5}, "test is 0.5; allowed: a number from 0.0001 to 0.4; closest: 0.4"),
    ],
)
def test_mistakes_are_told_in_one_line(name, section, says):
    with pytest.raises(UserError, match=says) as error:
        build(name, section)
    assert "\n" not in str(error.value)


@pytest.mark.quick
def test_a_whole_number_may_stand_for_a_float():
    assert build("mqar", {"alpha": 1}).alpha == 1


@pytest.mark.quick
def test_mistakes_in_the_pipeline():
    task = build("induction", {})
    with pytest.raises(UserError, match=r"unknown split 'valid'; choose from .*; closest: validation"):
        task.size("valid")
    with pytest.raises(UserError, match="batch_size is 0"):
        batch_at(task, 0, "train", 0, 0)


def test_hopeless_listops_bounds_end_in_an_error(monkeypatch):
    monkeypatch.setattr("data.listops._TRIES", 50)
    task = build("listops", {"max_depth": 3, "min_length": 119, "max_length": 200, "length": 200})
    with pytest.raises(UserError, match=r"no tree of 119 < tokens < 200 in 50 tries; lower data.listops.min"):
        examples(task, "train", 1)
