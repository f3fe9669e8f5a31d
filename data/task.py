"""What a task is: examples as a pure function of (seed, split, index), and the facts to judge a score by.

Shape letters: L tokens the model sees, Q positions where it is asked.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from data.rng import Stream
from model.asked import Asked, Image, Vectors
from model.errors import UserError, choose
from model.settings import check_fields

SPLITS = ("train", "validation", "test")

Example = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task's fields are the user's config section `data.<name>`, and their types say what they may be.

    Every task also has `length` (L) and `vocab_size`, as fields where the user may choose them; L of pictures is their
    number of pixels, and a vocabulary of 0 says that there are no tokens.

    An example of an "lm" task holds `inputs` int32 [L], `targets` int32 [Q] and `weights` float32 [Q]. `at`
    int32 [Q] names the positions whose hidden states are read; without it Q = L and every position is a
    target. A "label" example is the same, its targets below `n_classes`; a "classify" example has scalar
    `targets` and `weights`. `segments` int32 [L], where given, is 1 on the tokens of a row and 0 on the padding
    behind them. `attr_<name>` int32 holds bin numbers, in the shape of `targets`. All examples of one task have equal
    shapes; their weights may differ by split, where training asks for more than what counts as an answer.

    Where rows are no tokens, `inputs` are float32 [L, C] or pictures [height, width, C]. A text behind a picture has
    the picture as `image`. A pair has `other` and `other_segments` besides `inputs` and `segments`.
    """

    name: ClassVar[str]
    kind: ClassVar[str]  # lm, classify, label
    n_classes: ClassVar[int] = 0  # classify and label only
    next_token: ClassVar[bool] = False  # whether targets are the inputs one token on, to be read by who sees ahead
    running_text: ClassVar[bool] = False  # whether rows are text of which other targets can be made
    whole_answers: ClassVar[bool] = False  # whether an answer that is right in all places counts besides
    block: ClassVar[int] = 1  # examples made together from one random stream, where that is faster
    costly: ClassVar[bool] = False  # whether one core may make them slower than a model reads them
    pair: ClassVar[bool] = False  # whether an example is of two rows
    by_epoch: ClassVar[bool] = False  # whether a finite training set changes from epoch to epoch

    @property
    def shows_answers(self) -> bool:
        """Whether a target may stand among the inputs, one token on from where it is asked for."""
        return self.next_token

    def __post_init__(self) -> None:
        check_fields(self, f"data.{self.name}")
        self.check()
        self.check_splits()

    def check(self) -> None:
        """Raises UserError if the fields do not go together."""

    def check_splits(self) -> None:
        """Refuses what was prepared of so few examples that none is left for some split."""
        sizes = self.sizes()
        empty = next((split for split in sizes if sizes[split] == 0), None)
        if empty is not None:
            found = ", ".join(f"{split} {n:,}" for split, n in sizes.items())
            raise UserError(f"data.{self.name} has no example in its {empty} split ({found}); a larger set is needed")

    @property
    def tail(self) -> int:
        """Tokens of a row from the first one where any example may ask to the last; 0: there is no such place."""
        return 0

    @property
    def inputs(self) -> Vectors | Image | None:
        """What rows are made of; None: token ids."""
        return None

    @property
    def image(self) -> Image | None:
        """The picture in front of a row of tokens."""
        return None

    @property
    def asked(self) -> Asked:
        """What a model must know to be built for this task."""
        rows = dict(inputs=self.inputs, image=self.image, pair=self.pair)
        return Asked(self.vocab_size, self.n_classes, self.tail, labels=self.kind == "label", **rows)

    @property
    def target_length(self) -> int:
        """Tokens of the rows that answers are read off: `inputs`."""
        return self.length

    def resized(self, length: int) -> dict[str, Any]:
        """The fields that another length changes."""
        return {"length": length}

    def sizes(self) -> dict[str, int | None]:
        """Examples per split; None: an endless stream of fresh ones."""
        return dict.fromkeys(SPLITS)

    def size(self, split: str) -> int | None:
        return choose("split", split, self.sizes())

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        """Examples index..index + block - 1, stacked, pure in its arguments; `index` is a multiple of `block`.

        Over a training set that changes `by_epoch` the index runs on past the end: index // size is the epoch,
        index % size the place, and `rng` depends on the place alone.
        """
        return {key: array[None] for key, array in self.example(split, index, rng).items()}

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        """One example: what a task defines that makes them one at a time."""
        raise NotImplementedError

    def packed(self, made: Example) -> Example:
        """Examples as they are kept in memory, if they take less room so; `unpacked` gives every bit back."""
        return made

    def unpacked(self, kept: Example) -> Example:
        return kept

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """Names of the attributes accuracy is sliced by -> labels of their bins."""
        return {}

    def baselines(self) -> dict[str, float]:
        """Accuracies of trivial predictors, printed beside results."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Any]:
        """The fields that determine the data."""
        return dataclasses.asdict(self)

    def content(self) -> Iterable[bytes]:
        """Bytes from outside that determine the data."""
        return ()

    def fingerprint(self, seed: int) -> str:
        """Short hash of all that determines the data; some examples are in it, so that changed code shows."""
        h = hashlib.sha256(repr((self.name, sorted(self.parameters().items()), seed)).encode())
        for chunk in self.content():
            h.update(chunk)
        for split in SPLITS:
            size = self.size(split)
            for index in range(0, 3 * self.block if size is None else min(3 * self.block, size), self.block):
                made = self.examples(split, index, Stream(seed, split).at(index))
                for key, array in sorted(made.items()):
                    h.update(f"{split}/{index}/{key}/{array.dtype}/{array.shape}".encode() + array.tobytes())
        return h.hexdigest()[:16]

    def bound(self, field: str, low: float, high: float | None = None, why: str = "") -> None:
        """Raises UserError unless low <= field <= high."""
        value = getattr(self, field)
        if low <= value and (high is None or value <= high):
            return
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        near = low if high is None or value < low else high
        raise UserError(
            f"data.{self.name}.{field} is {value}; allowed: {allowed}{why and f' ({why})'}; closest: {near}"
        )

    def refuse_unread(self, names: Iterable[str], why: str, instead: str) -> None:
        """Raises UserError where one of these fields, which nobody reads, was changed."""
        for name in names:
            value, usual = getattr(self, name), self.__dataclass_fields__[name].default
            if value != usual:
                raise UserError(f"data.{self.name}.{name} is {value}, but {why}; closest: {usual}, or {instead}")
