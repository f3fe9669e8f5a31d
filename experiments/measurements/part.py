"""A part of what a bench measures, by what names its rows, and its place among the others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.measurements.sheet import rows_like
from experiments.running.expand import axes
from model.errors import UserError, choose

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Keys of rows -> the values that are asked for; of other keys, any."""

    wanted: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __call__(self, named: Mapping[str, Any]) -> bool:
        """Whether a row may be in it, by as much of its name as is known."""
        return all(str(named[key]) in values for key, values in self.wanted.items() if key in named)


ALL = Part()


def read(text: str, names: Mapping[str, str], settings: Iterable[Mapping[str, Any]]) -> Part:
    """Of `case=fire;batch=1,8`. names: the keys that rows have; who contends is not known before that is made ready."""
    wanted, settings = {}, list(settings)
    for key, values in axes("only", text, example="case=fire"):
        choose("key", key, dict.fromkeys(names))
        known = {setting[key] for setting in settings if key in setting}
        numbers = all(isinstance(one, int) for one in [*known, *values])
        for value in values if known else ():
            choose(key, *((value, known) if numbers else (str(value), {*map(str, known)})))
        wanted[key] = frozenset(map(str, values))
    return Part(wanted)


def rows_before(file: Path, alike: Row) -> list[Row]:
    """The rows in a file, which need not be there; refused if not all are of this bench and device."""
    rows = rows_like(file, {})
    for row in rows:
        if odd := [f"{key} {row.get(key)}" for key, value in alike.items() if row.get(key) != value]:
            here = ", ".join(f"{key} {value}" for key, value in alike.items())
            raise UserError(f"--out={file} has rows of {odd[0]}, and these are of {here}; give another file")
    return rows


def put(rows: list[Row], row: Row, names: Iterable[str]) -> None:
    """Adds a row, or sets it in the place of the one with its name."""
    name = {key: row[key] for key in names}
    for at, other in enumerate(rows):
        if other.items() >= name.items():
            rows[at] = row
            return
    rows.append(row)
