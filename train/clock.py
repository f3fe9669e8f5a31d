"""How long a run takes: wall time over all of its processes, waiting for data included, and the time of a step."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator


@dataclasses.dataclass
class Clock:
    """Wall time over all of a run's processes, that spent waiting for data, and the time of a step without pauses."""

    start: float = dataclasses.field(default_factory=time.monotonic)
    before: float = 0.0
    last: float | None = None
    steps: list[float] = dataclasses.field(default_factory=list)
    waited: float = 0.0
    told: tuple[float, float] = (0.0, 0.0)  # wall and waited when `data_wait` was last asked

    def resume(self, wall: float, waited: float) -> None:
        """Goes on from what earlier processes noted."""
        self.before, self.waited = wall, waited
        self.told = self.wall(), waited

    def tick(self, n: int = 1) -> None:
        """n more steps are done."""
        now = time.monotonic()
        if self.last is not None:
            self.steps += n * [(now - self.last) / n]
        self.last = now

    def pause(self) -> None:
        """What happens until the next tick is not a step."""
        self.last = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data."""
        since = time.monotonic()
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
        median = statistics.median(self.steps) if self.steps else math.nan
        return round(1 / median, 2) if median > 0 else None
