"""How much of training's wall time is not the compiled step: data, dispatch, logging, checkpoints."""

import contextlib
import dataclasses
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import jax

from data import pipeline
from model.errors import UserError
from train import config as configs
from train.checkpoint import Checkpoints
from train.loop import loop
from train.run import Run, prepare
from train.sharding import put_batch, put_batches
from train.step import RunState

WARM = 10  # steps of the loop that are not counted: they compile and fill the pipeline


def measure(spec: str, overrides: Sequence[tuple[str, str]], steps: int, rounds: int) -> dict:
    """Overhead = 1 - (step alone) / (step in the loop), both in groups of as many as the loop takes at once.

    The two take turns, so that a machine that slows down slows both; the median over rounds counts.
    Evaluation is left out: it is asked for, not overhead.
    """
    configs.check(configs.load(spec, overrides))  # also what is asked for below
    asked = [("steps", str(steps + WARM)), ("eval_every", "0"), ("eval_batches", "1"), ("target", "0.0")]
    run = prepare(configs.load(spec, [*overrides, *asked]))
    if steps < 2 * run.most:
        raise UserError(
            f"{steps} steps are too few where the loop takes {run.most} at once; allowed: at least {2 * run.most}"
        )
    alone = steps_alone(run, max(steps // 2, 1))
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
        "steps_per_dispatch": run.most,
        "rounds": rounds,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def step_alone(run: Run, steps: int) -> Iterator[float]:
    """Seconds per step with nothing around it, on one batch already on the device; each `next` measures."""
    batch = put_batch(first_batch(run), run.batch_sharding)
    return repeated(run.init(), lambda state: run.train_step(state, batch), steps)


def steps_alone(run: Run, steps: int) -> Iterator[float]:
    """The same where as many are taken at once as in the loop."""
    if run.most == 1:
        return step_alone(run, steps)
    batches = put_batches([first_batch(run)], run.most, run.batch_sharding)
    groups = repeated(run.init(), lambda state: run.train_steps(state, batches, run.most), -(-steps // run.most))
    return (seconds / run.most for seconds in groups)


def first_batch(run: Run) -> pipeline.Batch:
    return pipeline.Batch(run.task, run.config.data.seed, "train", run.config.batch_size, 0)


def repeated(state: RunState, step: Callable[[RunState], tuple[RunState, dict]], times: int) -> Iterator[float]:
    """Seconds per call, with the state carried on."""
    while True:
        start, pending = time.perf_counter(), None
        for _ in range(times):
            state, sums = step(state)
            # One call ahead of the device, as the loop is: a long queue would be another workload.
            jax.block_until_ready(pending)
            pending = sums
        jax.block_until_ready(pending)
        yield (time.perf_counter() - start) / times


def step_in_loop(run: Run) -> float:
    """Seconds per step of the real loop, between its dispatches, once it is warm."""
    taken, calls = 0, []  # of each dispatch, the steps before it and the time

    def timed(state, batches, n):
        nonlocal taken
        calls.append((taken, time.perf_counter()))
        taken += n
        return run.train_steps(state, batches, n)

    watched = dataclasses.replace(run, train_steps=timed)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        Checkpoints(Path(folder) / "checkpoints", run.config.keep) as checkpoints,
    ):
        loop(watched, Path(folder), checkpoints, run.task.fingerprint(run.config.data.seed))
    first, start = next(call for call in calls if call[0] >= WARM)
    last, end = calls[-1]
    return (end - start) / (last - first)
