"""How far a long reading or writing has come: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

EVERY = 10.0  # seconds


class Bytes:
    """`with Bytes("mnist: reading", total) as bar: bar(n)`; total None: nobody knows."""

    def __init__(self, what: str, total: int | None, done: int = 0):
        self._what, self._total, self._done = what, total, done
        console = Console(file=sys.stdout)
        columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
        self._bar = None
        if console.is_interactive:
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._due = time.monotonic() + EVERY

    def __call__(self, n: int) -> None:
        self._done += n
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif now >= self._due:
            self._due = now + EVERY
            of = f" of {self._total / 1e6:,.0f}" if self._total else ""
            print(f"{self._what}: {self._done / 1e6:,.0f}{of} MB", flush=True)

    def __enter__(self) -> "Bytes":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
