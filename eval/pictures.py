"""Attention maps, their numbers and other grids as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from eval.maps import SCORES, seen

BLUE, GREY, BLANK = "#0072B2", "#777777", "#eceef0"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "text.parse_math": False}
DPI = 150
LABELLED = 48  # tokens, up to which each is written beside the map
CELLS = 256  # along one side of a map; more would not show
SHADES = LinearSegmentedColormap.from_list("weights", ("white", "#7fb8d9", BLUE, "#001528")).with_extremes(bad=BLANK)


def draw_maps(path: Path, title: str, layers: Sequence[tuple[int, np.ndarray]], labels: Sequence[str]) -> None:
    """A grid of heatmaps: a row for each (layer, its maps `[H, L, L]`), a column for each head."""
    rows, columns, L = len(layers), max(len(maps) for _, maps in layers), len(labels)
    side = min(max(0.08 * L if L <= LABELLED else 13 / columns, 1.6), 3.8)  # inches, as are the gaps and margins
    gap, left, right, top, bottom = 0.3, 0.75, 0.9, 0.75, 0.65
    across, down = columns * (side + gap) - gap, rows * (side + gap) - gap
    width, height = max(left + across + right, 5.0), top + down + bottom

    def box(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        """Inches from the top left corner, as fractions of the figure."""
        return x / width, 1 - (y + h) / height, w / width, h / height

    with rc_context(STYLE):
        figure = Figure((width, height), dpi=DPI)
        for row, (layer, maps) in enumerate(layers):
            mask = seen(maps)
            for column, weights in enumerate(maps):
                axis = figure.add_axes(box(left + column * (side + gap), top + row * (side + gap), side, side))
                image = heatmap(axis, weights, mask)
                axis.set_title(f"layer {layer} head {column}", fontsize=8, pad=3)
                axis.spines[:].set_visible(False)
                lowest = row == rows - 1 or column >= len(layers[row + 1][1])
                mark_tokens(axis, labels, below=lowest, beside=column == 0)
        bar = figure.add_axes(box(left + across + 0.2, top, 0.13, min(down, 3.0)))
        figure.colorbar(image, cax=bar, ticks=[0, 0.01, 0.1, 0.25, 0.5, 0.75, 1], format="{x:g}")
        bar.set_title("weight", fontsize=8, loc="left")
        figure.text(left / width, 1 - 0.15 / height, title, va="top", fontsize=10, wrap=True)
        figure.text(left / width, 0.12 / height, "key: the token looked at", color=GREY)
        figure.text(0.1 / width, 1 - top / height, "query: the token that looks", va="top", rotation=90, color=GREY)
        figure.savefig(path)


def heatmap(axis: Axes, weights: np.ndarray, mask: np.ndarray) -> AxesImage:
    """One map; what a query cannot see has no colour. Shades follow the root of a weight, so that faint ones show."""
    step = -(-len(weights) // CELLS)
    weights, mask = (np.pad(x, (0, -len(x) % step)) for x in (weights, mask))
    n = len(weights) // step
    # The largest weight in a cell: in their mean a line that is one key wide would fade away.
    cells = np.where(mask, weights, -1).reshape(n, step, n, step).max((1, 3))
    edges = (-0.5, n * step - 0.5, n * step - 0.5, -0.5)
    shown = np.ma.masked_less(cells, 0)
    return axis.imshow(shown, cmap=SHADES, norm=PowerNorm(0.5, 0, 1), extent=edges, interpolation="nearest")


def mark_tokens(axis: Axes, labels: Sequence[str], below: bool, beside: bool) -> None:
    """Tokens, or where there are too many positions, along the outer sides of the grid."""
    for side, shown in ((axis.xaxis, below), (axis.yaxis, beside)):
        if not shown:
            side.set_ticks([])
        elif len(labels) <= LABELLED:
            side.set_ticks(range(len(labels)), labels)
            side.set_tick_params(length=0, pad=2, labelsize=5, labelfontfamily="monospace")
        else:
            side.set_major_locator(MaxNLocator(4, integer=True))
            side.set_tick_params(length=2, labelsize=7)
    if len(labels) <= LABELLED and max(map(len, labels)) > 1:
        axis.xaxis.set_tick_params(rotation=90)


def draw_summary(path: Path, title: str, layers: Sequence[dict[str, Any]]) -> None:
    """The report's layers: entropies against their bounds, ranks, and a heat panel for each score."""
    columns, heights = max(len(layer["heads"]) for layer in layers), (2.4, 0.6 + 0.26 * len(layers))
    size = (max(9.5, 2 + 0.7 * columns), sum(heights) + 1.2)
    with rc_context(STYLE):
        figure = Figure(size, dpi=DPI, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        grid = figure.add_gridspec(2, 6, height_ratios=heights)
        entropy_panel(figure.add_subplot(grid[0, :4]), layers)
        rank_panel(figure.add_subplot(grid[0, 4:]), layers)
        for i, (score, name) in enumerate(SCORES.items()):
            axis = figure.add_subplot(grid[1, 2 * i : 2 * i + 2])
            score_panel(axis, layers, score, name)
            axis.tick_params(labelleft=i == 0)
        figure.savefig(path)


def draw_grid(
    path: Path, title: str, lines: tuple[str, Sequence[str]], lengths: Sequence[int], values: np.ndarray
) -> None:
    """Scores from 0 to 1 `[lines, lengths]` as cells, the lines under a name and with labels."""
    name, labels = lines
    x, y = np.arange(len(lengths) + 1), np.arange(len(labels) + 1)
    cells, shades = np.ma.masked_invalid(values), SHADES.with_extremes(bad=BLANK)
    with rc_context(STYLE):
        figure = Figure((1.8 + 0.75 * len(lengths), 1.2 + 0.3 * len(labels)), dpi=DPI, layout="constrained")
        axis = figure.add_subplot()
        axis.pcolormesh(x, y, cells, cmap=shades, vmin=0, vmax=1, edgecolors="white")
        for (i, j), value in np.ma.ndenumerate(cells):
            colour = "white" if value > 0.5 else "black"
            axis.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(x[:-1] + 0.5, map(str, lengths))
        axis.set_yticks(y[:-1] + 0.5, labels)
        axis.set(xlabel="length", ylabel=name)
        axis.set_title(title, fontsize=9, loc="left")
        axis.invert_yaxis()
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        figure.savefig(path)


def entropy_panel(axis: Axes, layers: Sequence[dict[str, Any]]) -> None:
    """For each head the mean over its queries and their range; for each layer the mean of log n, and its range."""
    thick = min(max(120 / sum(len(layer["heads"]) for layer in layers), 1), 4)
    for i, layer in enumerate(layers):
        if not layer["heads"]:
            axis.annotate("no map", (i, 0.5), xycoords=("data", "axes fraction"), ha="center", color=GREY, fontsize=8)
            continue
        bound, entropy = layer["equal_weights"]["entropy"], [head["entropy"] for head in layer["heads"]]
        axis.hlines((0, bound["max"]), i - 0.45, i + 0.45, color=GREY, linestyle=":", linewidth=1)
        axis.hlines(bound["mean"], i - 0.45, i + 0.45, color=GREY, linestyle="--", linewidth=1)
        x = i + 0.8 * ((np.arange(len(entropy)) + 0.5) / len(entropy) - 0.5)
        low, high = ([e[end] for e in entropy] for end in ("min", "max"))
        axis.vlines(x, low, high, color=BLUE, alpha=0.3, linewidth=thick)
        axis.plot(x, [e["mean"] for e in entropy], "o", color=BLUE, markersize=max(thick, 2.5))
    legend = "dot: mean over a head's queries; bar: their range; dashes: mean of log n; dots: 0 and log n at most"
    titled(axis, "entropy of a query's weights, nats", legend)
    count_layers(axis, layers)


def rank_panel(axis: Axes, layers: Sequence[dict[str, Any]]) -> None:
    """The effective rank of the residual stream after each layer, and the most that it could be."""
    limit = max(layer["rank_limit"] for layer in layers)
    axis.axhline(limit, color=GREY, linestyle=":", linewidth=1)
    axis.plot([layer["rank"] for layer in layers], "o-", color=BLUE, markersize=4)
    axis.set_ylim(0, 1.08 * limit)
    titled(axis, "effective rank of the residual stream", "after each layer; dots: the most it could be")
    count_layers(axis, layers)


def score_panel(axis: Axes, layers: Sequence[dict[str, Any]], score: str, name: str) -> None:
    """Layers by heads, and behind a gap what equal weights would score."""
    rows, columns = len(layers), max(len(layer["heads"]) for layer in layers)
    heads, equal = np.full((rows, columns), np.nan), np.full((rows, 1), np.nan)
    for i, layer in enumerate(layers):
        if layer["heads"]:
            heads[i, : len(layer["heads"])] = [head[score] for head in layer["heads"]]
            equal[i] = layer["equal_weights"][score]
    text = dict(ha="center", va="center", fontsize=8 if columns <= 8 else 6, in_layout=False)
    for left, values in ((0, heads), (columns + 0.4, equal)):
        x, y = left + np.arange(values.shape[1] + 1), np.arange(rows + 1)
        cells, shades = np.ma.masked_invalid(values), SHADES.with_extremes(bad="none")
        axis.pcolormesh(x, y, cells, cmap=shades, vmin=0, vmax=1, edgecolors="white")
        for (i, j), value in np.ma.ndenumerate(cells):
            axis.text(x[j] + 0.5, i + 0.5, f"{value:.2f}", color="white" if value > 0.5 else "black", **text)
    for i, layer in enumerate(layers):
        if np.isnan(equal[i]):
            why = "no token comes back" if layer["heads"] else "no map"
            axis.text(columns / 2 + 0.7, i + 0.5, why, color=GREY, **text)
    titled(axis, name, "by head; at the right, that of equal weights")
    axis.set_xticks([*(np.arange(columns) + 0.5), columns + 0.9], [*map(str, range(columns)), "="])
    axis.set_yticks(np.arange(rows) + 0.5, [f"{layer['layer']} {layer['mixer']}" for layer in layers])
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def count_layers(axis: Axes, layers: Sequence[dict[str, Any]]) -> None:
    axis.set_xlim(-0.5, len(layers) - 0.5)
    axis.set_xticks(range(0, len(layers), -(-len(layers) // 16)))
    axis.set_xlabel("layer")


def titled(axis: Axes, title: str, legend: str) -> None:
    axis.set_title(title, fontsize=9, loc="left", pad=14)
    axis.annotate(legend, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=7, color=GREY)
