"""What a run tells: `metrics.jsonl`, one JSON line per event and the only truth; TensorBoard, copied from it;
and a line of progress for whoever is watching.
"""

import contextlib
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from model.errors import UserError
from train.workdir import write_text


def say(line: str) -> None:
    """Prints a line. Where nobody reads any more (a pipe to what has ended, a full disk), that alone is lost."""
    try:
        print(line, flush=True)
    except OSError:
        mute()


def mute() -> None:
    """What is printed from here on goes nowhere; what Python still holds of it must go somewhere too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The events of a log, which may belong to a run that is still going or was killed while it wrote."""
    return [event for _, event in _lines(Path(path))]


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line with the event it holds, less a torn last one."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or type(event.get("step")) is not int:
                raise ValueError("no step")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path} line {number} is not an event: {error}") from error
        parsed.append((line, event))
    return parsed


def _plain(value: Any) -> Any:
    """NumPy and JAX values as Python ones. A float32 is exact as a double, whose repr gives the bits back."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be logged")


class MetricsLog:
    """Appends events to a log. Every process may write; only the first one's lines reach the file.

    A run resumed at `resume_step` will log all later steps again, so their lines are dropped, and with them
    whatever a kill left half written; None starts the log anew.
    """

    def __init__(self, path: str | Path, resume_step: int | None, tensorboard: bool = False):
        self._path, self._tensorboard = Path(path), tensorboard
        self._file = self._events = None
        self.reached = 0  # the last step that an earlier process logged
        if jax.process_index() == 0:
            self._open(resume_step)

    def _open(self, resume_step: int | None) -> None:
        path, kept = self._path, []
        try:
            if path.exists():
                found = self._earlier(resume_step)
                kept = [
                    line + "\n" for line, event in found if resume_step is not None and event["step"] <= resume_step
                ]
                self.reached = found[-1][1]["step"] if found else 0
            write_text(path, "".join(kept))
            # Unbuffered: a line is in the file as soon as it is logged.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot open {path}: {error.strerror}") from error
        if self._tensorboard:
            self._events = _TensorBoard(path.parent / "tensorboard", 0 if resume_step is None else resume_step + 1)

    def _earlier(self, resume_step: int | None) -> list[tuple[str, dict[str, Any]]]:
        """What the file holds; where nothing of it is kept, it may be anything."""
        try:
            return _lines(self._path)
        except UserError:
            if resume_step is not None:
                raise
            return []

    def write(self, step: int, **values: Any) -> None:
        """Logs an event, all of it or, where the disk is full, nothing and an error."""
        if self._file is None:
            return
        line = json.dumps({"step": int(step), **values}, default=_plain)
        whole = os.fstat(self._file.fileno()).st_size
        try:
            rest = line.encode() + b"\n"
            while rest:  # the system may take a part of what it is given
                rest = rest[self._file.write(rest) :]
            if self._events is not None:
                self._events.write(int(step), json.loads(line))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(whole)
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error

    def sync(self) -> None:
        """Returns once what was logged would survive a power cut."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error

    def rewind(self, step: int) -> None:
        """Forgets what came after a step that the run has gone back to."""
        if self._file is not None:
            self.close()
            self._open(step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class _TensorBoard:
    """Event files by TensorBoard's own writer, which needs no TensorFlow."""

    def __init__(self, folder: Path, first_step: int):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise UserError("tensorboard=True needs TensorBoard: pip install tensorboard") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        # A restart marker: the reader forgets what an earlier file says about this step and later ones.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(session_log=start, step=first_step, wall_time=time.time()))

    def write(self, step: int, values: dict[str, Any]) -> None:
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if name != "step" and isinstance(value, int | float)
        ]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(summary=summary, step=step, wall_time=time.time()))

    def close(self) -> None:
        self._writer.close()


class Progress:
    """Shows step, latest values, rate and time left: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, total: int, start: int = 0, stream: TextIO | None = None):
        self._total, self._step, self._shown = total, start, {}
        # (time, step) at each drawing of the last minute. The rate counts from the first update, which comes
        # after the step was compiled.
        self._marks: deque[tuple[float, int]] = deque()
        self._due = 0.0
        console = Console(file=stream or sys.stdout)
        self._stream, self._bar = console.file, None
        self._silent = jax.process_index() != 0
        if console.is_interactive and not self._silent:
            self._bar = Bar(BarColumn(24), TextColumn("{task.description}"), console=console, auto_refresh=False)
        self._every = 0.25 if self._bar else 10.0

    def update(self, step: int, **shown: Any) -> None:
        """Notes a finished step. Values may be arrays still being computed: they are fetched when drawn."""
        self._step = step
        if shown:
            self._shown.update(shown)
        now = time.monotonic()
        if now >= self._due and not self._silent:
            self._marks.append((now, step))
            while self._marks[0][0] < now - 60 and len(self._marks) > 2:
                self._marks.popleft()
            self._due = now + self._every
            self._draw()

    def line(self) -> str:
        values = [f"{name} {float(value):.4g}" for name, value in self._shown.items()]
        timing = []
        if self._marks and self._marks[0][1] < self._marks[-1][1]:  # of no step there is no rate
            (t0, first), (t1, last) = self._marks[0], self._marks[-1]
            rate = (last - first) / max(t1 - t0, 1e-9)
            timing = [f"{rate:.3g} steps/s"]
            if self._step < self._total:
                timing.append(f"{_clock((self._total - self._step) / rate)} left")
        return " | ".join([f"step {self._step}/{self._total}", *values, *timing])

    def _draw(self) -> None:
        """Who watches may leave; the run goes on."""
        try:
            if self._bar is not None:
                self._bar.update(self._task, completed=self._step, description=self.line(), refresh=True)
            else:
                print(self.line(), file=self._stream, flush=True)
        except OSError:
            self._silent = True
            mute()

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.line(), total=self._total, completed=self._step)
        if not self._silent:
            self._draw()
        return self

    def __exit__(self, *exc: Any) -> None:
        if not self._silent:
            self._marks.append((time.monotonic(), self._step))
            self._draw()
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
