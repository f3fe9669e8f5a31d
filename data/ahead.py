"""Items made ahead by a thread of their own, while whoever takes them is busy with earlier ones."""

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PATIENCE = 10.0  # seconds that closing waits for a thread, which may be stuck in reading a file


class Ahead(Iterator[T], Generic[T]):
    """The items of an iterator, up to `depth` of them made before they are asked for.

    What the iterator raises is raised by `next`, after the items that came before it.
    """

    def __init__(self, items: Iterator[T], depth: int):
        self._made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(items,), name="ahead", daemon=True)
        self._thread.start()

    def _make(self, items: Iterator[T]) -> None:
        end: BaseException = StopIteration()
        try:
            for item in items:
                self._made.put((item, None))
                if self._closed.is_set():
                    return
        except BaseException as error:
            end = error
        self._made.put((None, end))

    def __next__(self) -> T:
        item, end = self._made.get()
        if end is not None:
            self._made.put((None, end))  # for whoever asks again
            raise end
        return item

    def close(self) -> None:
        """Ends the thread; what it has made is dropped."""
        self._closed.set()
        while not self._made.empty():  # one that waits for room finds it
            self._made.get_nowait()
        self._thread.join(PATIENCE)

    def __enter__(self) -> "Ahead[T]":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
