"""Tasks that read prepared sets: what a row is under each protocol, which examples are whose, and at what price."""

import dataclasses
import itertools
import re
import time

import numpy as np
import pytest
from PIL import Image

from data import SPLITS, TASKS, build, imdb, pixels
from data.listops import TOKENS
from data.pipeline import FIXED, batch_at, eval_batches
from data.prepare import prepare
from data.prepared import open_set
from data.sets import SETS
from data.task import Task
from model.asked import Vectors
from model.errors import UserError
from tests import sets
from tests.processes import fork

pytestmark = pytest.mark.quick


@pytest.fixture
def made(sets_root):
    """Builds a task that reads the small sets."""

    def build_task(name: str, **section) -> Task:
        return build(name, {"root": str(sets_root)} | section)

    return build_task


def whole(task: Task, split: str) -> dict[str, np.ndarray]:
    return batch_at(task, 0, split, task.size(split), 0, order=None)


# --- images ---


@pytest.mark.parametrize("name", ["smnist", "psmnist", "sfashion", "scifar", "image"])
def test_every_image_is_in_one_split_and_the_last_of_the_training_set_validate(made, name):
    task = made(name, n_validation=13)
    assert task.sizes() == {"train": 87, "validation": 13, "test": 40}
    arrays = task.stored.arrays
    assert np.array_equal(whole(task, "train")["targets"], arrays["train_labels"][:87])
    assert np.array_equal(whole(task, "validation")["targets"], arrays["train_labels"][87:])
    assert np.array_equal(whole(task, "test")["targets"], arrays["test_labels"])
    assert task.baselines() == {"majority": np.bincount(arrays["test_labels"]).max() / 40}


@pytest.mark.parametrize(
    ("name", "n"), [("smnist", 60_000), ("sfashion", 60_000), ("scifar", 50_000), ("image", 50_000)]
)
def test_of_the_published_training_set_a_tenth_validates(name, n):
    assert TASKS[name].n_validation == n // 10


def test_a_token_is_a_grey_level_and_a_black_pixel_is_one_too(made, tmp_path):
    images = np.zeros((3, 28, 28), np.uint8)
    images[1] = np.arange(784).reshape(28, 28) % 256
    labels = np.array([3, 1, 4], np.uint8)
    sets.ready(tmp_path, "mnist", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    task = made("smnist", root=str(tmp_path), protocol="lra", n_validation=1)
    batch = whole(task, "test")
    assert (task.vocab_size, task.inputs) == (256, None)
    assert np.array_equal(batch["inputs"], images.reshape(3, 784)) and batch["inputs"].dtype == np.int32
    assert "segments" not in batch, "nothing of an image is padding"
    assert batch["targets"].tolist() == batch["attr_class"].tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    ("name", "section", "means", "stds"),
    [
        ("smnist", {}, [0], [1]),
        ("scifar", {}, [0.4914, 0.4822, 0.4465], [0.247, 0.243, 0.261]),
        ("scifar", {"channels": "grey"}, [122.6 / 255], [61 / 255]),
        ("image", {"protocol": "s4"}, [122.6 / 255], [61 / 255]),
    ],
)
def test_real_pixels_are_normalised_by_channel_row_after_row(made, name, section, means, stds):
    task = made(name, n_validation=10, **section)
    stored = task.stored.arrays["test_images"]
    if len(means) == 1 and name != "smnist":
        stored = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in stored])
    want = (stored.reshape(40, task.length, -1) / 255 - means) / stds
    batch = whole(task, "test")
    assert task.inputs == Vectors(len(means)) and task.vocab_size == 0
    assert batch["inputs"].dtype == np.float32
    np.testing.assert_allclose(batch["inputs"], want, atol=2e-6)


def test_the_grey_of_tensorflow_is_exact():
    """By fractions: the weighted sum of the channels / 255, times 255.5, rounded down."""
    rgb = np.concatenate([np.indices((9, 9, 9)).reshape(3, -1).T * 31, np.repeat([[0], [1], [128], [255]], 3, axis=1)])
    want = [(2989 * r + 5870 * g + 1140 * b) * 511 // (10_000 * 255 * 2) for r, g, b in rgb.tolist()]
    assert pixels.grey_of_tensorflow(*rgb.astype(np.uint64).T).tolist() == want
    assert want[-4:] == [0, 1, 128, 255], "grey stays the grey that it is"
    in_float32 = (rgb.astype(np.float32) / np.float32(255)) @ np.array([0.2989, 0.587, 0.114], np.float32)
    rounded = (in_float32 * np.float32(255.5)).astype(np.uint8)
    assert np.abs(rounded.astype(int) - want).max() <= 1 and (rounded != want).mean() < 0.01


def test_both_laws_of_grey_serve_their_protocol(made):
    colours = made("image", n_validation=10).stored.arrays["test_images"]
    lra = whole(made("image", n_validation=10), "test")["inputs"].reshape(40, 32, 32)
    assert np.array_equal(lra, pixels.grey_of_tensorflow(*np.moveaxis(colours.astype(np.uint64), -1, 0)))
    pillow = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in colours])
    assert np.array_equal(pixels.grey_of_pillow(*np.moveaxis(colours.astype(np.uint64), -1, 0)), pillow)
    assert (lra != pillow).any()


def test_permuted_digits_are_the_digits_in_one_other_order(made):
    plain, permuted = (whole(made(name, n_validation=10), "train")["inputs"] for name in ("smnist", "psmnist"))
    assert not np.array_equal(plain, permuted)
    order = np.random.RandomState(92916).permutation(784)
    assert np.array_equal(plain[:, order], permuted)
    assert order[:8].tolist() == [319, 576, 323, 107, 355, 716, 197, 20], "on every machine"
    other = whole(made("psmnist", n_validation=10, permutation=1), "train")["inputs"]
    assert not np.array_equal(other, permuted) and np.array_equal(np.sort(other, axis=1), np.sort(plain, axis=1))


def test_tokens_have_no_colours(made):
    with pytest.raises(UserError, match=r"data.scifar.channels is 'colour', but in protocol 'lra' .*; closest: grey"):
        made("scifar", protocol="lra")
    assert made("scifar", protocol="lra", channels="grey", n_validation=10).vocab_size == 256


# --- reviews ---


def reviews(task: Task, split: str) -> list[bytes]:
    """What a model reads of each, of tokens that are bytes + 1."""
    batch = whole(task, split)
    return [bytes((row[mask == 1] - 1).tolist()) for row, mask in zip(batch["inputs"], batch["segments"], strict=True)]


def test_reviews_are_bytes_cut_at_the_length_and_padded_below_it(made):
    task = made("imdb", length=40, n_validation=10)
    arrays = task.stored.arrays
    starts = arrays["train_starts"]
    want = [arrays["train_text"][i:j].tobytes() for i, j in itertools.pairwise(starts)]
    assert task.vocab_size == 257
    assert reviews(task, "train") == [text[:40] for text in want[:90]]
    assert reviews(task, "validation") == [text[:40] for text in want[90:]]
    batch = whole(task, "train")
    assert (batch["inputs"][batch["segments"] == 0] == 0).all() and (batch["inputs"][batch["segments"] == 1] > 0).all()
    assert len({len(text) for text in want}) > 20 and max(map(len, want)) > 40 > min(map(len, want))


def test_validation_is_held_out_or_as_the_benchmarks_have_it_the_test_set(made):
    honest, benchmark = made("imdb", n_validation=10), made("imdb", validation="test")
    assert not {*reviews(honest, "validation")} & {*reviews(honest, "train"), *reviews(honest, "test")}
    assert benchmark.sizes() == {"train": 100, "validation": 40, "test": 40}
    assert reviews(benchmark, "validation") == reviews(benchmark, "test") == reviews(honest, "test")
    assert reviews(benchmark, "train") == reviews(honest, "train") + reviews(honest, "validation")
    assert honest.baselines() == {"majority": 0.5}
    says = r"n_validation is 7, but validation='test' holds none out; closest: 2500, or validation=held_out"
    with pytest.raises(UserError, match=says):
        made("imdb", n_validation=7, validation="test")


def test_characters_that_are_common_have_ids_by_how_common_they_are(made, monkeypatch):
    monkeypatch.setattr(imdb, "COUNTED", 45)
    imdb.characters.cache_clear()
    task = made("imdb", protocol="s4", length=50, n_validation=10)
    arrays = task.stored.arrays
    starts = arrays["train_starts"]
    texts = [arrays["train_text"][i:j].tobytes().decode() for i, j in itertools.pairwise(starts)]
    read = "".join(text[:45] for text in texts)
    common = sorted((c for c in set(read) if read.count(c) >= 15), key=lambda c: (-read.count(c), c))
    ids = {c: 3 + i for i, c in enumerate(common)}
    assert "é" in ids and "9" in read and len(ids) < len(set(read)), "beyond ASCII, and some are too rare"
    assert task.vocab_size == 3 + len(ids)
    batch = whole(task, "train")
    for row, mask, text in zip(batch["inputs"], batch["segments"], texts, strict=False):
        want = [ids.get(c, imdb.UNKNOWN) for c in text[:49]] + [imdb.END]
        assert row.tolist() == want + [0] * (50 - len(want)) and mask.sum() == len(want)
    assert made("imdb", protocol="s4", length=9, n_validation=10).vocab_size == task.vocab_size, "at any length"
    imdb.characters.cache_clear()


def test_attributes_are_the_lengths_read(made):
    for section in ({}, {"protocol": "s4"}):
        task = made("imdb", length=40, n_validation=10, **section)
        batch = whole(task, "train")
        assert np.array_equal(2 ** batch["attr_length"] <= batch["segments"].sum(1), np.ones(90, bool))
        assert np.array_equal(batch["segments"].sum(1) < 2 ** (batch["attr_length"] + 1), np.ones(90, bool))


# --- ListOps ---


@pytest.fixture
def released(tmp_path):
    sets.put(tmp_path, sets.expressions(50))
    prepare(dataclasses.replace(SETS["lra_listops"], rows={}), tmp_path)

    def build_task(**section) -> Task:
        return build("listops", {"source": "released", "root": str(tmp_path)} | section)

    return build_task


def test_released_expressions_are_read_as_they_are(released):
    task = released()
    assert task.sizes() == dict.fromkeys(SPLITS, 50)
    batch = whole(task, "test")
    tokens = [
        " ".join(TOKENS[i] for i in row[mask == 1])
        for row, mask in zip(batch["inputs"], batch["segments"], strict=True)
    ]
    assert tokens == [f"[MAX 2 [SM {i // 10} 1 ] [MIN {i % 10} 9 ] ]" for i in range(50)]
    assert batch["targets"].tolist() == [max(2, (i // 10 + 1) % 10, i % 10) for i in range(50)]
    assert {task.attributes["depth"][i] for i in batch["attr_depth"]} == {"3"}
    assert {task.attributes["length"][i] for i in batch["attr_length"]} == {"8-15"}
    values = batch["targets"]  # the training trees are the same, and all have MAX at the root
    assert task.baselines() == dict.fromkeys(("majority", "root operator"), np.bincount(values).max() / 50)


@pytest.mark.parametrize("source", ["law", "released"])
def test_an_end_mark_is_all_that_the_other_protocol_adds(released, source):
    lra, s4 = (whole_or_some(released(source=source, length=2048, protocol=p)) for p in ("lra", "s4"))
    assert (released(source=source).vocab_size, released(source=source, protocol="s4").vocab_size) == (16, 17)
    n = lra["segments"].sum(1)
    assert np.array_equal(s4["segments"].sum(1), n + 1)
    assert (s4["inputs"][np.arange(len(n)), n] == 16).all()
    s4["inputs"][np.arange(len(n)), n] = 0
    assert np.array_equal(lra["inputs"], s4["inputs"])
    assert all(np.array_equal(lra[key], s4[key]) for key in ("targets", "attr_length", "attr_depth"))


def whole_or_some(task: Task) -> dict[str, np.ndarray]:
    return batch_at(task, 0, "test", 10, 0)


def test_a_mark_needs_a_place(released):
    with pytest.raises(UserError, match=r"data\.listops\.length is 1999; allowed: at least 2000"):
        released(source="law", length=1999, protocol="s4")


def test_the_law_says_nothing_of_what_was_released(released):
    with pytest.raises(
        UserError, match=r"data\.listops\.max_depth is 6, but source='released' has its own law; closest: 10"
    ):
        released(max_depth=6)


# --- all of them ---


CASES = {
    "image": {"n_validation": 10},
    "scifar": {"n_validation": 10},
    "imdb": {"n_validation": 10},
    "imdb characters": {"n_validation": 10, "protocol": "s4", "length": 4096},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_taken_from_the_disk_and_not_kept(made, case):
    task, before = made(case.split()[0], **CASES[case]), FIXED.bytes
    for batch in eval_batches(task, 0, "train", 32):
        batch.rows(np.arange(32))
    assert FIXED.bytes == before


@pytest.mark.parametrize("case", ["image", "scifar", "imdb"])
def test_a_batch_takes_well_below_a_millisecond(made, case):
    """The quickest of many, as others use the machine too."""
    task = made(case.split()[0], **CASES[case])
    seconds = []
    for step in range(100):
        start = time.perf_counter()
        batch_at(task, 0, "train", 50, step)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3


@pytest.mark.parametrize("name", ["smnist", "psmnist", "sfashion", "scifar", "image", "imdb"])
def test_where_the_bytes_lie_does_not_matter_but_which_they_are(made, name, tmp_path, sets_root):
    task = made(name, n_validation=10)
    arrays = dict(open_set(str(sets_root), task.set_name).arrays)
    sets.ready(tmp_path / "same", task.set_name, **arrays)
    labels = arrays["test_labels"].copy()
    labels[-1] = 1 - labels[-1] if labels[-1] < 2 else 0  # of an example that no fingerprint looks at
    sets.ready(tmp_path / "other", task.set_name, **arrays | {"test_labels": labels})
    same, other = (made(name, n_validation=10, root=str(tmp_path / place)) for place in ("same", "other"))
    assert same.fingerprint(0) == task.fingerprint(0) != other.fingerprint(0)


@pytest.mark.parametrize("name", ["smnist", "sfashion", "scifar", "image", "imdb", "listops"])
def test_a_set_that_is_not_there_is_said_with_the_command_that_makes_it(name, tmp_path):
    section = {"root": str(tmp_path)} | ({"source": "released"} if name == "listops" else {})
    with pytest.raises(
        UserError, match=rf"no prepared set .* make it by: python -m data.prepare \S+ --root={tmp_path}"
    ):
        build(name, section)


@pytest.mark.parametrize("name", ["smnist", "image", "imdb"])
def test_more_cannot_validate_than_there_are(made, name):
    with pytest.raises(UserError, match=r"n_validation is 100; allowed: 1 to 99 \(100 training .*\); closest: 99"):
        made(name, n_validation=100)


@pytest.mark.scale
@pytest.mark.parametrize(
    "flags",
    [
        ("image", "data.image.n_validation=20"),
        ("image", "data.image.n_validation=20", "data.image.protocol=s4"),
        ("imdb", "data.imdb.n_validation=20", "data.imdb.length=64", "data.imdb.protocol=s4"),
    ],
    ids=" ".join,
)
def test_a_model_trains_on_them(flags, sets_root, tmp_path):
    task, *rest = flags
    words = [
        f"data.task={task}",
        f"data.{task}.root={sets_root}",
        *rest,
        "model.causal=False",
        "steps=2",
        "batch_size=2",
        "eval_batches=1",
    ]
    command = fork(
        "train", "--config=configs/debug.py", f"--workdir={tmp_path / 'run'}", *(f"--config.{word}" for word in words)
    )
    assert command.wait(300) == 0, command.stderr
    assert re.search("accuracy", command.stdout)
