"""Published sets: read as released, and trusted only when whole."""

import errno
import fcntl
import hashlib
import io
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import build, prepared
from data.listops import TOKENS
from data.prepare import prepare
from data.prepared import is_whole, open_set, writing
from data.rng import Stream
from data.sets import lra_pathfinder
from data.sets.lra_listops import parse
from model.errors import UserError
from tests import sets
from tests.sets import npy_of, small

pytestmark = pytest.mark.quick


# --- formats ---


@pytest.mark.parametrize("packed", [sets.put, sets.gz])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files(tmp_path, name, packed):
    files = sets.digits(12)
    packed(tmp_path / name, files)
    prepare(small(name), tmp_path)
    arrays = open_set(str(tmp_path), name).arrays
    assert arrays["train_images"].shape == (12, 28, 28) and arrays["test_images"].shape == (6, 28, 28)
    assert arrays["train_images"].tobytes() == files["train-images-idx3-ubyte"][16:]
    assert arrays["test_labels"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_in_its_binary_release(tmp_path, packed):
    files = sets.photographs(3)
    sets.tar(tmp_path / "cifar-10-binary.tar.gz", files) if packed else sets.put(tmp_path, files)
    prepare(small("cifar10"), tmp_path)
    arrays = open_set(str(tmp_path), "cifar10").arrays
    assert arrays["train_images"].shape == (15, 32, 32, 3) and arrays["test_labels"].shape == (3,)
    record = np.frombuffer(files["cifar-10-batches-bin/data_batch_2.bin"], np.uint8)[3073 : 2 * 3073]
    assert arrays["train_labels"][4] == record[0]
    assert np.array_equal(arrays["train_images"][4, 5, 6], record[1:].reshape(3, 32, 32)[:, 5, 6])


def test_reviews_are_the_same_set_from_any_order_under_any_name(tmp_path):
    files = sets.reviews(5) | {"aclImdb/train/unsup/0_0.txt": b"no label", "aclImdb/README": b"words"}
    digests = set()
    for packed in (True, False):
        root = tmp_path / str(packed)
        root.mkdir()
        renamed = {name.replace("_8", "_9"): text for name, text in reversed(files.items())}
        sets.tar(root / "aclImdb_v1.tar.gz", renamed) if packed else sets.put(root, files)
        prepare(small("imdb"), root)
        digests.add(open_set(str(root), "imdb").digest)
    assert len(digests) == 1
    arrays = open_set(str(root), "imdb").arrays
    starts, labels = arrays["train_starts"], arrays["train_labels"]
    texts = [arrays["train_text"][i:j].tobytes() for i, j in itertools.pairwise(starts)]
    assert texts == sorted(texts, key=lambda text: hashlib.sha256(text).digest())
    assert {t: int(y) for t, y in zip(texts, labels, strict=True)} == {
        text: int("/pos/" in name) for name, text in sets.reviews(5).items() if "/train/" in name
    }


@pytest.mark.parametrize("packed", [True, False])
def test_enwik8(tmp_path, packed):
    text = os.urandom(5000)
    sets.zipped(tmp_path / "enwik8.zip", {"enwik8": text}) if packed else sets.put(tmp_path, {"enwik8": text})
    prepare(small("enwik8"), tmp_path)
    assert open_set(str(tmp_path), "enwik8").arrays["bytes"].tobytes() == text


@pytest.mark.parametrize("place", ["lra_release.gz", "lra_release/lra_release/", "lra_release/", ""])
def test_released_listops(tmp_path, place):
    files = sets.expressions(25) | {"tsv_data/other.tsv": b"x"}
    if place.endswith(".gz"):
        sets.tar(tmp_path / place, {f"lra_release/lra_release/{name}": text for name, text in files.items()})
    else:
        sets.put(tmp_path / place, files)
    prepare(small("lra_listops"), tmp_path)
    arrays = open_set(str(tmp_path), "lra_listops").arrays
    start, end = arrays["validation_starts"][[13, 14]]
    tokens = [TOKENS[i] for i in arrays["validation_tokens"][start:end]]
    assert " ".join(tokens) == "[MAX 1 [SM 1 1 ] [MIN 3 9 ] ]" and arrays["validation_values"][13] == 3
    assert [len(arrays[f"{split}_values"]) for split in ("train", "validation", "test")] == [25] * 3


def test_expressions_have_the_values_that_the_law_gives_them():
    task, stream = build("listops", {}), Stream(0, "tests")
    for i in range(20):
        want, tokens, _ = task.make(stream.at(i))
        row = [" ".join(TOKENS[i] for i in tokens).encode(), str(want).encode()]
        ids, value = parse(row)
        assert np.array_equal(ids, tokens) and value == want
        with pytest.raises(ValueError, match=f"where the expression gives {want}"):
            parse([row[0], str((want + 1) % 10).encode()])


def test_released_pairs_of_papers(tmp_path):
    sets.put(tmp_path, sets.papers(4))
    prepare(small("lra_aan"), tmp_path)
    arrays = open_set(str(tmp_path), "lra_aan").arrays
    assert arrays["validation_labels"].tolist() == [0, 1, 0, 1]
    first, second = (arrays[f"validation_text{i}"][slice(*arrays[f"validation_starts{i}"][2:4])] for i in (1, 2))
    assert (first.tobytes(), second.tobytes()) == (b"first eval 2", b"second yy")


def test_papers_are_cut_where_no_model_reads(tmp_path):
    files = sets.papers(1)
    sets.put(tmp_path, {name: text.replace(b"first", b"z" * 20_000) for name, text in files.items()})
    prepare(small("lra_aan"), tmp_path)
    assert open_set(str(tmp_path), "lra_aan").arrays["train_starts1"].tolist() == [0, 16_000]


@pytest.mark.parametrize("packed", [True, False])
def test_pathfinder_in_the_order_of_its_metadata_less_what_is_empty(tmp_path, packed):
    files = sets.curves(3)
    files["pathfinder32/curv_baseline/imgs/9/sample_1.png"] = b""
    sets.tar(tmp_path / "lra_release.gz", files) if packed else sets.put(tmp_path, files)
    prepare(small("lra_pathfinder32"), tmp_path)
    found = open_set(str(tmp_path), "lra_pathfinder32")
    assert {name: array.shape for name, array in found.arrays.items()} == {
        "easy_images": (5, 32, 32),
        "easy_labels": (5,),
        "intermediate_images": (6, 32, 32),
        "intermediate_labels": (6,),
        "hard_images": (6, 32, 32),
        "hard_labels": (6,),
    }
    assert found.arrays["easy_labels"].tolist() == [1, 1, 0, 1, 0], "9 before 10, and the second of 9 left out"
    last = files["pathfinder32/curv_contour_length_14/imgs/10/sample_2.png"]
    assert np.array_equal(found.arrays["hard_images"][5], np.asarray(sets.Image.open(io.BytesIO(last))))
    assert found.notes == ("pathfinder32/curv_baseline/imgs/9/sample_1.png is empty and left out",)


def test_a_set_is_mapped_and_cannot_be_written_to(tmp_path):
    sets.ready(tmp_path, "one", numbers=np.arange(5))
    numbers = open_set(str(tmp_path), "one").arrays["numbers"]
    assert isinstance(numbers.base, np.memmap) and not numbers.flags.writeable


def test_the_digest_is_of_names_types_shapes_and_bytes(tmp_path):
    arrays = [
        {"a": np.arange(4)},
        {"b": np.arange(4)},
        {"a": np.arange(4).reshape(2, 2)},
        {"a": np.arange(4).astype(np.uint64)},
        {"a": np.array([0, 1, 2, 4])},
        {"a": np.arange(4), "b": np.arange(4)},
    ]
    digests = []
    for i, one in enumerate(arrays):
        sets.ready(tmp_path / str(i), "one", **one)
        digests.append(open_set(str(tmp_path / str(i)), "one").digest)
    assert len(set(digests)) == len(arrays)
    sets.ready(tmp_path / "elsewhere", "one", **arrays[0])
    assert open_set(str(tmp_path / "elsewhere"), "one").digest == digests[0]


# --- whole or not at all ---


def test_a_set_that_was_not_finished_is_begun_anew(tmp_path):
    part = tmp_path / "prepared" / ".enwik8.part"
    sets.put(part, {"bytes.npy": b"half of it", "other.npy": b""})
    sets.put(tmp_path, {"enwik8": b"text"})
    prepare(small("enwik8"), tmp_path)
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == [".enwik8.lock", "enwik8"]
    assert list(open_set(str(tmp_path), "enwik8").arrays) == ["bytes"]


def stopped(root: Path, monkeypatch: pytest.MonkeyPatch, after: int, how: type[BaseException]) -> None:
    """Twelve pictures, the process stopped by that exception while it reads the one `after` so many."""
    read, numbers = lra_pathfinder.picture, itertools.count()
    part = root / "prepared" / ".lra_pathfinder32.part"

    def failing(entry, side):
        if next(numbers) == after:
            shutil.copytree(part, root / "left")
            raise how
        return read(entry, side)

    with monkeypatch.context() as patched, pytest.raises(how):
        patched.setattr(lra_pathfinder, "picture", failing)
        prepare(small("lra_pathfinder32"), root)
    if how is Killed:  # nobody tidies up
        part.parent.mkdir()
        (root / "left").rename(part)


class Killed(BaseException):
    pass


def pictures_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read, seen = lra_pathfinder.picture, []
    with monkeypatch.context() as patched:
        patched.setattr(lra_pathfinder, "picture", lambda entry, side: seen.append(entry.path) or read(entry, side))
        prepare(small("lra_pathfinder32"), root)
    return seen


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("packed", [True, False])
def test_a_long_conversion_goes_on_where_it_was_stopped(tmp_path, monkeypatch, packed, how):
    files = sets.curves(2)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        sets.tar(tmp_path / name / "lra_release.gz", files) if packed else sets.put(tmp_path / name, files)
    monkeypatch.setattr(lra_pathfinder, "EVERY", 4)
    assert len(pictures_read(tmp_path / "whole", monkeypatch)) == 12
    stopped(tmp_path / "stopped", monkeypatch, 10, how)
    with pytest.raises(UserError, match="no prepared set"):
        open_set(str(tmp_path / "stopped"), "lra_pathfinder32")
    assert len(pictures_read(tmp_path / "stopped", monkeypatch)) == 4, "eight were noted as done"
    found = [open_set(str(tmp_path / name), "lra_pathfinder32") for name in ("whole", "stopped")]
    assert found[0].digest == found[1].digest and is_whole(tmp_path / "stopped", "lra_pathfinder32")
    place = prepared.folder(tmp_path / "stopped", "lra_pathfinder32")
    assert sorted(path.stem for path in place.iterdir()) == sorted(["manifest", *found[0].arrays])


@pytest.mark.parametrize("change", ["picture", "label", "array", "record"])
def test_a_conversion_of_what_has_changed_since_is_begun_anew(tmp_path, monkeypatch, change):
    files, part = sets.curves(2), tmp_path / "prepared" / ".lra_pathfinder32.part"
    sets.put(tmp_path, files)
    monkeypatch.setattr(lra_pathfinder, "EVERY", 4)
    stopped(tmp_path, monkeypatch, 10, Killed)
    if change == "picture":
        os.utime(tmp_path / "pathfinder32/curv_baseline/imgs/9/sample_0.png", ns=(1, 1))
    elif change == "label":
        metadata = tmp_path / "pathfinder32/curv_baseline/metadata/9.npy"
        metadata.write_bytes(metadata.read_bytes().replace(b"0 1 1.8", b"0 0 1.8"))
    elif change == "array":
        (part / "hard_images.npy").write_bytes(b"")
    else:
        (part / prepared.DONE).write_bytes(b"{")
    assert len(pictures_read(tmp_path, monkeypatch)) == 12
    labels = open_set(str(tmp_path), "lra_pathfinder32").arrays["easy_labels"].tolist()
    assert labels == ([0, 0, 0, 1] if change == "label" else [1, 0, 0, 1])


def test_a_set_stays_as_it_was_if_making_it_anew_fails(tmp_path):
    sets.ready(tmp_path, "one", numbers=np.arange(5))
    with pytest.raises(ZeroDivisionError), writing(tmp_path, "one") as writer:
        writer.append("numbers", np.arange(3))
        raise ZeroDivisionError
    assert open_set(str(tmp_path), "one").arrays["numbers"].tolist() == [0, 1, 2, 3, 4] and is_whole(tmp_path, "one")
    sets.ready(tmp_path, "one", numbers=np.arange(2))
    assert open_set(str(tmp_path), "one").arrays["numbers"].tolist() == [0, 1]


CUT = b'{"format": 1, "arrays": {"numbers": {"dtype": "<i8", "shape": [5]}}, "notes": []}'


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("numbers.npy", None, "No such file"),
        ("numbers.npy", b"", ""),
        ("numbers.npy", b"\x93NUMPY", ""),
        ("manifest.json", b"{", ""),
        ("manifest.json", b"[]", ""),
        ("manifest.json", b'{"format": 2}', "format 2, where 1 is read"),
        ("manifest.json", b'{"format": 1}', "KeyError: 'arrays'"),
        ("manifest.json", CUT, "KeyError: 'sha256'"),
    ],
)
def test_a_damaged_set_is_refused_with_the_command_that_makes_it_anew(tmp_path, file, content, says):
    sets.ready(tmp_path, "one", numbers=np.arange(5))
    path = tmp_path / "prepared" / "one" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    command = re.escape(f"make it anew by: python -m data.prepare one --root={tmp_path}")
    with pytest.raises(UserError, match=f"'one' below .* is damaged .*{re.escape(says)}.*{command}") as error:
        open_set(str(tmp_path), "one")
    assert "\n" not in str(error.value) and not is_whole(tmp_path, "one")


def test_a_manifest_that_lacks_an_array_is_told_and_the_set_made_anew(tmp_path):
    sets.put(tmp_path, sets.expressions(5))
    prepare(small("lra_listops"), tmp_path)
    path = tmp_path / "prepared" / "lra_listops" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["arrays"]["train_tokens"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"damaged .manifest.json does not name train_tokens.; make it anew by"):
        open_set(str(tmp_path), "lra_listops")
    assert not is_whole(tmp_path, "lra_listops")
    prepare(small("lra_listops"), tmp_path)
    assert is_whole(tmp_path, "lra_listops")


class Trap:
    """A pickle that does something when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_read(tmp_path):
    sets.ready(tmp_path, "one", numbers=np.arange(5))
    for content in (pickle.dumps(Trap(tmp_path / "sprung")), npy_of(Trap(tmp_path / "sprung"))):
        (tmp_path / "prepared" / "one" / "numbers.npy").write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            open_set(str(tmp_path), "one")
    assert not (tmp_path / "sprung").exists()


def test_one_flipped_bit_is_found_and_the_set_made_anew(tmp_path):
    sets.put(tmp_path, {"enwik8": b"text of some length"})
    prepare(small("enwik8"), tmp_path)
    path = tmp_path / "prepared" / "enwik8" / "bytes.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    assert not is_whole(tmp_path, "enwik8")
    prepare(small("enwik8"), tmp_path)
    assert is_whole(tmp_path, "enwik8")


def test_one_process_at_a_time_makes_a_set(tmp_path):
    with writing(tmp_path, "one") as writer:
        writer.append("numbers", np.arange(3))
        with pytest.raises(UserError, match="another process is making the set 'one'"), writing(tmp_path, "one"):
            pass
    assert is_whole(tmp_path, "one")


@pytest.mark.parametrize("there", ["", "downloads", "downloads/prepared", "downloads/prepared/.one.lock"])
def test_what_failed_leaves_the_folders_as_they_were(tmp_path, there):
    if there.endswith(".lock"):
        sets.put(tmp_path, {there: b""})
    else:
        (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "downloads", "one") as writer:
        writer.append("numbers", np.arange(3))
        raise ZeroDivisionError
    assert sorted(tmp_path.rglob("*")) == before


def test_a_lock_that_a_failing_process_removes_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """Between opening the file and holding it: the other one fails, and removes the file and its folder."""
    path, flock, calls = tmp_path / "prepared" / ".one.lock", fcntl.flock, []

    def late(lock, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
            path.parent.rmdir()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with writing(tmp_path, "one") as writer:
        writer.append("numbers", np.arange(3))
        with pytest.raises(UserError, match="another process is making the set"), writing(tmp_path, "one"):
            pass
    assert is_whole(tmp_path, "one")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_to_with_a_warning(tmp_path, monkeypatch, caplog, code):
    def none(lock, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level("WARNING", "absl"):
        sets.ready(tmp_path, "one", numbers=np.arange(3))
    assert is_whole(tmp_path, "one") and "its file system has no locks" in caplog.text


def test_a_lock_that_fails_otherwise_is_told_as_it_is(tmp_path, monkeypatch):
    def broken(lock, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(UserError, match=r"cannot write below .*: Input/output error"):
        sets.ready(tmp_path, "one", numbers=np.arange(3))


def test_the_command_that_makes_a_set_can_be_pasted(tmp_path):
    root = tmp_path / "my own 'data'"
    with pytest.raises(UserError) as error:
        open_set(str(root), "one")
    words = shlex.split(str(error.value).partition("make it by: ")[2])
    assert words == ["python", "-m", "data.prepare", "one", f"--root={root}"]


def test_rows_that_come_one_after_another_are_one_array(tmp_path):
    parts = [np.full((n, 3), n, np.int16) for n in (1, 12345, 0, 2)]
    with writing(tmp_path, "one") as writer:
        for part in parts:
            writer.append("rows", part)
    assert np.array_equal(open_set(str(tmp_path), "one").arrays["rows"], np.concatenate(parts))
