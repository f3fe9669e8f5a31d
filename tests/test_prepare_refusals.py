"""Published sets that are not as released: refused in one line, with nothing left that a later run would trust."""

import gzip
import os
import re

import numpy as np
import pytest

from data.sets import SETS
from tests import sets
from tests.sets import npy_of, refused, small

pytestmark = pytest.mark.quick


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
