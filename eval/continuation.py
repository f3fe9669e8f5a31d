"""A prompt and what the model writes after it, shown as it comes."""

import codecs
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

import jax
import numpy as np

from data import Task
from data.source_target import END, START, SourceTask
from data.text import Text
from eval.generate import Pace, generate
from eval.restore import Restored
from eval.sample import Sampling
from model.errors import UserError
from model.settings import is_one_of, shown
from train.denoising import Denoising
from train.run import Run

HIDDEN = "<mask>"  # what a prompt hides, where a model was trained to fill it in


def continuation(
    restored: Restored, *, prompt: str, tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """The suite: prints the prompt and `tokens` tokens after it, or the answer to it; nothing is written.

    How long that took goes to stderr: to compile, from then to the first token, and the pace of the others.
    """
    run = restored.run
    check_tokens(run.task)
    sampling = Sampling(temperature, top_k, top_p)
    first, source, end = beginning(restored.run, prompt)
    given = {} if source is None else {"source": np.array([source], np.int32)}
    rows = np.array([first], np.int32)
    write = partial(generate, run.model, restored.params, rows, tokens, sampling, jax.random.key(seed), **given)
    began = time.perf_counter()
    next(write())  # by now all is compiled, and what follows takes the time that it takes
    pace = Pace()
    made, compiling = write(pace=pace), pace.started - began
    written = itertools.takewhile(lambda token: token != end, (int(token[0]) for token in made))
    sys.stdout.write(prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    sys.stdout.write("\n" if given else "")
    for piece in decode(run.task, written):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    rest = "" if pace.tokens_per_s is None else f", then {pace.tokens_per_s:,.0f} tokens/s"
    print(f"compiled in {compiling:.2f} s; first token after {pace.first_s:.3f} s{rest}", file=sys.stderr)


def beginning(run: Run, prompt: str) -> tuple[list[int], list[int] | None, int | None]:
    """The tokens to go on from, the source that they answer, if there is one, and the token that ends an answer."""
    if isinstance(run.task, SourceTask):
        return [START], encode(run.task, prompt), END
    if isinstance(run.objective, Denoising):
        shown = [encode_bytes(part) for part in prompt.split(HIDDEN)]
        return [run.objective.end], run.objective.source(shown), run.objective.end
    return encode(run.task, prompt), None, None


def check_tokens(task: Task) -> None:
    """Refuses a task whose rows are more than token ids, or other than those."""
    brings = {"real numbers": task.inputs, "an image before its text": task.image, "pairs of rows": task.pair}
    for what, brought in brings.items():
        if brought:
            raise UserError(
                f"task {task.name!r} brings {what}, and this suite reads rows of token ids; allowed: --suite=accuracy"
            )


def encode(task: Task, prompt: str) -> list[int]:
    """Token ids: the bytes of a text, or the ids themselves, written with blanks between them.

    A text that begins with nothing begins as a line does, after a newline.
    """
    if isinstance(task, SourceTask):
        return task.encode(prompt)
    if isinstance(task, Text):
        return encode_bytes(prompt) or [ord("\n")]
    words = prompt.split()
    wrong = [word for word in words if not is_one_of(range(task.vocab_size), word)]
    if wrong or not words:
        given = f"holds {shown(wrong[0])}" if wrong else "is empty"
        raise UserError(f"prompt {given}; task {task.name} takes token ids from 0 to {task.vocab_size - 1}")
    return [int(word) for word in words]


def encode_bytes(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogateescape"))


def decode(task: Task, tokens: Iterable[int]) -> Iterator[str]:
    """What to print for each token as it comes: a character once its bytes are complete, or the id."""
    if isinstance(task, SourceTask):
        yield from map(task.decode, tokens)
        return
    if not isinstance(task, Text):
        yield from (f" {token}" for token in tokens)
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield harmless(decoder.decode(bytes([token]))) if token < task.vocab_size else HIDDEN
    yield harmless(decoder.decode(b"", final=True))


def harmless(text: str) -> str:
    """Without the control characters by which bytes that mean nothing could change a terminal's mode."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
