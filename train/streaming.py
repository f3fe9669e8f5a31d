"""One long document, byte after byte: read in chunks with the state carried on, or each byte from a row read anew.

Losses are -log p in nats of the tokens after the first, `[N]` of N + 1 tokens. The model is run as for generation, one
row at a time or a few, so all devices of a mesh do the same.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data.text import Text
from model.build import Model
from model.contract import State
from model.errors import UserError
from model.ops.cross_entropy import Targets
from train import hosts
from train.evaluate import bits_per_byte
from train.run import Run
from train.sharding import replicated

ROW_TOKENS = 2**15  # in a batch of rows read anew


def document(run: Run, split: str, length: int) -> np.ndarray:
    """The first `length` bytes of a split and the one after them, int32; 0: all there are."""
    return run.task.document(split, length or run.task.n_bytes(split) - 1)


def check(
    run: Run,
    split: str,
    length: int,
    recompute: int = 0,
    key: str = "stream.length",
    closest: str = "--suite=accuracy",
) -> None:
    """Refuses, before anything is compiled, a document that there is not or that the model cannot read.

    `key` is the setting that asks for its length, `closest` what to ask of a run without documents.
    """
    task = run.task
    if not (isinstance(task, Text) and run.objective.name == "task"):
        raise UserError(
            f"task {task.name!r} with objective {run.objective.name!r} has no document to stream; allowed: "
            f"data.task=text with objective.kind=task; closest: {closest}"
        )
    there = task.n_bytes(split) - 1
    if length > there:
        raise UserError(f"{key} is {length}, and the {split} split has {there:,} bytes to ask for")
    longest, limit = recompute or length or there, run.model.limit()
    if limit is not None and longest > limit:
        key = "stream.recompute" if recompute and key == "stream.length" else key
        raise UserError(f"{key} {longest} is past the {limit} positions that this model can place")


def check_asked(run: Run) -> None:
    """The same of what the config asks for."""
    c = run.config.stream
    if c.length:
        check(run, "test", c.length, c.recompute, closest="stream.length=0")
    elif c.recompute:
        raise UserError(f"stream.recompute is {c.recompute}, and stream.length is 0, no document; allowed: 0")


def longest(run: Run) -> int:
    """Tokens of the longest past that a test of the run carries on."""
    c = run.config.stream
    return max(run.task.length, 0 if c.recompute else c.length)


def losses(run: Run, params: Any, tokens: np.ndarray, chunk: int, recompute: int = 0) -> Iterator[np.ndarray]:
    """Of a document, piece by piece: its state carried on, or with `recompute` so many tokens read for each one."""
    if not recompute:
        return streamed(run, params, tokens, chunk)
    return recomputed(run, params, tokens, recompute)


def streamed(run: Run, params: Any, tokens: np.ndarray, chunk: int) -> Iterator[np.ndarray]:
    """Chunk after chunk; how long they are changes nothing but the speed."""
    N = len(tokens) - 1

    def read(params: Any, state: State, row: jax.Array) -> tuple[jax.Array, State]:
        found, state = run.model.apply({"params": params}, row[:, :-1], state=state, targets=Targets(row[:, 1:]))
        return found.loss[0], state

    step = on_all(run, read, donate_argnums=1)
    state = on_all(run, partial(run.model.init_state, 1, N))()
    pending = None
    for start in range(0, N, chunk):  # one chunk behind the device
        found, state = step(params, state, tokens[None, start : start + chunk + 1])
        if pending is not None:
            yield np.asarray(pending)
        pending = found
    yield np.asarray(pending)


def recomputed(run: Run, params: Any, tokens: np.ndarray, context: int) -> Iterator[np.ndarray]:
    """Each token from the `context` before it, or from all where there are fewer."""
    first = min(context, len(tokens) - 1)
    yield np.concatenate(list(streamed(run, params, tokens[: first + 1], first)))
    yield from from_context(run, params, tokens, np.arange(first + 1, len(tokens)), context)


def from_context(run: Run, params: Any, tokens: np.ndarray, targets: np.ndarray, context: int) -> Iterator[np.ndarray]:
    """Of the tokens at `targets`, each from a row of exactly the `context` tokens before it; batch after batch."""
    B = max(min(ROW_TOKENS // context, len(targets)), 1)
    step = on_all(run, partial(last_of_row, run.model))
    for start in range(0, len(targets), B):
        ends = targets[start : start + B]
        filled = np.concatenate([ends, np.repeat(ends[-1:], B - len(ends))])  # one program for the last batch too
        rows = tokens[filled[:, None] + np.arange(-context, 1)]
        yield np.asarray(step(params, rows))[: len(ends)]


def last_of_row(model: Model, params: Any, rows: jax.Array) -> jax.Array:
    """-log p `[B]` of the last token of each row `[B, context + 1]`."""
    at = jnp.full((rows.shape[0], 1), rows.shape[1] - 2)
    found, _ = model.apply({"params": params}, rows[:, :-1], at=at, targets=Targets(rows[:, -1:]))
    return found.loss[:, 0]


def on_all(run: Run, function: Callable, **options: Any) -> Callable:
    """Jitted, the same on every device."""
    return hosts.in_step(jax.jit(function, out_shardings=replicated(run.mesh), **options))


def along(found: np.ndarray, first: int) -> list[dict[str, Any]]:
    """Means over stretches of a document: its `first` tokens, and from there to each doubling, or to where it ends."""
    cuts = [0, first]
    while cuts[-1] < len(found):
        cuts.append(2 * cuts[-1])
    cuts[-1] = len(found)
    return [
        {"bytes": end, "loss": float(np.mean(found[start:end], dtype=np.float64)), "targets": end - start}
        for start, end in itertools.pairwise(cuts)
    ]


def scores(run: Run, params: Any) -> tuple[dict[str, float], dict[str, int]]:
    """What the config asks of the test split, and how many targets each number rests on: `test/stream_METRIC` of all.

    And `test/length_N/stream_METRIC` of each stretch, which ends N tokens into it; the first is as long as a row.
    """
    c = run.config.stream
    if not c.length:
        return {}, {}
    found = np.concatenate(list(losses(run, params, document(run, "test", c.length), c.chunk, c.recompute)))
    named = {"test/": (float(np.mean(found, dtype=np.float64)), len(found))}
    lines = along(found, run.task.length)
    named |= {f"test/length_{line['bytes']}/": (line["loss"], line["targets"]) for line in lines}
    values, targets = {}, {}
    for prefix, (loss, n) in named.items():
        told = {"loss": loss} | bits_per_byte(run.objective, loss)
        values |= {f"{prefix}stream_{name}": value for name, value in told.items()}
        targets |= {f"{prefix}stream_{name}": n for name in told}
    return values, targets
