"""How rows of figures are told: each in a sentence as it comes, and all of them in a table; and rows of before."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sheet:
    """What names a row, and its figures; keys of rows -> headings, of figures with the format that they are given."""

    names: Mapping[str, str]
    figures: Mapping[str, tuple[str, str]]

    def name(self, row: Row, key: str) -> str:
        return f"{row[key]:,}" if isinstance(row[key], int) else str(row[key])

    def figure(self, row: Row, key: str) -> str:
        """Nothing where a row does not have it, unless because it broke down."""
        if row.get(key) is None:
            return "failed" if "error" in row else ""
        return format(row[key], self.figures[key][1])

    def sentence(self, row: Row) -> str:
        known = [
            f"{self.figure(row, key)} {title}" for key, (title, _) in self.figures.items() if row.get(key) is not None
        ]
        return f"{', '.join(self.name(row, key) for key in self.names)}: {row.get('error') or ', '.join(known)}"

    def table(self, rows: Iterable[Row]) -> str:
        """Markdown, a line per row."""
        titles = [*self.names.values(), *(title for title, _ in self.figures.values())]
        return markdown_table(
            titles,
            [
                [self.name(row, key) for key in self.names] + [self.figure(row, key) for key in self.figures]
                for row in rows
            ],
        )


def markdown_table(header: Sequence[str], body: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Lines of cells, which may hold any text. right: which columns are set to the right; none given, as readers do."""
    rule = "".join(" ---: |" if one else " --- |" for one in right) or "---|" * len(header)
    return "\n".join([_line(header), f"|{rule}", *map(_line, body)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split("\n")).replace("|", "\\|") for cell in cells) + " |"


def all_of(rows: Iterable[Row], key: str) -> str:
    """All that rows have of a key, for a note."""
    return ", ".join(sorted({str(row[key]) for row in rows if key in row}))


def rows_like(file: Path, alike: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows in a file, which need not be there, that have all of this in common."""
    if not file.exists():
        return []
    try:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{file} is not a file of rows, one JSON object per line: {error}") from error
    return [row for row in found if isinstance(row, dict) and row.items() >= alike.items()]
