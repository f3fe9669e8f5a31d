"""What each architecture can do, beside what length costs it: a column or two of every table, in one."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from experiments.measurements.scaling import MEASURED
from experiments.measurements.sheet import markdown_table, rows_like
from experiments.tables import rows
from experiments.tables.definitions import TABLES
from experiments.tables.formats import mean_and_spread
from experiments.tables.layout import sheet
from experiments.tables.table import choose_scale, layout
from model.errors import UserError


class Score(NamedTuple):
    """One column of a table."""

    heading: str
    table: str
    column: Any = None
    line: tuple = ()  # the labels of a line after the architecture


SCORES = (
    Score("copying", "selective_copying"),
    Score("recall", "recall", 16, (64,)),  # of as many pairs, at this width
    Score("induction, length 256", "induction_heads", 256),
    Score("4,096", "induction_heads", 4096),
    Score("16,384", "induction_heads", 16_384),
    Score("ListOps", "lra", "listops"),
    Score("Text", "lra", "text"),
    Score("Image", "lra", "image"),
)
LENGTHS = {2**16: "ms, length 65,536", 2**20: "1,048,576"}
ARCHS = ("attention", "alibi", "s4", "s4d", "s5", "lru", "b2s6", "lstm", "rwkv", "rglru", "mamba", "mamba2", "hybrid")

Texts = Mapping[str, str]  # by architecture


def overview(results: Path) -> str:
    """Markdown, a line per architecture; what is not in a folder of tables and rows of benches is left blank."""
    found = {one.heading: scores(results / one.table / "rows.jsonl", one) for one in SCORES}
    if not any(found.values()):
        tables = ", ".join(dict.fromkeys(one.table for one in SCORES))
        raise UserError(f"{results} holds none of the tables {tables}; closest: experiments/results")
    found |= costs(results / "bench_scaling.jsonl")
    known = set(chain.from_iterable(found.values()))
    body = [[arch, *(column.get(arch, "") for column in found.values())] for arch in ARCHS if arch in known]
    return markdown_table(["arch", *found], body, [False] + [True] * len(found))


def scores(file: Path, one: Score) -> Texts:
    if not file.exists():
        return {}
    table = TABLES[one.table]
    made = sheet(rows.read_rows(file), layout(table, choose_scale(table, None)))
    if one.column not in made.columns:
        return {}
    at = made.columns.index(one.column)
    cells = {arch: cells[at] for (arch, *rest), cells in made.lines.items() if tuple(rest) == one.line}
    return {arch: mean_and_spread(cell, made) for arch, cell in cells.items() if cell}


def costs(file: Path) -> dict[str, Texts]:
    """Milliseconds of a training step of one layer."""
    measured = rows_like(file, {"bench": "scaling", "status": MEASURED})
    return {
        heading: {row["mixer"]: milliseconds(row["seconds"]) for row in measured if row["length"] == length}
        for length, heading in LENGTHS.items()
    }


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
