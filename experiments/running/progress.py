"""What a sweep shows while it runs: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experiments.running import folders
from experiments.running.launch import Event


@dataclass
class Tally:
    """What became of a sweep's runs so far."""

    total: int
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name -> why
    running: dict[str, float] = field(default_factory=dict)  # name -> when it started
    waiting: set[str] = field(default_factory=set)  # for another process
    stopped: str = ""  # name of the signal that ended the sweep

    def add(self, event: Event) -> None:
        self.running.pop(event.name, None)
        self.waiting.discard(event.name)
        match event.kind:
            case "skip":
                self.skipped.append(event.name)
            case "done":
                self.done.append(event.name)
            case "fail":
                self.failed[event.name] = event.detail
            case "wait":
                self.waiting.add(event.name)
            case "start":
                self.running[event.name] = time.monotonic()
            case "stop":
                self.stopped = event.detail

    def __str__(self) -> str:
        parts = [f"{len(self.done)} done"]
        parts += [f"{len(self.skipped)} finished before"] if self.skipped else []
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.waiting)} waiting for another process"] if self.waiting else []
        left = self.total - len(self.done) - len(self.skipped) - len(self.failed) - len(self.waiting)
        parts += [f"{left} to go"] if left else []
        return f"{self.total} runs: " + ", ".join(parts)


def follow(events: Iterable[Event], out: Path, total: int) -> Tally:
    """Shows a sweep's events as they come; returns how it ended."""
    tally, console = Tally(total), Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            for event in events:
                tally.add(event)
                if event.kind in ("fail", "again", "note", "stop"):
                    live.console.print(_line(event, tally))
                live.update(_table(tally, out))
    else:
        for event in events:
            known = event.kind in ("tick", "skip") or (event.kind == "wait" and event.name in tally.waiting)
            tally.add(event)
            if not known:
                print(_line(event, tally), flush=True)
    console.print(Text(str(tally)))
    for name, why in tally.failed.items():
        console.print(Text(f"failed: {out / name}: {why}"))
    return tally


def _line(event: Event, tally: Tally) -> Text | str:
    over = len(tally.done) + len(tally.skipped) + len(tally.failed)
    width = len(str(tally.total))
    detail = f": {event.detail}" if event.detail else ""
    return f"[{over:{width}}/{tally.total}] {event.kind:5} {event.name}{detail}"


def _table(tally: Tally, out: Path) -> Group:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "step", "loss", "accuracy", "seconds"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, since in tally.running.items():
        at = folders.position(out / name)
        numbers = [f"{at[key]:.4g}" if key in at else "" for key in ("loss", "accuracy")]
        step = f"{at['step']} / {at['steps']}" if "step" in at else "starting"
        table.add_row(Text(name), step, *numbers, f"{time.monotonic() - since:.0f}")
    return Group(Text(str(tally)), table)
