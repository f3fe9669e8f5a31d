"""Rows of `bench scaling` -> a table of how mixers grow with the length, claimed and measured, and a picture of it."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.measurements.scaling import FAILED, MEASURED
from experiments.measurements.sheet import all_of, markdown_table
from experiments.tables.plot import COLOURS, GREY, MARKERS, plt

Row = dict[str, Any]

FITTED = 3  # lengths that a power is fitted to, the last: there overhead counts least
HEADINGS = (
    "mixer",
    "time, claimed",
    "time, fitted",
    "memory, claimed",
    "memory, fitted",
    "longest row",
    "ms a step there",
    "tokens/s there",
    "temporary MiB there",
    "what came next",
)
PANEL = len(COLOURS)  # mixers that have a colour in one panel
ACROSS = 4  # panels


def power(rows: Sequence[Row], key: str) -> float | None:
    """The p of `length^p`, by least squares of the logarithms over the last lengths; None of fewer than two."""
    points = [(row["length"], row[key]) for row in measured(rows)[-FITTED:] if row[key] > 0]
    if len(points) < 2:
        return None
    x, y = np.log(np.asarray(points, np.float64)).T
    return float(np.polyfit(x, y, 1)[0])


def measured(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row["status"] == MEASURED), key=lambda row: row["length"])


def by_mixer(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each mixer; those first that claim the least time, then by name."""
    names = sorted({(row["claimed_time"], row["mixer"]) for row in rows})
    return {name: [row for row in rows if row["mixer"] == name] for _, name in names}


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per mixer."""
    body = [line(name, mine) for name, mine in by_mixer(rows).items()]
    return f"{markdown_table(HEADINGS, body, [False, *[True] * (len(HEADINGS) - 2), False])}\n{note(rows)}\n"


def line(name: str, rows: Sequence[Row]) -> list[str]:
    found, first = measured(rows), rows[0]
    powers = []
    for key, claimed in (("seconds", "claimed_time"), ("temp_bytes", "claimed_memory")):
        fitted = power(rows, key)
        powers += [f"{first[claimed]:g}", "" if fitted is None else f"{fitted:.2f}"]
    last = ["", "", "", ""]
    if found:
        row = found[-1]
        last = [f"{row['length']:,}", f"{1e3 * row['seconds']:,.2f}", f"{row['tokens_per_s']:,.0f}"]
        last.append(f"{row['temp_bytes'] / 2**20:,.1f}")
    ends = [f"{row['status']} at {row['length']:,}" + why(row) for row in rows if row["status"] != MEASURED]
    return [name, *powers, *last, ends[0] if ends else ""]


def why(row: Row) -> str:
    return f": {row['error']}" if row["status"] == FAILED else ""


def note(rows: Sequence[Row]) -> str:
    """What was measured, and where."""
    every = partial(all_of, rows)
    return (
        f"A training step of one layer: value and gradient of one row, width {every('width')}, {every('dtype')}. Time "
        f"and temporary memory grow by these powers of the length, fitted to the last {FITTED} lengths; a logarithm "
        f"counts as no power. {every('device')}, jax {every('jax')}, revision {every('revision')}, {every('date')}."
    )


def picture(rows: Sequence[Row], path: Path) -> None:
    """Time against length: panels of a few mixers that claim the same, the quickest first; all the others in grey."""
    curves = {name: measured(mine) for name, mine in by_mixer(rows).items() if measured(mine)}
    panels = grouped(curves)
    if not panels:
        return
    columns = min(ACROSS, len(panels))
    lines = -(-len(panels) // columns)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure, axes = plt.subplots(
            lines,
            columns,
            figsize=(max(3.0 * columns, 4.5), 2.9 * lines),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, names in zip(axes.flat, panels, strict=False):
            _panel(axis, curves, names)
        figure.supxlabel("length, tokens", fontsize=9)
        figure.supylabel("seconds a step", fontsize=9)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def grouped(curves: dict[str, list[Row]]) -> list[list[str]]:
    """Names of each panel: of one claim, quickest first, in parts of about the same size."""
    panels = []
    for claimed in sorted({found[0]["claimed_time"] for found in curves.values()}):
        names = [name for name, found in curves.items() if found[0]["claimed_time"] == claimed]
        names.sort(key=lambda name: -curves[name][-1]["tokens_per_s"])
        parts = math.ceil(len(names) / PANEL)
        panels += [part.tolist() for part in np.array_split(names, parts)]
    return panels


def _panel(axis: Axes, curves: dict[str, list[Row]], names: Sequence[str]) -> None:
    for name, found in curves.items():
        if name not in names:
            axis.plot(*_points(found), color=GREY, alpha=0.2, linewidth=0.8)
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        axis.plot(*_points(curves[name]), color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
    last, claimed = curves[names[0]][-1], curves[names[0]][0]["claimed_time"]
    x = np.asarray([min(row["length"] for found in curves.values() for row in found), last["length"]])
    axis.plot(x, last["seconds"] * (x / last["length"]) ** claimed, ":", color=GREY, linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({row["length"] for found in curves.values() for row in found})
    axis.set_xticks(lengths, [_short(length) for length in lengths])
    axis.minorticks_off()
    axis.set_title(f"claimed (dotted): length^{claimed:g}", fontsize=9)
    axis.legend(fontsize=7, frameon=False, loc="upper left")


def _points(found: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["length"] for row in found], [row["seconds"] for row in found]


def _short(length: int) -> str:
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if length >= size and length % size == 0:
            return f"{length // size}{letter}"
    return str(length)
