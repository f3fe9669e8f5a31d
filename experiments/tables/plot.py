"""Sheet -> picture: one panel per column, dots for words and lines where the last label is a number; one panel of
lines where the columns are numbers.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, so no display is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.tables.layout import COSTS, Sheet, heading, plain
from experiments.tables.rows import Summary

# Okabe and Ito's palette, told apart with every common kind of colour blindness; yellow left out on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
STROKES = ("-", "--", ":")  # for the colours' first, second and third turn
GREY = "#777777"

Curves = dict[str, list[tuple[float, Summary]]]  # name -> points


def plot(sheet: Sheet, path: Path) -> None:
    numeric = _numbers(line[-1] for line in sheet.lines)
    across = not numeric and len(sheet.columns) > 1 and _numbers(sheet.columns)
    panels = [None] if across else sheet.columns
    height = 4.2 if across else 3.2 if numeric else 1.1 + 0.32 * len(sheet.lines)
    size = (6.4 if across else max(1.2 + 2.9 * len(panels), 4.5), height)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for i, (axis, column) in enumerate(zip(axes[0], panels, strict=True)):
            if across:
                _lines(axis, sheet, i, sheet.layout.across, _along_columns(sheet))
            elif numeric:
                _lines(axis, sheet, i, sheet.layout.against or sheet.layout.by[-1], _along_lines(sheet, i))
            else:
                _dots(axis, sheet, i)
            axis.set_title(heading(column, sheet.layout.across), fontsize=9)
        handles, labels = axes[0][0].get_legend_handles_labels()
        if (numeric or across) and len(handles) > 1:
            figure.legend(handles, labels, loc="outside right center", frameon=False)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _dots(axis: Axes, sheet: Sheet, column: int) -> None:
    """A line of the table is a height; the mean a dot, the spread a bar, each seed a tick."""
    for y, cells in enumerate(sheet.lines.values()):
        cell = cells[column]
        if cell is None:
            continue
        if cell.summary.mean is None:
            axis.annotate("failed", (0.5, y), xycoords=("axes fraction", "data"), va="center", color=GREY)
            continue
        scores = [score for _, score in cell.seeds]
        axis.plot(scores, [y] * len(scores), "|", color=COLOURS[0], alpha=0.5, markersize=7)
        axis.errorbar(cell.summary.mean, y, xerr=cell.summary.spread, fmt="o", color=COLOURS[0], markersize=5)
    axis.set_yticks(range(len(sheet.lines)), [" ".join(map(plain, line)) for line in sheet.lines])
    axis.set_ylim(len(sheet.lines) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(sheet.layout.metric.replace("/", " "))
    if sheet.layout.is_share:
        axis.set_xlim(-0.02, 1.04)
    for name, at in _trivial(sheet, column):
        axis.axvline(at, color=GREY, linestyle=":", linewidth=1)
        axis.annotate(name, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=7, color=GREY, ha="center")


def _along_columns(sheet: Sheet) -> Curves:
    """The columns are the horizontal axis; each line of the table is a line."""
    return {
        " ".join(map(plain, line)): [(x, cell.summary) for x, cell in zip(sheet.columns, cells, strict=True) if cell]
        for line, cells in sheet.lines.items()
    }


def _along_lines(sheet: Sheet, column: int) -> Curves:
    """The last label, or what it costs, is the horizontal axis; each setting of the other labels is a line."""
    curves: Curves = {}
    for line, cells in sheet.lines.items():
        cell = cells[column]
        if cell:
            x = cell.costs.get(sheet.layout.against) if sheet.layout.against else line[-1]
            points = curves.setdefault(" ".join(map(plain, line[:-1])), [])
            points += [(x, cell.summary)] if x is not None else []  # a failed run's costs are not known
    return curves


def _lines(axis: Axes, sheet: Sheet, column: int, label: str, curves: Curves) -> None:
    """The mean a marker, the spread a bar."""
    for i, (name, points) in enumerate(curves.items()):
        known = sorted(((x, s) for x, s in points if s.mean is not None), key=lambda point: point[0])
        cycle, place = divmod(i, len(COLOURS))
        axis.errorbar(
            [x for x, _ in known],
            [summary.mean for _, summary in known],
            yerr=[summary.spread or 0 for _, summary in known],
            color=COLOURS[place],
            marker=MARKERS[place],
            markerfacecolor="white" if cycle else COLOURS[place],
            linestyle=STROKES[cycle % len(STROKES)],
            markersize=5,
            capsize=0,
            label=name,
        )
    values = sorted({x for points in curves.values() for x, _ in points})
    if values and values[0] > 0 and values[-1] >= 2 * values[0]:
        axis.set_xscale("log")
    if label not in COSTS:  # few values, all of them chosen
        axis.set_xticks(values, [f"{value:g}" for value in values], rotation=45 if len(values) > 5 else 0)
        axis.minorticks_off()
    axis.set_xlabel(label.replace("_", " "))
    for length in sheet.trained if label == "length" else ():
        axis.axvline(length, color=GREY, linestyle=":", linewidth=1)
        axis.annotate("trained", (length, 1.0), xycoords=("data", "axes fraction"), fontsize=7, color=GREY, ha="center")
    if column == 0:
        axis.set_ylabel(sheet.layout.metric.replace("/", " "))
    if sheet.layout.is_share:
        axis.set_ylim(-0.02, 1.04)
    for name, points in _trivial_curves(sheet, column, label).items():
        level = points[0][1]
        if all(at == level for _, at in points):
            axis.axhline(level, color=GREY, linestyle=":", linewidth=1)
        else:
            axis.plot(*zip(*points, strict=True), color=GREY, linestyle=":", linewidth=1)
        axis.annotate(
            name,
            (0.01, level),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color=GREY,
            va="bottom",
        )


def _trivial_curves(sheet: Sheet, column: int, label: str) -> dict[str, list[tuple[Any, float]]]:
    """Trivial scores at every column, where the columns are the horizontal axis; else at this one."""
    columns = range(len(sheet.columns)) if label == sheet.layout.across else [column]
    curves = {
        name: [(sheet.columns[i], spans[i][1]) for i in columns if spans[i]] for name, spans in sheet.baselines.items()
    }
    return {name: points for name, points in curves.items() if points}


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _trivial(sheet: Sheet, column: int) -> list[tuple[str, float]]:
    return [(name, spans[column][1]) for name, spans in sheet.baselines.items() if spans[column]]
