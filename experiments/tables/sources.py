"""Where rows come from: a table is of one revision of the code and of data made alike, or it says that it is not."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.tables.rows import Row
from model.errors import UserError


def revisions(row: Row) -> tuple[str, ...]:
    """Every revision of the code that trained a run, the last one last."""
    return tuple(row.get("revisions") or filter(None, [row.get("revision")]))


def tested_at(row: Row) -> str | None:
    """The step that test scores are of, which was the last one before there was a choice."""
    tests = any(metric.startswith("test/") for metric in row.get("metrics") or ())
    return row.get("test_at", "last") if tests else None


def mixture(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the rows mix, in words; nothing where they belong together.

    Runs may ask for different data, as for longer rows, or another task. Those that asked for the same (of older rows
    only the task and the length are known) must have got the same.
    """
    found = [
        _several("revisions of the code", _runs(rows, " then ".join, revisions)),
        _several("choices of the step that is tested", _runs(rows, str, tested_at)),
    ]
    asked: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("data_fingerprint"):
            setting = row.get("data", {"length": row.get("length")})
            asked.setdefault(f"{row.get('task')} {sorted(setting.items())}", []).append(row)
    for same in asked.values():
        made = _runs(same, str, lambda row: row["data_fingerprint"])
        found.append(_several(f"makes of the data of {same[0].get('task')}", made))
    return tuple(filter(None, found))


def refuse_mixture(mixed: Sequence[str]) -> None:
    if mixed:
        raise UserError(f"the rows mix {'; '.join(mixed)}; a table that may do so, and says so, needs --mixed")


def refuse_other_code(finished: Sequence[Row], now: str, out: str) -> None:
    """Before more runs are added to those that are there."""
    others = {name for row in finished for name in revisions(row)} - {now}
    if others:
        raise UserError(
            f"{out} has runs of revision {', '.join(sorted(others))}, and the code is now {now}; give another --out, "
            "or --mixed for a table that may mix them, and says so"
        )


def _runs(rows: Sequence[Row], text: Callable[[Any], str], value: Callable[[Row], Any]) -> dict[str, set[str]]:
    """Names of runs by where they come from."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if value(row):
            found.setdefault(text(value(row)), set()).add(row["run"])
    return found


def _several(what: str, found: dict[str, set[str]]) -> str:
    if len(found) < 2:
        return ""
    return f"{len(found)} {what}: " + ", ".join(
        f"{name} ({len(runs)} run{'s' if len(runs) > 1 else ''})" for name, runs in found.items()
    )
