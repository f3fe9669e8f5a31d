"""Work in processes of their own, each of which first makes something ready and then runs it, when it is told to.

What is made ready stays in its process: so programs are traced and compiled side by side, and run one after another.
"""

import contextlib
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

Row = dict[str, Any]
LARGE = 2**28  # bytes; a process that has held more gives them back by ending, as others may need all there are


class Place:
    """A process. `ready` is a function of the project's, by which it makes what it is asked for."""

    def __init__(self, ready: Callable[..., Callable[[], Row]]):
        self._ready = ready
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ask, answers = context.Pipe()
        self._process = context.Process(target=serve, args=(answers, self._ready), daemon=True)
        self._process.start()
        answers.close()

    def prepare(self, *what: Any) -> None:
        self._ask.send(what)

    def answer(self) -> Any:
        """What it says next; if it broke down, a row that says so, and there is a new one in its place."""
        try:
            return self._ask.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._begin()
            return {"status": "failed", "error": f"the process ended with exit code {code}"}

    def run(self) -> Row:
        self._ask.send(None)
        row = self.answer()
        if row.get("temp_bytes", 0) > LARGE:
            self.end()
            self._begin()
        return row

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def serve(pipe: Connection, ready: Callable[..., Callable[[], Row]]) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            run = ready(*pipe.recv())
            pipe.send({})
            pipe.recv()
            pipe.send(run())


@contextlib.contextmanager
def elsewhere(places: int, ready: Callable[..., Callable[[], Row]]) -> Iterator[Callable[..., Callable[[], Row]]]:
    """`ready`, of up to so many calls at once in a process each, which the function that it returns runs there."""
    every = [Place(ready) for _ in range(places)]
    free: queue.Queue[Place] = queue.Queue()
    for place in every:
        free.put(place)

    def prepare(*what: Any) -> Callable[[], Row]:
        place = free.get()
        place.prepare(*what)
        broken = place.answer()

        def run() -> Row:
            try:
                return broken or place.run()
            finally:
                free.put(place)

        return run

    try:
        yield prepare
    finally:
        for place in every:
            place.end()
