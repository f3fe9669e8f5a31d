"""Traces of some steps, which TensorBoard's and XProf's profilers and Perfetto open: `--profile=STEP:N`."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from model.errors import UserError
from train.clock import Clock
from train.run import Run
from train.step import RunState

MOST = 1000  # steps of a trace: beyond that no viewer opens it
NAME = "train"  # of a step in the trace, where it has its number


def parse(text: str | None) -> range:
    """The steps that `STEP:N` asks for: N of them, from the STEP-th on; none where nothing is asked."""
    if text is None:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text)
    first, n = map(int, found.groups()) if found else (0, 0)
    if not (first >= 1 and 1 <= n <= MOST):
        raise UserError(
            f"--profile is {text[:40]!r}; allowed: STEP:N, {MOST} steps at most, counted from 1; "
            f"closest: {max(first, 1)}:{min(max(n, 1), MOST)}"
        )
    return range(first, first + n)


def check(traced: range, steps: int) -> None:
    """Refuses steps that the run will never take."""
    if traced and traced[-1] > steps:
        first, n = min(traced[0], steps), min(len(traced), max(steps - traced[0] + 1, 1))
        raise UserError(
            f"--profile={traced[0]}:{len(traced)} asks for step {traced[-1]} of {steps}; allowed: up to the last; "
            f"closest: {first}:{n}"
        )


@contextlib.contextmanager
def of(run: Run, traced: range, folder: Path, clock: Clock) -> Iterator[Run]:
    """The run, whose steps leave a trace in a folder when those asked for come.

    Steps that are taken at once are traced together. The trace begins when the device is idle and ends when the last
    step is done; the arithmetic is that of the same programs.
    """
    if not traced:
        yield run
        return
    tracer = _Tracer(run, traced, folder, clock)
    try:
        yield dataclasses.replace(run, train_steps=tracer.take)
    finally:
        tracer.stop()


class _Tracer:
    def __init__(self, run: Run, traced: range, folder: Path, clock: Clock):
        self._run, self._traced, self._folder, self._clock = run, traced, folder, clock
        self._state: RunState | None = None  # as the last step left it
        self._step, self._on, self._over = 0, False, False

    def take(self, state: RunState, batches: Any, n: int) -> tuple[RunState, dict]:
        if self._over:
            return self._run.train_steps(state, batches, n)
        if state is not self._state:  # the first one, or one that was restored
            self._step = int(state.step)
        if not self._on:
            self._start_at(range(self._step + 1, self._step + 1 + n), state)
        with jax.profiler.StepTraceAnnotation(NAME, step_num=self._step + 1) if self._on else contextlib.nullcontext():
            state, sums = self._run.train_steps(state, batches, n)
        self._state, self._step = state, self._step + n
        if self._on and self._step >= self._traced[-1]:
            jax.block_until_ready((state, sums))
            self.stop()
        return state, sums

    def _start_at(self, steps: range, state: RunState) -> None:
        if steps[0] > self._traced[-1]:
            self._over = True
            print(f"nothing is profiled: step {self._traced[-1]} is past, the next one is {steps[0]}")
        elif steps[-1] >= self._traced[0]:
            jax.block_until_ready(state)
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._on = True

    def stop(self) -> None:
        """Writes what was traced."""
        if self._on:
            self._on, self._over = False, True
            self._clock.enter("profile")
            jax.profiler.stop_trace()
            self._clock.take_steps()
            if jax.process_index() == 0:
                print(f"a trace of steps up to {self._step} is in {self._folder}")
