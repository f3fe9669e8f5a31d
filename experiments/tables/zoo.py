"""Every mixer in a line: what it is, which way it reads, by what its cost grows, and what it carries along."""

import inspect
import re
import sys
from pathlib import Path

from experiments.measurements.scaling import ALONE, make
from experiments.measurements.sheet import markdown_table
from experiments.tables.overview import costs
from model.contract import Mixer

LENGTHS = (1024, 65_536)  # tokens that a state has seen
SIZE = dict(width=256, dtype="bfloat16")  # of the layer, as `bench scaling` times it on a GPU
PAPER = re.compile(r"(?:https://arxiv\.org/abs/|arXiv:)(\d{4}\.\d{5})")
CITED = re.compile(rf",? ?\((?:FoX, |NSA, )?{PAPER.pattern}\)")  # how a first line names its paper
POWERS = {1: "L", 1.5: "L^1.5", 2: "L^2"}


def zoo(results: Path) -> str:
    """Markdown, a line per mixer; milliseconds of a step are those measured, blank where none are."""
    timed = costs(results / "bench_scaling.jsonl")
    heading = next(iter(timed))
    header = ["mixer", "what it is", "reads", "time", "memory", *(f"state, {n:,}" for n in LENGTHS), heading]
    body = [[*line(name, cls), timed[heading].get(name, "")] for name, cls in sorted(ALONE.items())]
    return markdown_table(header, body, [False] * 5 + [True] * (len(header) - 5))


def line(name: str, cls: type[Mixer]) -> list[str]:
    said = inspect.getdoc(cls).partition("\n")[0]
    work = cls.cost if cls.work is None else cls.work
    return [linked(name, cls), CITED.sub("", said), reads(cls), POWERS[work], POWERS[cls.cost], *states(name, cls)]


def linked(name: str, cls: type[Mixer]) -> str:
    """With the paper that its docstring names first, else its file's."""
    found = PAPER.search(f"{inspect.getdoc(cls)}\n{sys.modules[cls.__module__].__doc__}")
    return f"[`{name}`](https://arxiv.org/abs/{found[1]})" if found else f"`{name}`"


def reads(cls: type[Mixer]) -> str:
    if cls.both_ways_only:
        return "both ways"
    return "forward" if cls.forward_only else "either"


def states(name: str, cls: type[Mixer]) -> list[str]:
    """Bytes that a row's past takes, after each number of tokens; none where a row is only read whole."""
    if cls.both_ways_only:
        return [""] * len(LENGTHS)
    return [f"{make(name, length, **SIZE).state_bytes(length):,}" for length in LENGTHS]
