"""The adding problem (Hochreiter and Schmidhuber, 1997, https://doi.org/10.1162/neco.1997.9.8.1735), in classes."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.task import Example, Task
from model.asked import Vectors
from model.settings import LONGEST, even, within


@dataclass(frozen=True)
class Adding(Task):
    """Numbers of which two are marked, as pairs [number, mark]: the class of their sum.

    Numbers are uniform in [0, 1); one mark lies in the first half of a row, one in the second, uniformly. A class is
    one of `n_classes` equal parts of [0, 2).
    """

    name: ClassVar[str] = "adding"
    kind: ClassVar[str] = "classify"
    block: ClassVar[int] = 64
    vocab_size: ClassVar[int] = 0

    length: Annotated[int, within(2, LONGEST), even] = 128  # pairs
    n_classes: Annotated[int, within(2, 1000), even] = 10

    @property
    def inputs(self) -> Vectors:
        return Vectors(channels=2)

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L = self.block, self.length
        numbers = rng.random((B, L), np.float32)
        places = rng.integers(L // 2, size=(B, 2)) + np.array([0, L // 2])
        marks = np.zeros((B, L), np.float32)
        np.put_along_axis(marks, places, 1, axis=1)
        total = np.take_along_axis(numbers, places, axis=1).astype(np.float64).sum(1)
        return {
            "inputs": np.stack([numbers, marks], axis=-1),
            "targets": (total * self.n_classes / 2).astype(np.int32),
            "weights": np.ones(B, np.float32),
            "attr_distance": bins.number(places[:, 1] - places[:, 0]).astype(np.int32),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"distance": bins.labels(self.length - 1)}  # between the two marks

    def baselines(self) -> dict[str, float]:
        """Of the sum's law, a triangle, the largest part; and with one of the numbers, any part of [x, x + 1).

        Of two classes none lies in there whole: the larger share of one, from a half to all.
        """
        part = 2 / self.n_classes
        return {"majority": part - part**2 / 2, "one of the two": part if self.n_classes > 2 else 3 / 4}
