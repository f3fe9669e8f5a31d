"""Small pictures of coloured shapes on grey clutter."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.asked import Image
from model.settings import Whole, within

COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "magenta": (1, 0, 1),
    "cyan": (0, 1, 1),
}
# Which points (u down, v right) of the square from -1 to 1 are a shape's.
SHAPES = {
    "square": lambda u, v: np.full(np.broadcast_shapes(u.shape, v.shape), True),
    "disc": lambda u, v: u**2 + v**2 <= 1,
    "ring": lambda u, v: (u**2 + v**2 <= 1) & (u**2 + v**2 > 0.3),
    "triangle": lambda u, v: 2 * np.abs(v) <= u + 1,
    "cross": lambda u, v: (np.abs(u) < 1 / 3) | (np.abs(v) < 1 / 3),
    "diamond": lambda u, v: np.abs(u) + np.abs(v) <= 1 + 1e-9,  # its tips are a rounding away
}
SMALLEST = 8  # pixels across, below which shapes look alike


def cluttered(rng: np.random.Generator, size: int, n_bars: int) -> np.ndarray:
    """A background `[size, size, 3]`: grey noise, and bars of any grey anywhere."""
    grey = 0.4 + 0.2 * rng.random((size, size), np.float32)
    for _ in range(n_bars):
        y, x = rng.integers(size, size=2)
        long, wide = rng.integers(1, size // 2 + 1), rng.integers(1, 3)
        height, width = (long, wide) if rng.random() < 0.5 else (wide, long)
        grey[y : y + height, x : x + width] = rng.random(dtype=np.float32)
    return np.repeat(grey[..., None], 3, axis=2)


def draw(picture: np.ndarray, shape: str, colour: str, top: int, left: int, side: int) -> None:
    """Writes a shape into a picture, `side` pixels across."""
    u = (2 * np.arange(side) + 1 - side) / side
    inside = SHAPES[shape](u[:, None], u[None, :])
    picture[top : top + side, left : left + side][inside] = COLOURS[colour]


@dataclass(frozen=True)
class Shapes(Task):
    """Pictures of one coloured shape on grey clutter: which shape it is.

    Shape and colour are uniform, its extent too, from 8 pixels to half the picture, and then the place.
    """

    name: ClassVar[str] = "shapes"
    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = len(SHAPES)
    vocab_size: ClassVar[int] = 0

    side: Annotated[int, within(2 * SMALLEST, 1024)] = 32  # pixels in a side of the picture
    clutter: Whole = 2  # bars

    @property
    def length(self) -> int:
        return self.side**2

    @property
    def inputs(self) -> Image:
        return Image(self.side, self.side, 3)

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        picture = cluttered(rng, self.side, self.clutter)
        shape, colour = rng.integers(len(SHAPES)), rng.integers(len(COLOURS))
        across = int(rng.integers(SMALLEST, self.side // 2 + 1))
        top, left = rng.integers(self.side - across + 1, size=2)
        draw(picture, list(SHAPES)[shape], list(COLOURS)[colour], top, left, across)
        return {
            "inputs": picture,
            "targets": np.array(shape, np.int32),
            "weights": np.array(1, np.float32),
            "attr_across": np.array(bins.number(np.array(across)), np.int32),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"across": bins.labels(self.side // 2)}  # of the shape, in pixels

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / len(SHAPES)}
