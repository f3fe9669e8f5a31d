"""Blocks of costly examples, made by processes of their own: as many as there are cores besides this process's one.

A worker is an interpreter at the end of a pipe. It never sees the state of this process, and when the pipe ends it ends
too, after the block it has in hand: however this process comes to its end, none is left behind. Which of them makes a
block says nothing about the block, since examples are pure in what it names.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NamedTuple

from data.rng import Stream
from data.task import Example, Task

MOST = 32  # workers, each of which takes the memory of an interpreter
START = 1.0  # seconds of work that are done here first: it takes a worker as long to begin
IDLE = 60.0  # seconds after which a worker that has nothing to do ends
SERVE = "import sys; from data.workers import serve; serve(int(sys.argv[1]))"


class Block(NamedTuple):
    """Examples that a task makes together, and the random numbers they are made of."""

    task: Task
    seed: int
    split: str
    order: int
    index: int  # of the first example
    place: int  # of its random numbers

    def make(self) -> Example:
        return self.task.examples(self.split, self.index, Stream(self.seed, self.split, self.order).at(self.place))


def cores() -> list[int]:
    """Those that this process may use, as far as the system tells."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def spare_cores() -> int:
    return min(len(cores()) - 1, MOST)


class Workers:
    """Threads may share them: one is served after another."""

    def __init__(self, count: int | None = None, start: float = START):
        self.count = spare_cores() if count is None else count
        self._here = start  # seconds of work still to be done in this process
        self._processes: dict[Connection, subprocess.Popen] = {}
        self._lock = threading.Lock()

    @property
    def hands(self) -> int:
        """How many blocks are made at a time."""
        return max(self.count, 1) if self._here <= 0 else 1

    def make(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, Example]]:
        """Each block, as soon as it is made."""
        left = deque(blocks)
        with self._lock:
            while left and (self._here > 0 or self.count < 1):
                begin, block = time.monotonic(), left.popleft()
                made = block.make()
                self._here -= time.monotonic() - begin
                yield block, made
            yield from self._shared(left)

    def _shared(self, left: deque[Block]) -> Iterator[tuple[Block, Example]]:
        """Each worker has a block in hand and one to go on with; more than that never waits to be taken."""
        self._gather(min(self.count, len(left)))
        asked = {pipe: deque() for pipe in self._processes}
        try:
            while left or any(asked.values()):
                for depth, (pipe, blocks) in itertools.product((1, 2), asked.items()):
                    if left and len(blocks) < depth:
                        blocks.append(left.popleft())
                        with contextlib.suppress(OSError):  # told when the answer does not come
                            pipe.send(blocks[-1])
                if not asked:  # what no worker could make is made here, where it is said why
                    block = left.popleft()
                    yield block, block.make()
                for pipe in wait([pipe for pipe, blocks in asked.items() if blocks]) if asked else ():
                    made = answer(pipe)
                    if made is not None:
                        yield asked[pipe].popleft(), made
                    else:  # lost, and not replaced: there may be no room for it
                        left.extendleft(reversed(asked.pop(pipe)))
                        self.count -= 1
                        self._end(pipe)
        finally:
            for pipe, blocks in asked.items():
                if blocks:  # whoever asked has seen enough
                    self._end(pipe)

    def _gather(self, n: int) -> None:
        """At least n workers, new ones for those that had nothing to do."""
        for pipe in [pipe for pipe in self._processes if pipe.poll()]:  # nothing was asked: the pipe has ended
            self._end(pipe)
        while len(self._processes) < n:
            here, there = Pipe()
            with there:
                self._processes[here] = start(there.fileno())

    def _end(self, pipe: Connection) -> None:
        pipe.close()
        process = self._processes.pop(pipe)
        process.kill()
        process.wait()

    def close(self) -> None:
        with self._lock:
            for pipe in list(self._processes):
                self._end(pipe)


def start(pipe: int) -> subprocess.Popen:
    """A worker at that pipe; Ctrl-C on the terminal is not for it."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, str(pipe)],
        pass_fds=[pipe],
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def answer(pipe: Connection) -> Example | None:
    """What a worker has made; None: it has ended."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def serve(pipe: int) -> None:
    """Makes the blocks that come through a pipe, until it ends or brings none for a while."""
    with Connection(pipe) as asked, contextlib.suppress(EOFError, OSError):
        while asked.poll(IDLE):
            asked.send(asked.recv().make())
