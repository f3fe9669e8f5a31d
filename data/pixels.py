"""Images read pixel by pixel, row by row: one family of tasks.

Two protocols. `lra`, of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006): a pixel is a token, its
grey level 0..255. Level 0 is a black pixel and not padding. There is no padding, so rows have no `segments` and nothing
is masked (the released code masked black pixels). `s4`, of S4 and those after it (https://github.com/state-spaces/s4,
src/dataloaders/basic.py): a pixel is a real vector, its channels divided by 255 and normalised.

The two also turn colours into grey by laws of their own, TensorFlow's and Pillow's; both are computed here in whole
numbers, exactly. The last images of the training set validate, in the order of the release. The benchmarks took as many
from another order: that of TensorFlow Datasets (LRA), or a random one (S4).
"""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from data.prepared import PreparedSet
from data.stored import Stored
from data.task import Example
from model.asked import Vectors
from model.errors import UserError
from model.settings import Count, Seed

Protocol = Literal["lra", "s4"]
DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def grey_of_tensorflow(r: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    """tf.image.rgb_to_grayscale of bytes: a weighted sum of r / 255, g / 255 and b / 255, times 255.5, cut down.

    TensorFlow does it in float32, which rounds a few sums in a million across a whole number.
    """
    return (2989 * r + 5870 * g + 1140 * b) * np.uint64(511) // np.uint64(10_000 * 510)


def grey_of_pillow(r: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Image.convert("L") of bytes: ITU-R 601, in parts of 2^16, rounded."""
    return (19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16


GREY = {"lra": grey_of_tensorflow, "s4": grey_of_pillow}


@functools.lru_cache(maxsize=4)
def in_grey(stored: PreparedSet, name: str, protocol: str) -> np.ndarray:
    """Images [n, side, side] of an array [n, side, side, 3], made once: it takes longer than all the rest."""
    colours = stored.arrays[name]
    grey = np.empty(colours.shape[:-1], np.uint8)
    for i in range(0, len(colours), 1024):
        grey[i : i + 1024] = GREY[protocol](*np.moveaxis(colours[i : i + 1024].astype(np.uint64), -1, 0))
    return grey


@dataclass(frozen=True)
class Pixels(Stored):
    """What the family has in common."""

    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = 10
    side: ClassVar[int]
    classes: ClassVar[tuple[str, ...]]
    moments: ClassVar[tuple[tuple[float, float], ...]]  # mean and deviation of each channel, by S4

    protocol: Protocol = "s4"
    n_validation: Count = 5000  # images of the training set, its last

    def check(self) -> None:
        super().check()
        n = len(self.stored.arrays["train_labels"])
        self.bound("n_validation", 1, n - 1, f"{n:,} training images")

    @property
    def length(self) -> int:
        return self.side**2

    @property
    def vocab_size(self) -> int:
        return 256 if self.protocol == "lra" else 0

    @property
    def inputs(self) -> Vectors | None:
        return None if self.protocol == "lra" else Vectors(len(self.moments))

    def sizes(self) -> dict[str, int | None]:
        train, test = (len(self.stored.arrays[f"{split}_labels"]) for split in ("train", "test"))
        return {"train": train - self.n_validation, "validation": self.n_validation, "test": test}

    def images(self, part: str) -> np.ndarray:
        """[n, side, side] or [n, side, side, C] bytes."""
        return self.stored.arrays[f"{part}_images"]

    @functools.cached_property
    def normal(self) -> tuple[np.ndarray, np.ndarray]:
        """[L C], [L C] by which the bytes of a row are multiplied, and what is added then."""
        mean, std = np.tile(np.array(self.moments, np.float32), (self.length, 1)).T
        return 1 / (255 * std), -mean / std

    def order(self, pixels: np.ndarray) -> np.ndarray:
        """[B, L C] -> [B, L C]: the order in which a row is read."""
        return pixels

    def rows(self, split: str, places: np.ndarray) -> Example:
        part = "test" if split == "test" else "train"
        if split == "validation":
            places = places + self.sizes()["train"]
        pixels = self.order(self.images(part)[places].reshape(len(places), -1))
        if self.protocol == "lra":
            inputs = pixels.astype(np.int32)
        else:
            scale, shift = self.normal
            inputs = (pixels * scale + shift).reshape(len(places), self.length, -1)
        targets = self.stored.arrays[f"{part}_labels"][places].astype(np.int32)
        return {
            "inputs": inputs,
            "targets": targets,
            "weights": np.ones(len(places), np.float32),
            "attr_class": targets.copy(),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"class": self.classes}

    def baselines(self) -> dict[str, float]:
        counts = np.bincount(self.stored.arrays["test_labels"], minlength=self.n_classes)
        return {"majority": float(counts.max() / counts.sum())}


@dataclass(frozen=True)
class SequentialMnist(Pixels):
    """Handwritten digits, pixel by pixel: which digit it is."""

    name: ClassVar[str] = "smnist"
    set_name: ClassVar[str] = "mnist"
    side: ClassVar[int] = 28
    classes: ClassVar[tuple[str, ...]] = DIGITS
    moments: ClassVar[tuple[tuple[float, float], ...]] = ((0.0, 1.0),)

    n_validation: Count = 6000


@dataclass(frozen=True)
class PermutedMnist(SequentialMnist):
    """Handwritten digits, their pixels in one order that has nothing to do with their places.

    The order is numpy.random.RandomState(permutation).permutation(784), of a generator that NumPy has frozen; 92916 is
    the seed that S4's code names as that of other works. Its own order is that of reversed bits.
    """

    name: ClassVar[str] = "psmnist"

    permutation: Seed = 92916

    def order(self, pixels: np.ndarray) -> np.ndarray:
        return pixels[:, _permutation(self.permutation, self.length)]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, n: int) -> np.ndarray:
    return np.random.RandomState(seed).permutation(n)


@dataclass(frozen=True)
class SequentialFashion(SequentialMnist):
    """Photographs of clothes, pixel by pixel: what it is that one wears."""

    name: ClassVar[str] = "sfashion"
    set_name: ClassVar[str] = "fashion-mnist"
    classes: ClassVar[tuple[str, ...]] = CLOTHES


@dataclass(frozen=True)
class Cifar(Pixels):
    """CIFAR-10 by its channels."""

    set_name: ClassVar[str] = "cifar10"
    side: ClassVar[int] = 32
    classes: ClassVar[tuple[str, ...]] = THINGS
    channels: ClassVar[str]

    @property
    def moments(self) -> tuple[tuple[float, float], ...]:
        if self.channels == "grey":
            return ((122.6 / 255, 61.0 / 255),)
        return (0.4914, 0.247), (0.4822, 0.243), (0.4465, 0.261)

    def images(self, part: str) -> np.ndarray:
        if self.channels == "grey":
            return in_grey(self.stored, f"{part}_images", self.protocol)
        return super().images(part)


@dataclass(frozen=True)
class SequentialCifar(Cifar):
    """Photographs of ten kinds of things, pixel by pixel: what is in it (sCIFAR)."""

    name: ClassVar[str] = "scifar"

    channels: Literal["colour", "grey"] = "colour"

    def check(self) -> None:
        if self.protocol == "lra" and self.channels == "colour":
            raise UserError(
                "data.scifar.channels is 'colour', but in protocol 'lra' a pixel is one token; closest: grey"
            )
        super().check()


@dataclass(frozen=True)
class LraImage(Cifar):
    """CIFAR-10 in grey, pixel by pixel: what is in it (Image of Long Range Arena)."""

    name: ClassVar[str] = "image"
    channels: ClassVar[str] = "grey"

    protocol: Protocol = "lra"
