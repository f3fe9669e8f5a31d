"""Every mixer in a line: what it is, which way it reads, by what its cost grows, and what it carries along."""

import inspect
import re
import sys
from pathlib import Path

from experiments.measurements.scaling import ALONE, claims, make
from experiments.measurements.sheet import markdown_table
from experiments.tables.overview import costs
from model.contract import Mixer

TOKENS = (1024, 65_536)  # that a state has seen
TIMED = "ms, length 65,536"  # a heading of `costs`
SIZE = dict(width=256, dtype="bfloat16")  # of the layer that is timed on a GPU
PAPER = re.compile(r"(?:https://arxiv\.org/abs/|arXiv:)(\d{4}\.\d{5})")
CITED = re.compile(r" \([^()]*\d{4}\.\d{5}\)")
POWERS = {1: "L", 1.5: "L^1.5", 2: "L^2"}


def zoo(results: Path) -> str:
    """Markdown, a line per mixer; milliseconds of a step are those measured, blank where none are."""
    measured = costs(results / "bench_scaling.jsonl")[TIMED]
    header = ["mixer", "what it is", "reads", "time", "memory", *(f"state, {n:,}" for n in TOKENS), TIMED]
    body = [[*line(name, cls), measured.get(name, "")] for name, cls in sorted(ALONE.items())]
    return markdown_table(header, body, [False] * 5 + [True] * (len(header) - 5))


def line(name: str, cls: type[Mixer]) -> list[str]:
    said = CITED.sub("", inspect.getdoc(cls).partition("\n")[0])
    claimed = claims(cls)
    powers = [POWERS[claimed["claimed_time"]], POWERS[claimed["claimed_memory"]]]
    return [linked(name, cls), said, reads(cls), *powers, *states(name, cls)]


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
        return [""] * len(TOKENS)
    return [f"{make(name, tokens, **SIZE).state_bytes(tokens):,}" for tokens in TOKENS]
