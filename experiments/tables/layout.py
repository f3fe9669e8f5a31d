"""Rows -> sheet: the numbers of a table, each in its place, before anyone decides how to print them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from experiments.tables.rows import (
    Row,
    Summary,
    best,
    changed,
    check_labels,
    check_metric,
    check_validation,
    group,
    score,
    summarise,
    unfold,
    varying,
)
from experiments.tables.sources import mixture, tested_at
from model.errors import UserError

COSTS = ("params", "state_bytes", "steps_per_s")


@dataclass(frozen=True)
class Published:
    value: float
    source: str  # who, where, and what their setting was


@dataclass(frozen=True)
class Layout:
    """What a table shows. A label `length` that no run has stands for the lengths that each was tested at."""

    metric: str
    by: tuple[str, ...]  # labels that name its lines
    across: str | None = None  # label that names its columns; None: one column
    tuned: tuple[str, ...] = ()  # labels whose best value on the validation split is taken
    settings: int = 0  # of the tuned labels that a cell is to have; 0: nobody says
    averaged: tuple[str, ...] = ()  # labels over whose values, each tuned, a seed's score is the mean
    order: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # label -> values as they should stand
    published: Mapping[tuple[str, ...], Published] = field(default_factory=dict)  # (*by, across) values -> number
    title: str = ""
    note: str = ""  # stands below
    remarks: Mapping[Any, str] = field(default_factory=dict)  # column -> stands below if it has published numbers
    against: str = ""  # the cost that the picture's horizontal axis is; none: a label

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share of targets or answers, printed in percent."""
        return self.metric.endswith(("accuracy", "exact"))


@dataclass(frozen=True)
class Cell:
    summary: Summary
    seeds: tuple[tuple[Any, float], ...]  # (seed, score) of those that count
    costs: Mapping[str, float]  # mean over those seeds
    published: Published | None
    runs: frozenset[str]  # by name
    failed: frozenset[str]  # those of them without a number
    changed: Mapping[str, str]  # those that count, but changed their config on the way, and how
    targets: tuple[int, int] | None  # fewest, most that a seed's score rests on; None: some run did not count them
    chosen: Mapping[str, Any]  # of the tuned labels; not of those that differ among what is averaged
    tried: int  # settings of the tuned labels
    others: frozenset[str]  # runs of the settings that were not chosen
    others_failed: frozenset[str]


@dataclass(frozen=True)
class Sheet:
    layout: Layout
    columns: tuple[Any, ...]
    lines: Mapping[tuple, tuple[Cell | None, ...]]  # by-values -> one cell per column; None: never asked for
    baselines: Mapping[str, tuple[tuple[float, float] | None, ...]]  # name -> lowest, highest per column
    provenance: str
    trained: tuple[int, ...] = ()  # lengths of training, where those of testing are shown
    tested: str = ""  # at which step, where the rows say it and agree
    mixed: tuple[str, ...] = ()  # revisions and data that stand beside each other and should not


def sheet(rows: Sequence[Row], layout: Layout) -> Sheet:
    """Puts rows in their places; refuses to average over anything but seeds."""
    if not rows:
        raise UserError("no rows to report on; give the folder or the rows of a sweep")
    keys = [*layout.by, *([layout.across] if layout.across else [])]
    lengths = "length" in keys and not any("length" in row["labels"] for row in rows)
    rows = unfold(rows) if lengths else rows
    check_labels(rows, [*keys, *layout.tuned, *layout.averaged])
    check_metric(rows, layout.metric)
    if layout.tuned:
        check_validation(rows, layout.metric, layout.tuned)
    kept = best(rows, layout.tuned, layout.metric) if layout.tuned else list(rows)
    mixed = [key for key in varying(kept) if key not in (*keys, *layout.tuned, *layout.averaged)]
    if mixed:
        raise UserError(
            f"rows of one cell differ in {', '.join(mixed)}, not only in seed; name it in --by, --across or --tune"
        )
    chosen, tried = group(kept, keys), group(rows, keys)
    places = group(_averages(kept, keys, layout.metric), keys) if layout.averaged else chosen
    columns = _ordered({place[-1] for place in places}, layout.across, layout) if layout.across else (None,)
    lines = {}
    for line in _lines(places, layout):
        at = [(*line, column) if layout.across else line for column in columns]
        lines[line] = tuple(
            _cell(places[place], chosen[place], tried[place], place, layout) if place in places else None
            for place in at
        )
    trained = sorted({row["length"] for row in kept if "length" in row}) if lengths else ()
    baselines = _baselines(kept, columns, layout)
    tested = {tested_at(row) for row in kept if score(row, layout.metric) is not None}
    at = tested.pop() if len(tested) == 1 else None
    return Sheet(layout, columns, lines, baselines, _provenance(rows), tuple(trained), at or "", mixture(rows))


def span(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Lowest and highest of the numbers there are."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def plain(value: Any) -> str:
    """A label's value as text; a tuple of mixers reads mamba+attention."""
    return "+".join(map(plain, value)) if isinstance(value, tuple | list) else str(value)


def heading(column: Any, across: str | None) -> str:
    """A number says nothing without its label."""
    return "" if column is None else f"{across} {column}" if isinstance(column, int | float) else plain(column)


def _averages(rows: Sequence[Row], keys: Sequence[str], metric: str) -> list[Row]:
    """A row for each seed of a place, with the mean of its rows' scores and costs; failed where one of them is."""
    out = []
    for place in group(rows, keys).values():
        for seed in dict.fromkeys(row["seed"] for row in place):
            alike = [row for row in place if row["seed"] == seed]
            scores = [value for row in alike if (value := score(row, metric)) is not None]
            whole = len(scores) == len(alike)
            costs = {cost: [row[cost] for row in alike if row.get(cost) is not None] for cost in COSTS}
            mean = {
                "run": alike[0]["run"],
                "seed": seed,
                "labels": {key: alike[0]["labels"].get(key) for key in keys},
                "status": "finished" if whole else "failed",
                "metrics": {metric: fmean(scores)} if whole else {},
                "changes": [change for row in alike for change in row.get("changes", [])],
            }
            out.append(mean | {cost: fmean(found) for cost, found in costs.items() if found})
    return out


def _cell(rows: Sequence[Row], chosen: Sequence[Row], tried: Sequence[Row], place: tuple, layout: Layout) -> Cell:
    """A cell of these rows, which are those that were chosen for it or their means, of those that were tried."""
    data = {row["data_fingerprint"] for row in rows if "data_fingerprint" in row}
    if len(data) > 1:
        raise UserError(f"rows of {' '.join(map(plain, place))} were made on different data: {sorted(data)}")
    counted = [row for row in rows if summarise([row], layout.metric).n]
    costs = {cost: [row[cost] for row in counted if row.get(cost) is not None] for cost in COSTS}
    targets = [row.get("targets", {}).get(layout.metric) for row in counted]
    others = [row for row in tried if not any(row is one for one in chosen)]
    return Cell(
        summary=summarise(rows, layout.metric),
        seeds=tuple((row["seed"], row["metrics"][layout.metric]) for row in counted),
        costs={cost: fmean(found) for cost, found in costs.items() if found},
        published=layout.published.get(tuple(map(plain, place))),
        runs=frozenset(row["run"] for row in rows),
        failed=frozenset(row["run"] for row in rows) - {row["run"] for row in counted},
        changed={row["run"]: how for row in counted if (how := changed(row))},
        targets=span(targets) if None not in targets else None,
        chosen=_shared(chosen, layout.tuned),
        tried=len(group(tried, layout.tuned)),
        others=frozenset(row["run"] for row in others),
        others_failed=frozenset(row["run"] for row in others if score(row, layout.metric) is None),
    )


def _shared(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, Any]:
    """Those of the labels that have one value in all rows."""
    values = {key: [row["labels"].get(key) for row in rows] for key in keys}
    return {key: found[0] for key, found in values.items() if all(value == found[0] for value in found)}


def _lines(places: Iterable[tuple], layout: Layout) -> list[tuple]:
    found = list(dict.fromkeys(place[: len(layout.by)] for place in places))
    orders = [_ordered({line[i] for line in found}, key, layout) for i, key in enumerate(layout.by)]
    return sorted(found, key=lambda line: [order.index(value) for order, value in zip(orders, line, strict=True)])


def _ordered(values: Iterable[Any], key: str, layout: Layout) -> tuple[Any, ...]:
    """As the layout says; what it does not name comes after, numbers by size, then words."""
    known = list(layout.order.get(key, ()))

    def rank(value: Any) -> tuple:
        number = isinstance(value, int | float)
        return (
            known.index(value) if value in known else len(known),
            not number,
            value if number else 0,
            "" if number else str(value),
        )

    return tuple(sorted(values, key=rank))


def _baselines(rows: Sequence[Row], columns: Sequence[Any], layout: Layout) -> dict[str, tuple]:
    """Trivial scores by column. They are accuracies, so tables of anything else have none."""
    if not layout.metric.endswith("accuracy"):
        return {}
    names = dict.fromkeys(name for row in rows for name in row.get("baselines", {}))
    there = group(rows, [layout.across]) if layout.across else {(None,): rows}
    return {
        name: tuple(span(row.get("baselines", {}).get(name) for row in there[(column,)]) for column in columns)
        for name in names
    }


def _provenance(rows: Sequence[Row]) -> str:
    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))

    parts = [("device", all_of("device")), ("jax", all_of("jax")), ("revision", all_of("revision"))]
    runs = len({row["run"] for row in rows})
    return "; ".join([f"{runs} runs", *(f"{name} {value}" for name, value in parts if value)])
