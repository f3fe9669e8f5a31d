"""Questions about pictures of coloured shapes: an image and a text in one row."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.shapes import COLOURS, SHAPES, SMALLEST, cluttered, draw
from data.task import Example, Task
from model.asked import Image
from model.settings import Whole, within

WORDS = ("which shape is", "which colour is the", *SHAPES, *COLOURS, "?")
FIRST = {"shape": WORDS.index(next(iter(SHAPES))), "colour": WORDS.index(next(iter(COLOURS)))}


@dataclass(frozen=True)
class ShapeQuestions(Task):
    """Pictures of a few coloured shapes, and of one of them: its colour by its shape, or its shape by its colour.

    Each shape lies in a quarter of its own, and no two have the same shape or the same colour. The text has three
    tokens, what is asked, by what, and a question mark, where the answer is asked for.
    """

    name: ClassVar[str] = "shape_questions"
    kind: ClassVar[str] = "lm"
    vocab_size: ClassVar[int] = len(WORDS)
    length: ClassVar[int] = 3

    side: Annotated[int, within(2 * SMALLEST, 1024)] = 32  # pixels in a side of the picture
    n_shapes: Annotated[int, within(1, 4)] = 2
    clutter: Whole = 2  # bars

    @property
    def image(self) -> Image:
        return Image(self.side, self.side, 3)

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        picture, half = cluttered(rng, self.side, self.clutter), self.side // 2
        shapes, colours = (rng.permutation(len(kinds))[: self.n_shapes] for kinds in (SHAPES, COLOURS))
        for shape, colour, quarter in zip(shapes, colours, rng.permutation(4)[: self.n_shapes], strict=True):
            across = int(rng.integers(SMALLEST, half + 1))
            top, left = rng.integers(half - across + 1, size=2) + half * np.array(divmod(quarter, 2))
            draw(picture, list(SHAPES)[shape], list(COLOURS)[colour], top, left, across)
        asked, one = rng.integers(2), rng.integers(self.n_shapes)
        both = FIRST["shape"] + shapes[one], FIRST["colour"] + colours[one]
        return {
            "image": picture,
            "inputs": np.array([asked, both[1 - asked], len(WORDS) - 1], np.int32),
            "at": np.array([self.length - 1], np.int32),
            "targets": np.array([both[asked]], np.int32),
            "weights": np.ones(1, np.float32),
            "attr_asked": np.array([asked], np.int32),
        }

    @property
    def tail(self) -> int:
        return 1

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"asked": ("shape", "colour")}

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / len(SHAPES), "any one shown": 1 / self.n_shapes}
