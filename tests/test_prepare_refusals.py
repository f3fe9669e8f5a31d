"""Published sets that are not as released: refused in one line, with nothing left that a later run would trust."""

import dataclasses
import errno
import gzip
import os
import re
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from data.prepare import prepare
from data.prepared import open_set
from data.sets import SETS
from data.sets.lra_pathfinder import DIFFICULTIES
from data.sets.reading import Watch, Watched
from tests import sets
from tests.sets import npy_of, refused, small

pytestmark = pytest.mark.quick


def test_a_wrong_checksum(tmp_path):
    sets.put(tmp_path / "mnist", sets.digits(4))
    line = refused(SETS["mnist"], tmp_path)
    assert re.search(rf"wrong checksum: \w+ of {tmp_path}/mnist has SHA-256 \w{{64}}; the release's has \w{{64}}", line)


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
    assert refused(small("mnist"), tmp_path).startswith(f"{path} is truncated or damaged (")  # not those beside it
    path.write_bytes(gzip.compress(gzip.decompress(gzip.compress(sets.digits(4)["t10k-images-idx3-ubyte"]))[:-5]))
    assert "where its header says 1,568" in refused(small("mnist"), tmp_path)


def test_a_truncated_zip(tmp_path):
    path = tmp_path / "enwik8.zip"
    sets.zipped(path, {"enwik8": bytes(1000)})
    path.write_bytes(path.read_bytes()[:500])
    assert f"{path} is truncated or damaged (" in refused(small("enwik8"), tmp_path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_zip(tmp_path, packing):
    path = tmp_path / "enwik8.zip"
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("enwik8", os.urandom(5000))
    content = bytearray(path.read_bytes())
    content[2000] ^= 4
    path.write_bytes(content)
    assert f"{path} is truncated or damaged (" in refused(small("enwik8"), tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ((6, 8), 1, "holds 'enwik8', which is encrypted; it is not read"),
        ((8, 10), 97, "cannot be unpacked (That compression method is not supported"),
        ((4, 6), 99, "cannot be unpacked (zip file version 9.9"),
    ],
)
def test_a_zip_that_cannot_be_unpacked(tmp_path, field, value, says):
    path = tmp_path / "enwik8.zip"
    sets.zipped(path, {"enwik8": bytes(1000)})
    content = bytearray(path.read_bytes())
    content[field[0]] = content[content.index(b"PK\x01\x02") + field[1]] = value  # of the file, and in the directory
    path.write_bytes(content)
    assert f"{path} {says}" in refused(small("enwik8"), tmp_path)


def test_an_archive_is_read_to_its_end(tmp_path):
    path = tmp_path / "lra_release.gz"
    sets.tar(path, sets.expressions(3) | {"pathfinder32/other.png": os.urandom(100_000)})
    content = bytearray(path.read_bytes())
    content[-8] ^= 1  # of gzip's checksum
    path.write_bytes(content)
    assert f"{path} is truncated or damaged (CRC check failed" in refused(small("lra_listops"), tmp_path)


def test_a_file_that_cannot_be_read(tmp_path):
    sets.put(tmp_path, sets.reviews(2))
    path = tmp_path / "aclImdb" / "train" / "pos" / "9_9.txt"
    path.symlink_to(tmp_path / "nowhere")
    assert refused(small("imdb"), tmp_path) == f"cannot read {path}: No such file or directory"


def test_a_file_that_fails_while_it_is_read(tmp_path, monkeypatch):
    sets.put(tmp_path, {"enwik8": b"text"})

    def fail(path: Path, watch: Watch) -> Watched:
        file, place = Watched(path, watch), os.open(tmp_path, os.O_RDONLY)
        os.dup2(place, file.fileno())  # a folder, of which nothing can be read
        os.close(place)
        return file

    monkeypatch.setattr("data.sets.reading.Watched", fail)
    assert refused(small("enwik8"), tmp_path) == f"cannot read {tmp_path / 'enwik8'}: Is a directory"


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
        (b"[MAX 1 2 ]\t7", "row 3: its value is 7, where the expression gives 2"),
        (b"[MED 1 8 [MIN 4 6 ] [SM 9 9 ] ]\t7", "row 3: its value is 7, where the expression gives 6"),
        (b"[MAX 1 [SM ] ]\t1", "row 3: it has an operator without arguments"),
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


@pytest.mark.parametrize("k", [9, 10])
def test_metadata_that_name_an_image_twice(tmp_path, k):
    files = sets.curves(2)
    files[f"pathfinder32/curv_baseline/metadata/{k}.npy"] += b"imgs/9 sample_1.png 1 0\n"
    sets.put(tmp_path, files)
    line = refused(small("lra_pathfinder32"), tmp_path)
    assert re.search(r"metadata/9.npy row \d names imgs/9/sample_1.png a second time", line)


@pytest.mark.parametrize("side", [32, 64, 128, 256])
def test_a_part_of_the_pictures(tmp_path, side):
    sets.put(tmp_path, sets.curves(2, side))
    line = refused(SETS[f"lra_pathfinder{side}"], tmp_path)
    assert re.search(r"(gives|lists) 4 rows of \w+_labels; the release (has|lists) (199,999|200,000)", line)


@pytest.mark.parametrize("difficulty", ["easy", "intermediate", "hard"])
def test_pictures_that_are_empty_count_as_listed(tmp_path, difficulty):
    """Of 64 and more nobody says how many are empty; of 32 one of the easy ones is."""
    files = sets.curves(2, 64)
    files["pathfinder64/curv_baseline/imgs/9/sample_0.png"] = b""
    sets.put(tmp_path, files)
    release = small("lra_pathfinder64")
    assert SETS["lra_pathfinder64"].listed.keys() == {f"{name}_labels" for name in DIFFICULTIES.values()}
    listed = dict.fromkeys(SETS["lra_pathfinder64"].listed, 4)
    wrong = dataclasses.replace(release, listed=listed | {f"{difficulty}_labels": 3})
    assert f"lists 4 rows of {difficulty}_labels; the release lists 3" in refused(wrong, tmp_path)
    prepare(dataclasses.replace(release, listed=listed), tmp_path)
    arrays = open_set(str(tmp_path), "lra_pathfinder64").arrays
    assert [len(arrays[f"{name}_labels"]) for name in DIFFICULTIES.values()] == [3, 4, 4]


def test_metadata_that_are_a_pickle_are_a_text_that_says_nothing(tmp_path):
    files = sets.curves(1)
    files["pathfinder32/curv_baseline/metadata/9.npy"] = npy_of({"a": 1})
    sets.put(tmp_path, files)
    assert "metadata/9.npy row 1 is b" in refused(small("lra_pathfinder32"), tmp_path)


def header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has a few."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(99))))
    packed = (struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


PICTURES = {
    "bomb": (header(30000, 30000), "has 30000 x 30000 pixels; an image of this set has 32 x 32"),
    "large": (header(11000, 11000), "has 11000 x 11000 pixels; an image of this set has 32 x 32"),
    "wide": (sets.png(np.zeros((32, 31), np.uint8)), "has 31 x 32 pixels; an image of this set has 32 x 32"),
    "no PNG": (b"GIF89a", "is no whole PNG"),
    "torn": (sets.png(np.zeros((32, 32), np.uint8))[:45], "is no whole PNG"),
}


@pytest.mark.parametrize("case", PICTURES)
def test_an_image_that_is_none_of_the_set(tmp_path, case):
    files, (picture, says) = sets.curves(1), PICTURES[case]
    files["pathfinder32/curv_contour_length_9/imgs/9/sample_0.png"] = picture
    sets.put(tmp_path, files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert f"imgs/9/sample_0.png {says}" in refused(small("lra_pathfinder32"), tmp_path)


def test_a_missing_image(tmp_path):
    files = sets.curves(2)
    del files["pathfinder32/curv_contour_length_9/imgs/9/sample_0.png"]
    sets.put(tmp_path, files)
    assert "imgs/9/sample_0.png is in the metadata but not in" in refused(small("lra_pathfinder32"), tmp_path)


def test_a_disk_without_room_for_the_pictures(tmp_path, monkeypatch):
    """They are written through mapped pages, and one that the disk has no room for would kill the process."""

    def full(file: int, start: int, size: int) -> None:
        assert (start, size) == (0, os.fstat(file).st_size), "all of it is asked for"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sets.put(tmp_path, sets.curves(1))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    part = tmp_path / "prepared" / ".lra_pathfinder32.part"
    assert refused(small("lra_pathfinder32"), tmp_path) == f"cannot write {part}: {os.strerror(errno.ENOSPC)}"


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
