"""Rows, one per run, and their summary over seeds. A run that failed keeps its row and is counted.

A row is a run's `result.json` with `run` (its name) and `labels` (its place in a table). A run without a
result has a row too, with `status` "failed" (`error` says how it ended) or "missing" (not finished).
"""

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.running import folders
from model.errors import UserError, closest
from model.settings import shown
from train import places
from train.workdir import parse_json, write_text

Row = dict[str, Any]

# Keys that a run may change on the way without its numbers becoming those of another run.
HARMLESS = (
    "log_every",
    "checkpoint_every",
    "keep",
    "tensorboard",
    "resume_safe",
    "mesh",
    "stream",
    "steps_per_dispatch",
    "watchdog",
)


@dataclass(frozen=True)
class Summary:
    """One number over seeds."""

    mean: float | None  # None: no seed has a number
    spread: float | None  # sample standard deviation; None below two seeds
    n: int  # seeds that count
    failed: int  # seeds that do not: crashed, missing or non-finite


def collect(out: Path) -> list[Row]:
    """The rows of every run that has a folder in `out`, in the order of their names."""
    if not out.is_dir():
        raise UserError(f"no folder {out}; give the --out of a sweep")
    return [row_of(path.parent) for path in sorted(out.glob("*/run.json"))]


def row_of(folder: Path) -> Row:
    asked = folders.read_json(folder / "run.json", labels=dict, overrides=dict) or {"labels": {}, "overrides": {}}
    row = folders.read_json(folder / "result.json", status=str, metrics=dict)
    if row is not None and (odd := oddity({**row, "run": folder.name, "labels": asked["labels"]})):
        raise UserError(f"{folder / 'result.json'} is damaged: {odd}")
    if row is None:
        error = folders.read_json(folder / "failed.json", error=str)
        row = {"status": "failed", "error": error["error"]} if error else {"status": "missing"}
        row |= {"seed": asked["overrides"].get("seed"), "metrics": {}}
    elif folders.strayed(folder):
        row |= {"status": "failed", "error": "made with another config than was asked for"}
    return {**row, "run": folder.name, "labels": asked["labels"]}


def write(path: Path, rows: Iterable[Row]) -> None:
    """One line per row, keys sorted, so that two versions differ only where results do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(rows, key=lambda row: row["run"])
    write_text(path, "".join(json.dumps(row, sort_keys=True) + "\n" for row in ordered))


def read_rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise UserError(f"no rows at {path}; a sweep writes them to OUT/rows.jsonl")
    try:
        found = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{path} is not a file of rows, one JSON object per line: {error}") from error
    for number, row in enumerate(found, 1):
        if odd := oddity(row):
            raise UserError(f"{path} is not a file of rows: of row {number}, {odd}")
    return found


Number = int | float | None
PARTS = {"run": str, "status": str, "labels": dict, "metrics": dict, "seed": Number}
FURTHER = {
    **dict.fromkeys(("targets", "untested", "baselines", "length_baselines", "data"), dict),
    **dict.fromkeys(("changes", "revisions"), list),
    **dict.fromkeys(("length", "params", "state_bytes", "steps_per_s"), Number),
    "data_fingerprint": str | None,
}


def oddity(row: Any) -> str | None:
    """What keeps a row out of any table; None where nothing does."""
    if not isinstance(row, dict) or not row.keys() >= PARTS.keys():
        return f"what it must have is {', '.join(PARTS)}"
    for key, kind in (PARTS | FURTHER).items():
        if key in row and not isinstance(row[key], kind):
            return f"{key} is {shown(row[key])}"
    parts = {part: row.get(part, {}) for part in ("metrics", "targets", "baselines")}
    for length, found in row.get("length_baselines", {}).items():
        if not isinstance(found, dict):
            return f"length {length} of its length_baselines is {shown(found)}"
        parts[f"length_baselines at {length}"] = found
    for part, values in parts.items():
        for name, value in values.items():
            if not isinstance(value, Number):
                return f"{name} of its {part} is {shown(value)}"
    for name, value in row["labels"].items():
        if isinstance(value, dict):
            return f"{name} of its labels is {shown(value)}"
    for change in row.get("changes", []):
        whole = isinstance(change, dict) and {"step", "key", "old", "new"} <= change.keys()
        if not (whole and isinstance(change["key"], str)):
            return f"one of its changes is {shown(change)}"
    for length in row.get("untested", {}):
        if not length.isdecimal():
            return f"a length of its untested ones is {shown(length)}"
    return None


def score(row: Row, metric: str) -> float | None:
    """The row's number, or None where it has none that counts."""
    value = row["metrics"].get(metric)
    good = row["status"] in ("finished", "target") and value is not None and math.isfinite(value)
    return value if good else None


def changed(row: Row) -> str:
    """What was changed in a run's config on the way, if it matters: a run of 20 steps and then 40 is not one of 40."""
    told = (
        f"{change['key']} {change['old']} -> {change['new']} at step {change['step']}"
        for change in row.get("changes", [])
        if change["key"].partition(".")[0] not in HARMLESS
        and not places.moved(change["key"], change["old"], change["new"])
    )
    return ", ".join(told)


def summarise(rows: Sequence[Row], metric: str) -> Summary:
    values = [value for row in rows if (value := score(row, metric)) is not None]
    return Summary(
        mean=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        n=len(values),
        failed=len(rows) - len(values),
    )


def unfold(rows: Sequence[Row]) -> list[Row]:
    """A row for each length that a run was tested at: labelled `length`, its `test/length_512/loss` as `test/loss`.

    A run without numbers has failed at the lengths that its other seeds have, or else at all there are; one that ran
    out of memory at a length has failed there. Where no run was tested at other lengths, rows come back as they are.
    """
    every = _lengths(rows)
    if not every:
        return list(rows)
    return [
        {**row, "labels": {**row["labels"], "length": length}}
        | {key: _at_length(row[key], length) for key in ("metrics", "targets") if key in row}
        | {"baselines": row.get("length_baselines", {}).get(str(length), row.get("baselines", {}))}
        for place in group(rows, varying(rows)).values()
        for row in place
        for length in _lengths(place) or every
    ]


def _at_length(metrics: Mapping[str, float], length: int) -> dict[str, float]:
    """Metrics whose test split is the one of this length."""
    there = f"test/length_{length}/"
    kept = {name: value for name, value in metrics.items() if not name.startswith("test/")}
    return kept | {name.replace(there, "test/"): metrics[name] for name in metrics if name.startswith(there)}


def _lengths(rows: Iterable[Row]) -> list[int]:
    rows = list(rows)
    found = (re.match(r"test/length_(\d+)/", name) for row in rows for name in row["metrics"])
    tried = {int(length) for row in rows for length in row.get("untested", {})}
    return sorted({int(match[1]) for match in found if match} | tried)


def group(rows: Iterable[Row], keys: Sequence[str]) -> dict[tuple, list[Row]]:
    """Rows by the values of these labels, in order of appearance."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(_hashable(row["labels"].get(key)) for key in keys), []).append(row)
    return groups


def varying(rows: Sequence[Row]) -> list[str]:
    """Labels in which the rows differ, in order of appearance."""
    keys = dict.fromkeys(key for row in rows for key in row["labels"])
    return [key for key in keys if len({_hashable(row["labels"].get(key)) for row in rows}) > 1]


def best(rows: Sequence[Row], tuned: Sequence[str], metric: str) -> list[Row]:
    """Of the settings that differ in the tuned labels only, the rows of the one that validates best.

    A setting with fewer failed seeds wins over a higher score; the test split plays no part.
    """
    validation = on_validation(metric)
    sign = 1 if lower_is_better(metric) else -1
    places = group(rows, [key for key in varying(rows) if key not in tuned])

    def rank(setting: list[Row]) -> tuple[int, float]:
        summary = summarise(setting, validation)
        return summary.failed, math.inf if summary.mean is None else sign * summary.mean

    return [row for place in places.values() for row in min(group(place, tuned).values(), key=rank)]


def on_validation(metric: str) -> str:
    """The same number on the validation split."""
    return "validation/" + metric.split("/")[-1]


def lower_is_better(metric: str) -> bool:
    return metric.endswith(("loss", "perplexity", "bits_per_byte"))


def check_labels(rows: Sequence[Row], given: Sequence[str]) -> None:
    known = dict.fromkeys(key for row in rows for key in row["labels"])
    for key in given:
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise UserError(f"unknown label {key!r}; the rows have {allowed}{closest(key, known)}")


def check_metric(rows: Sequence[Row], metric: str) -> None:
    known: Mapping[str, None] = dict.fromkeys(key for row in rows for key in row["metrics"])
    if known and metric not in known:
        raise UserError(f"unknown metric {metric!r}; the rows have {', '.join(known)}{closest(metric, known)}")


def check_validation(rows: Sequence[Row], metric: str, tuned: Sequence[str]) -> None:
    """Refuses to choose blindly."""
    known, asked = {key for row in rows for key in row["metrics"]}, on_validation(metric)
    if known and asked not in known:
        raise UserError(f"no row has {asked}, by which {', '.join(tuned)} is chosen; the test split is never asked")


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
