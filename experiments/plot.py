"""Sheet -> picture: one panel per column; dots for words, lines where the last label is a number."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, so no display is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.layout import Sheet, plain

# Okabe and Ito's palette, told apart with every common kind of colour blindness; yellow left out on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GREY = "#777777"


def plot(sheet: Sheet, path: Path) -> None:
    numeric = all(isinstance(line[-1], int | float) for line in sheet.lines)
    panel = _lines if numeric else _dots
    names = {line[:-1] if numeric else line for line in sheet.lines}
    height = 3.2 if numeric else 1.1 + 0.32 * len(names)
    size = (max(1.2 + 2.9 * len(sheet.columns), 4.5), height)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure, axes = plt.subplots(
            1, len(sheet.columns), figsize=size, sharey=True, squeeze=False, layout="constrained"
        )
        for i, (axis, column) in enumerate(zip(axes[0], sheet.columns, strict=True)):
            panel(axis, sheet, i)
            axis.set_title("" if column is None else plain(column), fontsize=9)
        handles, labels = axes[0][0].get_legend_handles_labels()
        if numeric and len(handles) > 1:
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
    if sheet.layout.metric.endswith("accuracy"):
        axis.set_xlim(-0.02, 1.04)
    for name, at in _trivial(sheet, column):
        axis.axvline(at, color=GREY, linestyle=":", linewidth=1)
        axis.annotate(name, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=7, color=GREY, ha="center")


def _lines(axis: Axes, sheet: Sheet, column: int) -> None:
    """The last label is the horizontal axis; each setting of the others is a line."""
    curves: dict[str, list[tuple[float, Any]]] = {}
    for line, cells in sheet.lines.items():
        if cells[column] is not None and cells[column].summary.mean is not None:
            curves.setdefault(" ".join(map(plain, line[:-1])), []).append((line[-1], cells[column].summary))
    for i, (name, points) in enumerate(curves.items()):
        x, summaries = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": name}
        spreads = [summary.spread or 0 for summary in summaries]
        axis.errorbar(x, [summary.mean for summary in summaries], yerr=spreads, markersize=5, capsize=0, **style)
    values = sorted({line[-1] for line in sheet.lines})
    if values[0] > 0 and values[-1] >= 2 * values[0]:
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values], rotation=45 if len(values) > 5 else 0)
    axis.minorticks_off()
    axis.set_xlabel(sheet.layout.by[-1])
    if column == 0:
        axis.set_ylabel(sheet.layout.metric.replace("/", " "))
    if sheet.layout.metric.endswith("accuracy"):
        axis.set_ylim(-0.02, 1.04)
    for name, at in _trivial(sheet, column):
        axis.axhline(at, color=GREY, linestyle=":", linewidth=1)
        axis.annotate(
            name,
            (1.0, at),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            color=GREY,
            ha="right",
            va="bottom",
        )


def _trivial(sheet: Sheet, column: int) -> list[tuple[str, float]]:
    return [(name, spans[column][1]) for name, spans in sheet.baselines.items() if spans[column]]
