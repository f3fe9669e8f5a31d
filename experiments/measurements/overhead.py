"""How much of training's wall time is not the compiled step: data, dispatch, logging, checkpoints."""

import contextlib
import dataclasses
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import jax

from data import pipeline
from train import config as configs
from train.checkpoint import Checkpoints
from train.loop import loop
from train.run import Run, prepare
from train.sharding import put_batch

WARM = 10  # steps of the loop that are not counted: they compile and fill the pipeline


def measure(spec: str, overrides: Sequence[tuple[str, str]], steps: int, rounds: int) -> dict:
    """Overhead = 1 - (step alone) / (step in the loop).

    The two take turns, so that a machine that slows down slows both; the median over rounds counts.
    Evaluation is left out: it is asked for, not overhead.
    """
    configs.check(configs.load(spec, overrides))  # also what is asked for below
    asked = [("steps", str(steps + WARM)), ("eval_every", "0"), ("eval_batches", "1"), ("target", "0.0")]
    run = prepare(configs.load(spec, [*overrides, *asked]))
    alone = step_alone(run, max(steps // 2, 1))
    next(alone)  # compiles
    turns = []
    for _ in range(rounds):
        before, inside, after = next(alone), step_in_loop(run), next(alone)
        turns.append(((before + after) / 2, inside))
    overheads = sorted(1 - step / inside for step, inside in turns)
    return {
        "overhead": median(overheads),
        "lowest": overheads[0],
        "highest": overheads[-1],
        "step_ms": 1e3 * median(step for step, _ in turns),
        "loop_ms": 1e3 * median(inside for _, inside in turns),
        "steps": steps,
        "rounds": rounds,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def step_alone(run: Run, steps: int) -> Iterator[float]:
    """Seconds per step with nothing around it, on one batch already on the device; each `next` measures."""
    c = run.config
    batch = put_batch(pipeline.Batch(run.task, c.data.seed, "train", c.batch_size, 0), run.batch_sharding)
    state = run.init()
    while True:
        start, pending = time.perf_counter(), None
        for _ in range(steps):
            state, sums = run.train_step(state, batch)
            # One step ahead of the device, as the loop is: a long queue would be another workload.
            jax.block_until_ready(pending)
            pending = sums
        jax.block_until_ready(pending)
        yield (time.perf_counter() - start) / steps


def step_in_loop(run: Run) -> float:
    """Seconds per step of the real loop, between its calls of the step, once it is warm."""
    calls: list[float] = []

    def timed(*args):
        calls.append(time.perf_counter())
        return run.train_step(*args)

    watched = dataclasses.replace(run, train_step=timed)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        Checkpoints(Path(folder) / "checkpoints", run.config.keep) as checkpoints,
    ):
        loop(watched, Path(folder), checkpoints)
    return (calls[-1] - calls[WARM]) / (len(calls) - 1 - WARM)
