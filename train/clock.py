"""How long a run takes: wall time over all of its processes, waiting for data included, the time of a step, and what
this process has spent its time on.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator

# What a process may be doing. A step lasts until its batches are waited for again, the first of them being compiled.
PHASES = ("start", "restore", "compile", "data", "step", "evaluate", "save", "profile")
RECENT = 64  # visits of a phase whose times are kept


@dataclasses.dataclass
class Clock:
    """Wall time over all of a run's processes, that spent waiting for data, and the time of a step without pauses.

    Every moment of a process belongs to one phase: the one it entered last.
    """

    start: float = dataclasses.field(default_factory=time.monotonic)
    before: float = 0.0
    last: float | None = None  # when steps were last done
    # When each dispatch that is not done yet was taken; None of the one that compiles.
    taken: deque[float | None] = dataclasses.field(default_factory=deque)
    rate: float | None = None  # of steps that earlier processes took
    steps: list[float] = dataclasses.field(default_factory=list)
    waited: float = 0.0
    told: tuple[float, float] = (0.0, 0.0)  # wall and waited when `data_wait` was last asked
    phase: tuple[str, float] = dataclasses.field(default_factory=lambda: ("start", time.monotonic()))  # and since when
    spent: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # less this visit
    visits: dict[str, deque[float]] = dataclasses.field(
        default_factory=lambda: {phase: deque(maxlen=RECENT) for phase in PHASES}
    )

    def resume(self, wall: float, waited: float, rate: float | None = None) -> None:
        """Goes on from what earlier processes noted."""
        self.before, self.waited, self.rate = wall, waited, rate
        self.told = self.wall(), waited

    def enter(self, phase: str) -> None:
        """What follows is another phase, or another visit of the same."""
        now, (former, since) = time.monotonic(), self.phase
        self.spent[former] += now - since
        self.visits[former].append(now - since)
        self.phase = phase, now  # at once, as other threads read it

    def take_steps(self) -> None:
        """What follows is a step; the first one is compiled."""
        compiled = bool(self.visits["compile"])
        self.enter("step" if compiled else "compile")
        self.taken.append(self.phase[1] if compiled else None)

    def tick(self, n: int = 1) -> None:
        """n more steps are done."""
        now, taken = time.monotonic(), self.taken.popleft() if self.taken else None
        since = taken if self.last is None else self.last
        if since is not None:
            self.steps += n * [(now - since) / n]
        self.last = now

    def pause(self) -> None:
        """What happens until steps are next taken is none, and those not done yet will not be."""
        self.last = None
        self.taken.clear()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data."""
        since = time.monotonic()
        self.enter("data")
        try:
            yield
        finally:
            self.waited += time.monotonic() - since

    def share_waited(self) -> float:
        """The share of all wall time spent waiting for data."""
        return round(self.waited / self.wall(), 4)

    def data_wait(self) -> float:
        """The share of wall time spent waiting for data since this was last asked, or since the process began."""
        (wall, waited), self.told = self.told, (self.wall(), self.waited)
        return round((self.told[1] - waited) / max(self.told[0] - wall, 1e-9), 4)

    def wall(self) -> float:
        return self.before + time.monotonic() - self.start

    def steps_per_s(self) -> float | None:
        """By the median of this process, or, where it has taken none, what an earlier one noted."""
        median = statistics.median(self.steps) if self.steps else math.nan
        return round(1 / median, 2) if median > 0 else self.rate
