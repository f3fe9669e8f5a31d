"""Published sets in small: files as the releases have them, and prepared sets for the tasks that read them."""

import dataclasses
import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.prepare import prepare
from data.prepared import open_set, writing
from data.sets import SETS
from data.sets.release import Release
from model.errors import UserError
from tests.stores import stores

RNG = np.random.default_rng(7)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def digits(n: int, side: int = 28) -> dict[str, bytes]:
    """The four files of MNIST, with n training images and half as many to test."""
    files = {}
    for part, count in (("train", n), ("t10k", n // 2)):
        files[f"{part}-images-idx3-ubyte"] = idx(RNG.integers(256, size=(count, side, side), dtype=np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


def photographs(n: int) -> dict[str, bytes]:
    """The six files of CIFAR-10's binary release, of n records each."""
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    records = RNG.integers(256, size=(len(names), n, 3073), dtype=np.uint8)
    records[:, :, 0] %= 10
    return {f"cifar-10-batches-bin/{name}": one.tobytes() for name, one in zip(names, records, strict=True)}


def reviews(n: int) -> dict[str, bytes]:
    """The folders of the movie reviews, n in each."""
    return {
        f"aclImdb/{split}/{label}/{i}_{stars}.txt": f"{split} {label} {i} café {'x' * i}".encode()
        for split in ("train", "test")
        for label, stars in (("pos", 8), ("neg", 2))
        for i in range(n)
    }


def expressions(n: int) -> dict[str, bytes]:
    """The three tables of ListOps, n rows each, all different."""
    files = {}
    for s, split in enumerate(("train", "val", "test")):
        sums = [f"( ( ( [SM {i // 10} ) 1 ) ] )" for i in range(n)]
        rows = [f"( ( ( ( [MAX {s} ) {sums[i]} ) ( ( ( [MIN {i % 10} ) 9 ) ] ) ) ] )" for i in range(n)]
        lines = [f"{row}\t{max(s, (i // 10 + 1) % 10, i % 10)}" for i, row in enumerate(rows)]
        files[f"listops-1000/basic_{split}.tsv"] = "\n".join(["Source\tTarget", *lines, ""]).encode()
    return files


def papers(n: int) -> dict[str, bytes]:
    return {
        f"tsv_data/new_aan_pairs.{split}.tsv": "".join(
            f"{i % 2}.0\t{i}\tP{i}\tfirst {split} {i}\tsecond {'y' * i}\n" for i in range(n)
        ).encode()
        for split in ("train", "eval", "test")
    }


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def curves(n: int, side: int = 32) -> dict[str, bytes]:
    """Pathfinder's folders: three difficulties of two folders of n pictures."""
    files = {}
    for difficulty in ("curv_baseline", "curv_contour_length_9", "curv_contour_length_14"):
        for k in (10, 9):  # numbers, and not text, are in order
            top, rows = f"pathfinder{side}/{difficulty}", []
            for i in range(n):
                files[f"{top}/imgs/{k}/sample_{i}.png"] = png(RNG.integers(256, size=(side, side), dtype=np.uint8))
                rows.append(f"imgs/{k} sample_{i}.png {i} {(i + k) % 2} 1.8 14 4 2 0.5 1 1")
            files[f"{top}/metadata/{k}.npy"] = "\n".join([*rows, ""]).encode()
    return files


def put(root: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def gz(root: Path, files: Mapping[str, bytes]) -> None:
    put(root, {f"{name}.gz": gzip.compress(content) for name, content in files.items()})


def tar(path: Path, files: Mapping[str, bytes], **links: str) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)


def zipped(path: Path, files: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def write(root: Path) -> None:
    """What the tasks of files read, prepared: 100 training examples and 40 to test."""
    for name, shape in (("mnist", (28, 28)), ("fashion-mnist", (28, 28)), ("cifar10", (32, 32, 3))):
        images = RNG.integers(256, size=(140, *shape), dtype=np.uint8)
        labels = RNG.integers(10, size=140, dtype=np.uint8)
        ready(root, name, **halves(images=images, labels=labels))
    tails = ["x" * (i % 60) + "q" * (i % 60 > 30) for i in range(140)]  # a letter that comes late
    texts = [f"{'good' if i % 2 else 'bad'} film, the {i}th, café {tail}".encode() for i, tail in enumerate(tails)]
    arrays = halves(labels=np.arange(140, dtype=np.uint8) % 2)
    for part, some in (("train", texts[:100]), ("test", texts[100:])):
        arrays[f"{part}_text"] = np.frombuffer(b"".join(some), np.uint8)
        arrays[f"{part}_starts"] = np.cumsum([0, *map(len, some)])
    ready(root, "imdb", **arrays)
    for name, pairs in stores().items():
        ready(root, name, **pairs)


def halves(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    return {
        f"{part}_{name}": array[cut]
        for name, array in arrays.items()
        for part, cut in (("train", slice(100)), ("test", slice(100, None)))
    }


def ready(root: Path, name: str, **arrays: np.ndarray) -> None:
    """A prepared set of these arrays."""
    with writing(root, name) as writer:
        for key, array in arrays.items():
            writer.append(key, array)


def npy_of(thing: object) -> bytes:
    """A NumPy file that holds a pickle."""
    file = io.BytesIO()
    np.save(file, np.array([thing], object), allow_pickle=True)
    return file.getvalue()


def small(name: str) -> Release:
    """A release of which nothing is known but its format."""
    return dataclasses.replace(SETS[name], sha256={}, rows={}, listed={})


def refused(release: Release, root: Path) -> str:
    """The one line by which it is, after which nothing stands there that did not before."""
    before = made(root)
    with pytest.raises(UserError) as error:
        prepare(release, root)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=f"python -m data.prepare {release.name} --root={root}"):
        open_set(str(root), release.name)
    assert made(root) == before
    return str(error.value)


def made(root: Path) -> list[Path]:
    """What stands below a root besides what was released or fetched."""
    return sorted([*root.glob("prepared"), *root.glob("prepared/*")])
