"""Pathfinder and Path-X of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006)."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from data import bins
from data.paddles import LAWS
from data.rng import Stream
from data.snakes import Drawn, draw
from data.stored import Stored
from data.task import SPLITS, Example
from model.asked import Vectors
from model.settings import Count, Whole

Difficulty = Literal["easy", "intermediate", "hard"]
CONTOURS = {"easy": 6, "intermediate": 9, "hard": 14}  # paddles of a long snake
SPLIT_SEED = 42
# The ends of one curve are a little farther apart: beyond how many pixels to say that it is one, and how often that is
# right, of 20,000 hard images.
FAR_APART = {32: (16, 0.532)}
PIXELS = ((np.arange(256) / 255 - 0.5) / 0.5).astype(np.float32)  # what S4's loader makes of a grey level


@functools.lru_cache(maxsize=8)
def permuted(n: int) -> np.ndarray:
    """The order [n] in which the released images are divided into splits."""
    return Stream(SPLIT_SEED, "pathfinder").at(0).permutation(n)


@dataclass(frozen=True)
class Pathfinder(Stored):
    """Two long dashed curves among short ones: whether the two dots are the ends of one curve.

    Pathfinder is `side` 32 and Path-X 128, both `hard`; easier ones have shorter curves (the release's folders
    curv_baseline, curv_contour_length_9 and curv_contour_length_14). `law` draws the images by the published law
    (data/paddles.py, data/snakes.py), whose parameters are published for `hard`; the others have its formulas with
    their own contour. `released` reads those of the archive, prepared as lra_pathfinder32 and so on: a fixed
    permutation of them, 80 % for training, then 10 % to validate and 10 % to test. (LRA and S4 each divide them in
    another way.) Its one empty PNG, an easy one, was left out when the set was prepared.

    `lra` feeds grey levels as token ids, `s4` as real numbers from -1 to 1. Level 0 is black, and no padding: every
    pixel is read. (LRA's own code masks it.)

    Labels are a fair coin, thrown after the curves were drawn, so that nothing but the dots can tell them. The distance
    between those does, a little: `baselines` has the best guess from it, where it was measured.
    """

    name: ClassVar[str] = "pathfinder"
    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = 2

    side: Literal[32, 64, 128, 256] = 32
    protocol: Literal["lra", "s4"] = "lra"
    source: Literal["law", "released"] = "law"
    difficulty: Difficulty = "hard"
    n_train: Whole = 160_000  # of the law; 0: fresh for ever
    n_validation: Count = 20_000  # of the law
    n_test: Count = 20_000  # of the law

    @property
    def length(self) -> int:
        return self.side**2

    @property
    def vocab_size(self) -> int:
        return 256 if self.protocol == "lra" else 0

    @property
    def inputs(self) -> Vectors | None:
        return None if self.protocol == "lra" else Vectors(channels=1)

    @property
    def block(self) -> int:
        """Images are made faster together; large ones, of which sets are not kept, each by itself."""
        return 64 if self.side == 32 and not self.on_disk else 1

    @property
    def on_disk(self) -> bool:
        return self.source == "released"

    @property
    def costly(self) -> bool:
        return not self.on_disk

    @property
    def set_name(self) -> str:
        return f"lra_pathfinder{self.side}"

    def check(self) -> None:
        super().check()
        if self.on_disk:
            sizes = ("n_train", "n_validation", "n_test")
            self.refuse_unread(sizes, "source='released' has its own sizes", "source=law")

    def sizes(self) -> dict[str, int | None]:
        if self.source == "law":
            return {"train": self.n_train or None, "validation": self.n_validation, "test": self.n_test}
        n = len(self.stored.arrays[f"{self.difficulty}_labels"])
        return {"train": n - 2 * (n // 10), "validation": n // 10, "test": n // 10}

    def rows(self, split: str, places: np.ndarray) -> Example:
        first = sum(self.sizes()[earlier] for earlier in SPLITS[: SPLITS.index(split)])
        labels = self.stored.arrays[f"{self.difficulty}_labels"]
        at = permuted(len(labels))[first + places]
        return self.shown(self.stored.arrays[f"{self.difficulty}_images"][at], labels[at])

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        if self.on_disk:
            return super().examples(split, index, rng)
        drawn = self.drawn(self.block, rng)
        across = np.sqrt(((drawn.markers[:, 0] - drawn.markers[:, 1]) ** 2).sum(1)).astype(np.int32)
        return self.shown(drawn.images, drawn.labels) | {"attr_distance": bins.number(np.maximum(across, 1))}

    def drawn(self, n: int, rng: np.random.Generator) -> Drawn:
        """n images by the law; where it has two margins, each is as likely."""
        law, contour = LAWS[self.side], CONTOURS[self.difficulty]
        margins = rng.integers(len(law.margins), size=n)
        parts = [
            (np.flatnonzero(margins == i), draw(self.side, margin, contour, count, rng))
            for i, margin in enumerate(law.margins)
            if (count := int((margins == i).sum()))
        ]
        order = np.argsort(np.concatenate([rows for rows, _ in parts]))
        joined = [np.concatenate(arrays)[order] for arrays in zip(*(d[:4] for _, d in parts), strict=True)]
        return Drawn(*joined, snakes=())

    def shown(self, images: np.ndarray, labels: np.ndarray) -> Example:
        """Images uint8 [B, side, side] and labels [B] as the protocol has them."""
        levels = images.reshape(len(images), -1)
        return {
            "inputs": levels.astype(np.int32) if self.protocol == "lra" else PIXELS[levels][..., None],
            "targets": labels.astype(np.int32),
            "weights": np.ones(len(images), np.float32),
        }

    def packed(self, made: Example) -> Example:
        return made if self.protocol == "lra" else made | {"inputs": PIXELS.searchsorted(made["inputs"])}

    def unpacked(self, kept: Example) -> Example:
        return kept if self.protocol == "lra" else kept | {"inputs": PIXELS[kept["inputs"]]}

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {} if self.on_disk else {"distance": bins.labels(2 * self.side)}  # between the dots, in pixels

    def baselines(self) -> dict[str, float]:
        if self.on_disk:
            ones = float(self.stored.arrays[f"{self.difficulty}_labels"].mean())
            return {"chance": 0.5, "majority": max(ones, 1 - ones)}
        known = FAR_APART.get(self.side) if self.difficulty == "hard" else None
        return {"chance": 0.5} | ({"dots far apart": known[1]} if known else {})
