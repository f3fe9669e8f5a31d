"""CIFAR-10 in its binary release (https://www.cs.toronto.edu/~kriz/cifar.html); the one in pickles is never read.

A record is a label and 32 x 32 bytes each of red, green and blue. SHA-256 of the archive: TensorFlow Datasets,
url_checksums/cifar10.txt.
"""

import numpy as np

from data.prepared import Writer
from data.sets.reading import Files
from data.sets.release import Download, Release
from model.errors import UserError

SIDE, CLASSES = 32, 10
RECORD = 1 + 3 * SIDE**2
BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
LARGEST = 10_000 * RECORD


def convert(files: Files, writer: Writer) -> None:
    found = {}
    for match, entry in files.matching(r"(data_batch_\d|test_batch)\.bin"):
        values = np.frombuffer(entry.read(LARGEST), np.uint8)
        if len(values) % RECORD:
            raise UserError(f"{entry.where} has {len(values):,} bytes; an image of {SIDE} x {SIDE} takes {RECORD:,}")
        found[match[1] + ".bin"] = values.reshape(-1, RECORD)
    for split, names in (("train", BATCHES), ("test", ("test_batch.bin",))):
        missing = [name for name in names if name not in found]
        if missing:
            raise UserError(f"{missing[0]} is not in {files.where}")
        records = np.concatenate([found[name] for name in names])
        if records[:, 0].max(initial=0) >= CLASSES:
            raise UserError(f"{files.where} has {split} labels past {CLASSES - 1}")
        planes = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
        writer.append(f"{split}_images", np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
        writer.append(f"{split}_labels", records[:, 0])


CIFAR10 = Release(
    "cifar10",
    "Photographs of ten kinds of things, 50,000 and 10,000 colour images of 32 x 32.",
    (
        Download(
            "cifar-10-binary.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            ("cifar-10-batches-bin",),
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    convert,
    {
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    },
)
