"""MNIST and Fashion-MNIST in the idx format (http://yann.lecun.com/exdb/mnist/).

An idx file is two zero bytes, 8 for "unsigned bytes", the number of axes, each axis' length as four bytes, the highest
first, and the bytes. SHA-256 of the archives: TensorFlow Datasets, url_checksums/mnist.txt and fashion_mnist.txt.
"""

import math
from collections.abc import Mapping

import numpy as np

from data.prepared import Writer
from data.sets.reading import Entry, Files
from data.sets.release import Download, Release
from model.errors import UserError

SIDE, CLASSES = 28, 10
NAMES = {
    "train-images-idx3-ubyte": "train_images",
    "train-labels-idx1-ubyte": "train_labels",
    "t10k-images-idx3-ubyte": "test_images",
    "t10k-labels-idx1-ubyte": "test_labels",
}
LARGEST = 1 << 28


def convert(files: Files, writer: Writer) -> None:
    found, where = {}, {}
    for match, entry in files.matching(f"({'|'.join(NAMES)})"):
        found[NAMES[match[1]]], where[match[1]] = read(entry), entry.where
    for name, array in NAMES.items():
        if array not in found:
            raise UserError(f"{name} is not in {files.where}")
        if array.endswith("images") and found[array].shape[1:] != (SIDE, SIDE):
            sides = " x ".join(map(str, found[array].shape[1:]))
            raise UserError(f"{where[name]} has images of {sides} pixels; those of this set have {SIDE} x {SIDE}")
        if array.endswith("labels") and (found[array].ndim != 1 or found[array].max(initial=0) >= CLASSES):
            raise UserError(f"{where[name]} has labels other than one of {CLASSES} an image")
        writer.append(array, found[array])
    for split in ("train", "test"):
        images, labels = len(found[f"{split}_images"]), len(found[f"{split}_labels"])
        if images != labels:
            raise UserError(f"{files.where} has {images:,} {split} images and {labels:,} labels")


def read(entry: Entry) -> np.ndarray:
    head = entry.stream.read(4)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 3:
        raise UserError(f"{entry.where} is no idx file of bytes")
    shape = np.frombuffer(entry.stream.read(4 * head[3]), ">u4").tolist()
    size = math.prod(shape)
    if len(shape) < head[3] or size > LARGEST:
        raise UserError(f"{entry.where} is no idx file of this set: its axes are {shape}")
    values = entry.stream.read(size + 1)
    if len(values) != size:
        raise UserError(f"{entry.where} has {len(values):,} bytes or more, where its header says {size:,}")
    return np.frombuffer(values, np.uint8).reshape(shape)


def release(
    name: str, summary: str, address: str, archives: Mapping[str, tuple[int, str]], arrays: Mapping[str, str]
) -> Release:
    downloads = (
        Download(f"{name}/{file}.gz", f"{address}/{file}.gz", (f"{name}/{file}",), *archives[array])
        for file, array in NAMES.items()
    )
    return Release(name, summary, tuple(downloads), convert, arrays)


MNIST = release(
    "mnist",
    "Handwritten digits, 60,000 and 10,000 grey images of 28 x 28.",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    {
        "train_images": (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        "train_labels": (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        "test_images": (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        "test_labels": (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    },
    {
        "test_images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        "train_images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    },
)
FASHION_MNIST = release(
    "fashion-mnist",
    "Photographs of clothes, 60,000 and 10,000 grey images of 28 x 28.",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    {
        "train_images": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        "train_labels": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        "test_images": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        "test_labels": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
    {
        "test_images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        "train_images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train_labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    },
)
