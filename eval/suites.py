"""What can be asked of a checkpoint. A suite's keyword arguments are the flags that it takes."""

from collections.abc import Callable

from eval.accuracy import accuracy
from eval.attention import attention
from eval.context import context
from eval.continuation import continuation
from eval.export import exported
from eval.lengths import lengths
from eval.reach import reach
from eval.stream import stream

SUITES: dict[str, Callable[..., None]] = {
    "accuracy": accuracy,
    "lengths": lengths,
    "attention": attention,
    "context": context,
    "stream": stream,
    "generate": continuation,
    "reach": reach,
    "export": exported,
}

# What makes them smaller, where there is no room.
SMALLER_BATCH = "lower --config.batch_size, or share out by --config.mesh.fsdp"
SMALLER = dict.fromkeys(SUITES, SMALLER_BATCH) | {
    "attention": "lower --examples, or shorten --prompt",
    "generate": "lower --tokens, or shorten --prompt",
    "export": "share out by --config.mesh.fsdp",
}
SHARED = ("accuracy",)  # those that many processes can share; the others look at a few rows, and one does
