"""Ends a run that has got stuck, with the stacks of all its threads on record, so that it can be started again.

A collective that waits for a partner, a file system that no longer answers, a driver that hangs: the process lives,
and nothing happens. A thread looks at what the run is doing (`train.clock.Clock.phase`). What takes many times as long
as it usually does, and longer than any hiccup, is stuck.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from train import hosts
from train.clock import Clock
from train.exit_codes import RESTART

USUAL = ("step", "data")  # what comes with every step, so that one knows how long it takes
WARM = 5  # visits before one does: the first steps may wait for tuning, connections and caches
LONG = 20  # what else there is has so many times as long
TELLING = 10  # seconds for the last words: a file system that hangs must not keep the process
LINGER = 3  # seconds that other processes, stuck likewise, have to leave their stacks before they are ended too


def limit(phase: str, visits: Collection[float], factor: float, seconds: float) -> float:
    """Seconds that a visit of a phase may take, by those that the latest have taken."""
    patience = seconds if phase in USUAL and len(visits) >= WARM else LONG * seconds
    return max(patience, factor * statistics.median(visits)) if visits else patience


class Watchdog:
    """Watches a clock for the length of a block. `factor` 0 watches nothing.

    Time counts only as far as this thread was there to see it, one look after another: a laptop that slept, or a
    process that was stopped and continued, has taken no time.
    """

    def __init__(
        self,
        clock: Clock,
        factor: float,
        seconds: float,
        folder: Path,
        end: Callable[[int], Any] = os._exit,
    ):
        self._clock, self._factor, self._seconds, self._folder, self._end = clock, factor, seconds, folder, end
        self._rank, self._every = jax.process_index(), min(1.0, seconds / 10)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._factor:
            self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._done.set()

    def _watch(self) -> None:
        visit, seen, last = None, 0.0, time.monotonic()
        while not self._done.wait(self._every):
            now, current = time.monotonic(), self._clock.phase
            seen = seen + min(now - last, 2 * self._every) if current is visit else 0.0
            visit, last = current, now
            visits = tuple(self._clock.visits[current[0]])
            allowed = limit(current[0], visits, self._factor, self._seconds)
            if seen > allowed:
                usual = f", where {statistics.median(visits):.3g} s are usual" if visits else ""
                self._bark(f"stuck in '{current[0]}' for {seen:.0f} s{usual}; allowed: {allowed:.0f} s")
                return

    def _bark(self, text: str) -> None:
        """Says what there is to say, as far as that can still be said, and ends the process."""
        stacks, line = self._folder / f"stacks.{self._rank}.txt", hosts.the_line()
        told = f"error: {text}; stacks are in {stacks}; started again it resumes\n"

        def keep() -> None:
            with open(stacks, "a", encoding="utf-8") as file:
                print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {text}", file=file, flush=True)
                faulthandler.dump_traceback(file)
                os.fsync(file.fileno())

        def show() -> None:
            faulthandler.dump_traceback(2)
            os.write(2, told.encode())  # last, where whoever reads a log looks first
            sys.stdout.flush()

        def tell_others() -> None:
            if line is not None:
                time.sleep(LINGER)
                line.fail(RESTART, text)

        deadline = time.monotonic() + TELLING
        words = [threading.Thread(target=_try, args=[word], daemon=True) for word in (keep, show, tell_others)]
        for word in words:
            word.start()
        for word in words:
            word.join(max(deadline - time.monotonic(), 0))
        self._end(RESTART)


def _try(word: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        word()
