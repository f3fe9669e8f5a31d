"""Where a run's time went, over all of its attempts: what is left in the end, and what was lost to what.

An attempt is a process, or the processes of a job, between a start and whatever ended it. It notes in `goodput.json`
every few seconds what it has spent its time on, so that one that is killed has told nearly all; what it did after its
last note counts as time that the run was down. Time begins when the first attempt has its config and ends with the
result.
"""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import jax
from absl import logging

from model.errors import UserError
from train.clock import PHASES, Clock
from train.workdir import read_json, write_json

FILE = "goodput.json"
EVERY = 5  # seconds between notes

Note = dict[str, Any]
EMPTY: Note = {
    "attempts": 0,
    "spent": {},
    "taken": 0,
    "repeated_steps": 0,
    "repeated_s": 0.0,
    "down_s": 0.0,
    "last": None,
}
KINDS = dict(attempts=int, spent=dict, taken=int, repeated_steps=int, repeated_s=float, down_s=float, last=dict)


def moment() -> dict[str, Any]:
    """Now, in a form that later processes can reckon with, here or on another machine."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"unix": time.time(), "boot": boot, "monotonic": time.monotonic()}
    return {"unix": time.time(), "boot": None, "monotonic": 0.0}


def between(then: dict[str, Any], now: dict[str, Any]) -> float:
    """Seconds from one to the other. While a machine stays up, nobody's setting of its clock has a say in it."""
    same = then["boot"] == now["boot"] is not None
    return max(now["monotonic"] - then["monotonic"] if same else now["unix"] - then["unix"], 0.0)


def attempt(noted: Note, step: int, reached: int, now: dict[str, Any], running: float) -> Note:
    """What is known when another attempt goes on from a step, having run for so many seconds so far.

    Steps that were taken and did not last will be taken again, and take as long as others did. The log may have
    `reached` further than the last note; the time of those steps counts as down.
    """
    last = noted["last"]
    if last is None:
        return noted | {"attempts": 1, "repeated_steps": max(reached - step, 0)}
    lost = max(last["step"] - step, 0)
    return noted | {
        "attempts": noted["attempts"] + 1,
        "repeated_steps": noted["repeated_steps"] + max(lost, reached - step),
        "repeated_s": noted["repeated_s"] + lost * noted["spent"].get("step", 0.0) / max(noted["taken"], 1),
        "down_s": noted["down_s"] + (0.0 if last["over"] else max(between(last["moment"], now) - running, 0.0)),
    }


def report(noted: Note) -> dict[str, Any]:
    """For the result row: goodput is the share of all time that went into steps which lasted."""
    spent = {phase: noted["spent"].get(phase, 0.0) for phase in PHASES}
    productive = max(spent.pop("step") - noted["repeated_s"], 0.0)
    lost = {**spent, "repeated": noted["repeated_s"], "down": noted["down_s"]}
    wall = productive + sum(lost.values())
    return {
        "goodput": round(productive / wall, 4) if wall else 0.0,
        "wall_s": round(wall, 2),
        "productive_s": round(productive, 2),
        "lost_s": {cause: round(seconds, 2) for cause, seconds in lost.items()},
        "attempts": noted["attempts"],
        "repeated_steps": noted["repeated_steps"],
    }


def read(path: Path) -> Note:
    """What earlier attempts noted. A file that cannot be read costs the account, not the run."""
    if not path.exists():
        return EMPTY
    try:
        found = read_json(path, **KINDS)
        found["last"]["step"] + found["last"]["over"]
        between(found["last"]["moment"], found["last"]["moment"])
        report(found)
    except (UserError, KeyError, TypeError, AttributeError) as error:
        logging.warning("%s is not believed, and the time of earlier attempts not counted: %s", path, error)
        return EMPTY
    return found


class Ledger:
    """Notes, for the length of a block, what a run's time goes into; the first process keeps it for all."""

    def __init__(self, clock: Clock, folder: Path | None = None):
        self.clock = clock
        self.step = 0  # the last one taken
        self._path = folder / FILE if folder is not None and jax.process_index() == 0 else None
        self._before = read(self._path) if self._path else EMPTY
        self._taken = 0  # in this attempt
        self._begun = self._over = False
        self._done, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="goodput", daemon=True)

    def begin(self, step: int, reached: int) -> None:
        """The attempt goes on from a step; the log of the last one ended at another."""
        running = sum(self.clock.spent.values()) + time.monotonic() - self.clock.phase[1]
        self.step, self._before = step, attempt(self._before, step, reached, moment(), running)
        self._begun = True
        self.note()
        if self._path:
            self._thread.start()

    def take(self, n: int) -> None:
        """n more steps are taken."""
        self.step, self._taken = self.step + n, self._taken + n

    def go_back(self, step: int) -> None:
        """The run has gone back to a step: what came after it was in vain."""
        lost, spent = self.step - step, self.clock.spent["step"] / max(self._taken, 1)
        self._before = self._before | {
            "repeated_steps": self._before["repeated_steps"] + lost,
            "repeated_s": self._before["repeated_s"] + lost * spent,
        }
        self.step = step

    def end(self) -> dict[str, Any]:
        """The run is over: its report."""
        self._over = True
        return report(self._now())

    def note(self) -> None:
        """Writes down what is known. A full disk is for others to complain about."""
        if self._path and self._begun:
            with self._lock, contextlib.suppress(UserError):
                write_json(self._path, self._now())

    def _now(self) -> Note:
        (phase, since), spent = self.clock.phase, dict(self.clock.spent)
        spent[phase] += time.monotonic() - since
        return self._before | {
            "spent": {name: self._before["spent"].get(name, 0.0) + spent[name] for name in PHASES},
            "taken": self._before["taken"] + self._taken,
            "last": {"step": self.step, "moment": moment(), "over": self._over},
        }

    def _keep(self) -> None:
        while not self._done.wait(EVERY):
            self.note()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._done.set()
        self.note()
