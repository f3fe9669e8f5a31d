"""What a task brings to a model and asks of it: all that a model must know of its task to be built."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """Token ids in; out comes an answer over the same ids, or one of `n_classes`, for a row or for each token."""

    vocab_size: int
    n_classes: int = 0  # 0: it asks for tokens
    tail: int = 0  # tokens of a row from the first one where it may ask to the last; 0: there is no such place
    labels: bool = False  # whether each token is one of the classes, and not the row
    source: int = 0  # tokens of a second sequence, which the rows of the first are an answer to; 0: there is none


# The parts of a batch that a model is called with, by name, besides its inputs.
ARGUMENTS = ("segments", "at", "source", "source_segments")
