"""Where trials take place: folders of runs, the undisturbed run that each is held against, and what a try yields."""

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import fork
from tests.test_chosen_step import lasting
from tests.test_nothing_lost import command, losses
from train.workdir import read_json

Outcome = str  # what went wrong in a try; empty: it was survived


@dataclass
class Place:
    folder: Path
    notes: dict[str, Any] = field(default_factory=dict)  # what a trial has measured besides
    _calm: dict[str, Path] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def new(self) -> Path:
        """A folder's name that nothing has."""
        return self.folder / f"run{next(self._numbers)}"

    def calm(self, start: Callable[[Path], Iterable[fork]], key: str) -> Path:
        """A finished run of this kind, that nothing has happened to."""
        if key not in self._calm:
            folder = self.new()
            processes = list(start(folder))
            if any(process.wait(400) for process in processes):
                raise RuntimeError(f"an undisturbed run failed: {processes[0].stderr}")
            self._calm[key] = folder
        return self._calm[key]

    def finish(self, folder: Path, settings: dict[str, Any] | None = None, exact: bool = True) -> Outcome:
        """Lets a run that was disturbed come to its end, and compares it with one that was not."""
        settings = settings or {}
        return self.compare(folder, lambda path: [fork(*command(path, **settings))], json.dumps(settings), exact)

    def compare(self, folder: Path, start: Callable[[Path], Iterable[fork]], key: str, exact: bool = True) -> Outcome:
        calm = self.calm(start, key)
        processes = list(start(folder))
        codes = [process.wait(400) for process in processes]
        if any(codes):
            return f"ended with {codes}: {last_line(processes[0])}"
        return difference(folder, calm, exact)


def difference(folder: Path, calm: Path, exact: bool = True) -> Outcome:
    """In what a run differs from another: steps, bits of losses, the row; not exact: losses within rounding."""
    mine, other = losses(folder), losses(calm)
    if [step for step, _ in mine] != [step for step, _ in other]:
        return f"it logged {len(mine)} steps, not {len(other)}"
    if not exact:
        pairs = [(float.fromhex(a), float.fromhex(b)) for (_, a), (_, b) in zip(mine, other, strict=True)]
        far = [i for i, (a, b) in enumerate(pairs) if abs(a - b) > ROUNDING * abs(b)]
        return f"the loss of step {mine[far[0]][0]} is another" if far else ""
    if mine != other:
        return f"the loss of step {next(a for a, b in zip(mine, other, strict=True) if a != b)[0]} has other bits"
    rows = [lasting(read_json(path / "result.json")) for path in (folder, calm)]
    keys = [key for key in rows[1] if rows[0].get(key) != rows[1][key]]
    return f"the row has another {', '.join(keys)}" if keys else ""


ROUNDING = 1e-3  # that losses may be apart after a hundred steps on other meshes


def last_line(process: fork) -> str:
    return (process.stderr.strip().splitlines() or ["nothing said"])[-1][:200]


def told(process: fork, code: int, *words: str) -> Outcome:
    """Whether a process ended with this code and one line that has these words."""
    ended = process.wait(100)
    lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    if ended != code:
        return f"ended with {ended}, not {code}: {last_line(process)}"
    if "Traceback" in process.stderr or len(lines) != 1 or not any(word in lines[0] for word in words):
        return f"said {process.stderr.strip()[-200:]!r}"
    return ""


def settle(outcomes: Iterable[Outcome], final: Outcome) -> Iterator[Outcome]:
    """Tries of one run count only if the run came to the right end."""
    for outcome in outcomes:
        yield outcome or final


@contextlib.contextmanager
def ended(*processes: fork) -> Iterator[None]:
    """Processes that do not outlive the block."""
    try:
        yield
    finally:
        for process in processes:
            if process.running():
                process.process.kill()
                process.wait(20)


@dataclass(frozen=True)
class Trial:
    says: str  # what is done to a run
    tries: int
    quick: int  # of them, for a look
    run: Callable[[Place, random.Random, int], Iterator[Outcome]]
