"""Published sets: read as released, refused in one line if they are not, and trusted only when whole."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import itertools
import os
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from data import prepared
from data.listops import TOKENS
from data.prepare import prepare
from data.prepared import is_whole, open_set, writing
from data.sets import SETS
from data.sets.release import Download
from model.errors import UserError
from tests import sets
from tests.processes import fork

pytestmark = pytest.mark.quick


def small(name: str):
    """A release of which nothing is known but its format."""
    return dataclasses.replace(SETS[name], sha256={}, rows={})


def refused(release, root: Path) -> str:
    """The one line by which it is, after which nothing is left that a later run would trust."""
    with pytest.raises(UserError) as error:
        prepare(release, root)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"python -m data.prepare {release.name} --root={root}"):
        open_set(str(root), release.name)
    assert not [path for path in root.glob("prepared/*") if path.suffix != ".lock"]
    return str(error.value)


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
    assert " ".join(tokens) == "[MAX 1 [SM 1 1 ] 3 ]" and arrays["validation_values"][13] == 3
    assert [len(arrays[f"{split}_values"]) for split in ("train", "validation", "test")] == [25] * 3


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


# --- bad input ---


def test_a_wrong_checksum(tmp_path):
    sets.put(tmp_path / "mnist", sets.digits(4))
    line = refused(SETS["mnist"], tmp_path)
    assert re.search(
        r"wrong checksum: \w+ of .*train-images-idx3-ubyte.* SHA-256 \w{64}; the release's has \w{64}", line
    )


def test_a_wrong_number_of_rows(tmp_path):
    sets.put(tmp_path, sets.expressions(5))
    assert "gives 5 rows of train_values; the release has 96,000" in refused(SETS["lra_listops"], tmp_path)


@pytest.mark.parametrize("end", [100, 5000, -100, -4])  # the last four bytes only say how long it is
def test_a_truncated_archive(tmp_path, end):
    path = tmp_path / "aclImdb_v1.tar.gz"
    sets.tar(path, {name: os.urandom(500) for name in sets.reviews(5)})
    path.write_bytes(path.read_bytes()[:end])
    assert f"{path} is truncated or damaged (" in refused(small("imdb"), tmp_path)


def test_a_truncated_file_of_digits(tmp_path):
    sets.gz(tmp_path / "mnist", sets.digits(4))
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-30])
    assert "is truncated or damaged" in refused(small("mnist"), tmp_path)
    path.write_bytes(gzip.compress(gzip.decompress(gzip.compress(sets.digits(4)["t10k-images-idx3-ubyte"]))[:-5]))
    assert "where its header says 1,568" in refused(small("mnist"), tmp_path)


def test_a_truncated_zip(tmp_path):
    path = tmp_path / "enwik8.zip"
    sets.zipped(path, {"enwik8": bytes(1000)})
    path.write_bytes(path.read_bytes()[:500])
    assert "enwik8.zip" in refused(small("enwik8"), tmp_path)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"( [MAX 1 ) 2 ]", "row 3: it has 1 columns, not 2"),
        (b"( [MAX 1 ) 2 ]\t", "row 3: its value is b'', not a digit"),
        (b"( [MAX 1 ) 2 ]\t12", "row 3: its value is b'12', not a digit"),
        (b"( [MIX 1 ) 2 ]\t1", r"row 3: it has b'\[MIX', which is no token; tokens are 0 1 .* \]"),
        (b"( [MAX 1 ) 2\t1", "row 3: its brackets do not make one expression"),
        (b"[MAX 1 2 ] [MIN 3 4 ]\t1", "row 3: its brackets do not make one expression"),
        (b"<pad>\t1", "row 3: it has b'<pad>'"),
        (b"7\t7", "row 3: its brackets do not make one expression"),
        (
            b"[MAX " * 10 + b"1" + b" ]" * 10 + b"\t1",
            "row 3: it has 11 levels and 21 tokens; the law is up to 10 and 1999",
        ),
        (b"[MAX" + b" 1" * 1998 + b" ]\t1", "row 3: it has 2 levels and 2000 tokens"),
    ],
)
def test_a_bad_row_of_listops_is_named_by_its_number(tmp_path, row, says):
    files = sets.expressions(5)
    lines = files["listops-1000/basic_val.tsv"].split(b"\n")
    files["listops-1000/basic_val.tsv"] = b"\n".join([*lines[:2], row, *lines[3:]])
    sets.put(tmp_path, files)
    assert re.search(f"basic_val.tsv {says}", refused(small("lra_listops"), tmp_path))


def test_a_header_that_is_none(tmp_path):
    files = {name: text.partition(b"\n")[2] for name, text in sets.expressions(5).items()}
    sets.put(tmp_path, files)
    assert "row 1 is b'( ( (" in refused(small("lra_listops"), tmp_path)


@pytest.mark.parametrize("row", [b"1.0\t1\t2\tonly one", b"0.5\t1\t2\ta\tb", b"1.0\t1\t2\ta\tb\tc"])
def test_a_bad_row_of_papers_is_named_by_its_number(tmp_path, row):
    files = sets.papers(3)
    files["tsv_data/new_aan_pairs.test.tsv"] += row + b"\n"
    sets.put(tmp_path, files)
    assert re.search(
        r"new_aan_pairs.test.tsv row 4: its? (has [46] columns|label is)", refused(small("lra_aan"), tmp_path)
    )


def test_a_bad_row_of_metadata_is_named_by_its_number(tmp_path):
    files = sets.curves(2)
    files["pathfinder32/curv_baseline/metadata/9.npy"] += b"imgs/9 sample_2.png 2 x\n"
    sets.put(tmp_path, files)
    assert "metadata/9.npy row 3 is b'imgs/9 sample_2.png 2 x'" in refused(small("lra_pathfinder32"), tmp_path)


def test_metadata_that_are_a_pickle_are_a_text_that_says_nothing(tmp_path):
    files = sets.curves(1)
    files["pathfinder32/curv_baseline/metadata/9.npy"] = npy_of({"a": 1})
    sets.put(tmp_path, files)
    assert "metadata/9.npy row 1 is b" in refused(small("lra_pathfinder32"), tmp_path)


PICTURES = {
    "wide": (sets.png(np.zeros((32, 31), np.uint8)), "has 31 x 32 pixels; an image of this set has 32 x 32"),
    "no PNG": (b"GIF89a", "is no whole PNG"),
    "torn": (sets.png(np.zeros((32, 32), np.uint8))[:45], "is no whole PNG"),
}


@pytest.mark.parametrize("case", PICTURES)
def test_an_image_that_is_none_of_the_set(tmp_path, case):
    files, (picture, says) = sets.curves(1), PICTURES[case]
    files["pathfinder32/curv_contour_length_9/imgs/9/sample_0.png"] = picture
    sets.put(tmp_path, files)
    assert f"imgs/9/sample_0.png {says}" in refused(small("lra_pathfinder32"), tmp_path)


def test_a_missing_image(tmp_path):
    files = sets.curves(2)
    del files["pathfinder32/curv_contour_length_9/imgs/9/sample_0.png"]
    sets.put(tmp_path, files)
    assert "imgs/9/sample_0.png is in the metadata but not in" in refused(small("lra_pathfinder32"), tmp_path)


def test_digits_of_a_wrong_size(tmp_path):
    sets.put(tmp_path / "mnist", sets.digits(4, side=27))
    assert "has images of 27 x 27 pixels; those of this set have 28 x 28" in refused(small("mnist"), tmp_path)


def test_photographs_of_a_wrong_size(tmp_path):
    files = sets.photographs(2)
    files["cifar-10-batches-bin/data_batch_3.bin"] += b"x"
    sets.put(tmp_path, files)
    assert "data_batch_3.bin has 6,147 bytes; an image of 32 x 32 takes 3,073" in refused(small("cifar10"), tmp_path)


@pytest.mark.parametrize(
    "name", ["../../escaped.txt", "/tmp/escaped.txt", "aclImdb/../../escaped.txt", "..\\escaped.txt"]
)
def test_an_archive_cannot_lead_out_of_its_folder(tmp_path, name):
    sets.tar(tmp_path / "aclImdb_v1.tar.gz", sets.reviews(1) | {name: b"x"})
    assert "which leads out of its folder; it is not read" in refused(small("imdb"), tmp_path)
    sets.zipped(tmp_path / "enwik8.zip", {name: b"x", "enwik8": b"text"})
    assert "which leads out of its folder; it is not read" in refused(small("enwik8"), tmp_path)
    assert not list(tmp_path.parent.glob("escaped*"))


def test_an_archive_with_a_link(tmp_path):
    sets.tar(tmp_path / "aclImdb_v1.tar.gz", sets.reviews(1), **{"aclImdb/train/pos/1_9.txt": "/etc/passwd"})
    assert "holds 'aclImdb/train/pos/1_9.txt', which is no file and no folder" in refused(small("imdb"), tmp_path)


def test_a_review_larger_than_any(tmp_path):
    sets.put(tmp_path, sets.reviews(1) | {"aclImdb/test/neg/7_1.txt": bytes((1 << 20) + 1)})
    assert "7_1.txt has 1,048,577 bytes; a file of this set has at most 1,048,576" in refused(small("imdb"), tmp_path)


# --- whole or not at all ---


def test_a_set_that_was_not_finished_is_begun_anew(tmp_path):
    part = tmp_path / "prepared" / ".enwik8.part"
    sets.put(part, {"bytes.npy": b"half of it", "other.npy": b""})
    sets.put(tmp_path, {"enwik8": b"text"})
    prepare(small("enwik8"), tmp_path)
    assert sorted(path.name for path in (tmp_path / "prepared").iterdir()) == [".enwik8.lock", "enwik8"]
    assert list(open_set(str(tmp_path), "enwik8").arrays) == ["bytes"]


def test_a_set_stays_as_it_was_if_making_it_anew_fails(tmp_path):
    sets.ready(tmp_path, "one", numbers=np.arange(5))
    with pytest.raises(ZeroDivisionError), writing(tmp_path, "one") as writer:
        writer.append("numbers", np.arange(3))
        raise ZeroDivisionError
    assert open_set(str(tmp_path), "one").arrays["numbers"].tolist() == [0, 1, 2, 3, 4] and is_whole(tmp_path, "one")
    sets.ready(tmp_path, "one", numbers=np.arange(2))
    assert open_set(str(tmp_path), "one").arrays["numbers"].tolist() == [0, 1]


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


def npy_of(thing: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([thing], object), allow_pickle=True)
    return file.getvalue()


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


def test_rows_that_come_one_after_another_are_one_array(tmp_path):
    parts = [np.full((n, 3), n, np.int16) for n in (1, 12345, 0, 2)]
    with writing(tmp_path, "one") as writer:
        for part in parts:
            writer.append("rows", part)
    assert np.array_equal(open_set(str(tmp_path), "one").arrays["rows"], np.concatenate(parts))


# --- downloads ---


class Server(http.server.BaseHTTPRequestHandler):
    content, ranges, stop_after, asked = b"", True, None, []

    def do_GET(self):
        begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.asked.append(begin)
        if begin >= len(self.content) > 0 and self.ranges:
            self.send_error(416)
            return
        begin = begin if self.ranges else 0
        body = self.content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.stop_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"asked": []})
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        handler.url = f"http://localhost:{running.server_address[1]}/enwik8.zip"
        yield handler
        running.shutdown()


def served(server, **facts):
    """enwik8 from that address, with what is known of its archive."""
    return dataclasses.replace(small("enwik8"), downloads=(Download("enwik8.zip", server.url, ("enwik8",), **facts),))


def archive_of(text: bytes) -> bytes:
    file = io.BytesIO()
    sets.zipped(file, {"enwik8": text})
    return file.getvalue()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_was_cut_off(tmp_path, server, ranges):
    server.content, server.ranges = archive_of(os.urandom(3000)), ranges
    facts = {"size": len(server.content), "sha256": hashlib.sha256(server.content).hexdigest()}
    server.stop_after = 1000
    assert "it ended after 1,000 of" in refused(served(server, **facts), tmp_path)
    assert (tmp_path / "enwik8.zip.part").stat().st_size == 1000
    server.stop_after = None
    prepare(served(server, **facts), tmp_path)
    assert server.asked == [0, 1000]
    assert (tmp_path / "enwik8.zip").read_bytes() == server.content and not (tmp_path / "enwik8.zip.part").exists()
    assert is_whole(tmp_path, "enwik8")


def test_a_download_that_was_all_there_is_not_asked_for_again(tmp_path, server):
    server.content = archive_of(b"text")
    (tmp_path / "enwik8.zip.part").write_bytes(server.content)
    prepare(served(server), tmp_path)
    assert server.asked == [len(server.content)] and is_whole(tmp_path, "enwik8")


def test_a_download_with_a_wrong_checksum_is_thrown_away(tmp_path, server):
    server.content = archive_of(b"text")
    facts = {"size": len(server.content), "sha256": "0" * 64}
    assert "it was thrown away" in refused(served(server, **facts), tmp_path)
    assert not list(tmp_path.glob("enwik8*"))


def test_without_internet_the_line_says_which_file_to_put_where(tmp_path, server):
    release = served(server)
    server.content = b""
    gone = dataclasses.replace(release.downloads[0], url="http://localhost:1/enwik8.zip")
    line = refused(dataclasses.replace(release, downloads=(gone,)), tmp_path)
    assert re.search(
        rf"cannot fetch http://localhost:1/enwik8.zip \(.*\); put that file at {tmp_path}/enwik8.zip", line
    )
    assert not list(tmp_path.glob("enwik8*"))


# --- the command ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mnsit"], "unknown set 'mnsit'; choose from cifar10, .*; closest: mnist"),
        ([], "no set is named; choose from cifar10, enwik8, "),
        (["mnist", "--rot=x"], "unknown flag --rot; closest: --root"),
        (["mnist", "--root=/proc/nowhere"], "cannot write below '/proc/nowhere'"),
        (["mnist", "--root=LICENSE"], "cannot write below 'LICENSE'"),
        (["mnist", "--root="], "--root is ''; allowed: a text that is not empty"),
    ],
)
def test_mistakes_on_the_command_line(words, says):
    command = fork("data.prepare", *words)
    assert command.wait() == 2, command.stderr
    assert len(command.stderr.splitlines()) == 1 and re.search(f"error: .*{says}", command.stderr), command.stderr


def test_the_command_says_what_it_made_and_refuses_what_is_not_the_release(tmp_path):
    sets.put(tmp_path / "mnist", sets.digits(4))
    command = fork("data.prepare", "mnist", f"--root={tmp_path}")
    assert command.wait() == 2 and "wrong checksum" in command.stderr and len(command.stderr.splitlines()) == 1
    sets.ready(tmp_path, "mnist", numbers=np.arange(3))
    command = fork("data.prepare", "mnist", f"--root={tmp_path}")
    assert command.wait() == 0, command.stderr
    digest = open_set(str(tmp_path), "mnist").digest
    assert command.stdout.splitlines()[1:] == [
        "mnist: numbers int64 [3]",
        f"mnist: {prepared.folder(tmp_path, 'mnist')}, digest {digest[:16]}",
    ]


def test_every_set_has_a_line_and_an_address():
    for name, release in SETS.items():
        assert release.name == name and release.summary.endswith(".") and len(release.summary) < 110
        assert all(one.url.startswith("http") for one in release.downloads)
        assert release.sha256 or release.rows or name in ("lra_pathfinder64", "lra_pathfinder256")
