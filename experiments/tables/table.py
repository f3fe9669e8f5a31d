"""What a table is: a value, which runs fill it, how it is laid out, and what others have published.

What makes one fair:

- Same data, same order: both depend on seeds alone, so that every architecture reads what the others read.
- Same training: in a column all have as many steps of as many tokens, or the config says whose recipe it follows.
- Same tuning budget: all are run on one grid of settings, and the validation split chooses, never the test split.
- Same seeds: the mean and spread are over all of them; what failed is counted, at settings not chosen too.
- Same test: of the step that validation chose (`test_at=best`) wherever rows are learned from again and again; where
  rows are met but once, there or of the last step; the table says which.
- Same code: runs of several revisions, or of data made differently, share a table only by `--mixed`; it says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from experiments.running.runs import RunSpec, Value
from experiments.tables.layout import Layout
from experiments.tables.published import Quotes
from experiments.tables.rows import Row
from model.errors import UserError, closest

SCALES = {
    "smoke": "minutes on a CPU; shows that everything runs, not who wins",
    "small": "a small version of the question, on a laptop or one accelerator",
    "paper": "the published setting",
}


@dataclass(frozen=True)
class Table:
    name: str
    description: str  # one line
    runs: Callable[[str], list[RunSpec]]  # scale -> runs; those that only others begin with lack a label of its places
    scales: tuple[str, ...]  # those it can be run at; the first is the default
    by: tuple[str, ...]  # labels that name its lines
    across: str | None  # label that names its columns
    metric: str
    tuned: tuple[str, ...] = ()  # labels of which each cell takes the best
    averaged: tuple[str, ...] = ()  # labels over which each cell is the mean, of the best at each value
    published: Callable[[str], Quotes] = lambda scale: {}  # scale -> numbers
    # Other metrics of the same runs, each in a folder of its own beside the table's files, and what is published of it.
    also: Mapping[str, Callable[[str], Quotes]] = field(default_factory=dict)
    # What is to be known of its numbers, or was published that is none of them; or that by scale.
    note: str | Mapping[str, str] = ""
    # Column -> how what is published of it differs from ours; stands below where a number of it is.
    remarks: Mapping[Value, str] = field(default_factory=dict)
    against: str = ""  # a cost that the plot sets the metric against
    part_of: str = ""  # the table that takes this one along
    unpublished: str = ""  # why it has no scale paper


def over_arguments(config: str, scale: str, seeds: int, **arguments: Sequence[Value]) -> list[RunSpec]:
    """Runs of every seed for each combination of a config's arguments, which are their labels."""
    return [
        RunSpec(
            f"configs/{config}.py:{','.join(f'{key}={value}' for key, value in point.items())},size={scale}",
            {"seed": seed},
            point,
        )
        for values in product(*arguments.values())
        for point in [dict(zip(arguments, values, strict=True))]
        for seed in range(seeds)
    ]


def over_grid(runs: Iterable[RunSpec], grid: Mapping[str, Sequence[Value]]) -> list[RunSpec]:
    """Every run at every point of a grid of settings: the same tuning budget for all.

    Each setting is a label too, `lr` for `optim.lr`; a table that takes the best of it names it in `tuned`.
    """
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [
        replace(
            run,
            overrides={**run.overrides, **point},
            labels={**run.labels, **{key.rpartition(".")[2]: value for key, value in point.items()}},
        )
        for run in runs
        for point in points
    ]


def choose_scale(table: Table, given: str | None) -> str:
    """The scale asked for, or the table's first."""
    if given is None or given in table.scales:
        return given or table.scales[0]
    allowed = f"{', '.join(table.scales)}{closest(given, table.scales)}"
    why = f" ({table.unpublished})" if given == "paper" else ""
    raise UserError(f"table {table.name} has no scale {given!r}{why}; choose from {allowed}")


def with_a_place(table: Table, rows: Iterable[Row]) -> list[Row]:
    """The rows that a table shows, and not those of runs that others begin with."""
    rows = list(rows)
    named = {key for row in rows for key in row["labels"]} & {*table.by, table.across}
    return [row for row in rows if named <= row["labels"].keys()]


def layout(table: Table, scale: str) -> Layout:
    """Lines and columns stand in the order of the table's runs."""
    runs = table.runs(scale)
    keys = dict.fromkeys(key for run in runs for key in run.labels)
    order = {key: list(dict.fromkeys(run.labels[key] for run in runs if key in run.labels)) for key in keys}
    tuned = tuple(key for key in table.tuned if len(order.get(key, ())) > 1)
    settings: dict[tuple, set] = {}
    for run in runs:
        place = tuple(run.labels.get(key) for key in (*table.by, table.across))
        settings.setdefault(place, set()).add(tuple(run.labels.get(key) for key in tuned))
    title = f"{table.name}: {table.description}" + (f" (scale {scale})" if scale != table.scales[0] else "")
    return Layout(
        table.metric,
        table.by,
        table.across,
        tuned=tuned,
        settings=max(map(len, settings.values())),
        averaged=tuple(key for key in table.averaged if len(order.get(key, ())) > 1),
        order=order,
        published=table.published(scale),
        title=title,
        note=table.note if isinstance(table.note, str) else table.note.get(scale, ""),
        remarks=table.remarks,
        against=table.against,
    )
