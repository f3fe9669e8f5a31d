"""What a task brings to a model and asks of it: all that a model must know of its task to be built."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Vectors:
    """Rows of real vectors, `[B, L, channels]`: pixels, audio, series."""

    channels: int


@dataclass(frozen=True)
class Image:
    """Pictures, `[B, height, width, channels]`; a model cuts them into patches, which are its row."""

    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class Asked:
    """What rows are made of, and what is asked: an answer over the same token ids, or one of `n_classes`."""

    vocab_size: int  # 0: there are no tokens
    n_classes: int = 0  # 0: it asks for tokens
    tail: int = 0  # tokens of a row from the first one where it may ask to the last; 0: there is no such place
    labels: bool = False  # whether each token is one of the classes, and not the row
    from_last: bool = False  # whether it asks for all labels of a row from the row's last vector alone
    source: int = 0  # tokens of a second sequence, which the rows of the first are an answer to; 0: there is none
    inputs: Vectors | Image | None = None  # None: token ids, [B, L]
    image: Image | None = None  # what stands in front of a row of tokens
    values: bool = False  # whether it asks for the numbers of what it masks of its real inputs
    pair: bool = False  # whether it asks about two rows, [B, L] each

    @property
    def classifies(self) -> bool:
        """Whether it asks for a class of each row."""
        return bool(self.n_classes) and not self.labels


# The parts of a batch that a model is called with, by name, besides its inputs.
ARGUMENTS = ("segments", "at", "source", "source_segments", "image", "other", "other_segments", "masked")
