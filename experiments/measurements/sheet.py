"""How rows of figures are told: each in a sentence as it comes, and all of them in a table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
        if key not in row:
            return "failed" if "error" in row else ""
        return format(row[key], self.figures[key][1])

    def sentence(self, row: Row) -> str:
        known = [f"{self.figure(row, key)} {title}" for key, (title, _) in self.figures.items() if key in row]
        return f"{', '.join(self.name(row, key) for key in self.names)}: {row.get('error') or ', '.join(known)}"

    def table(self, rows: Iterable[Row]) -> str:
        """Markdown, a line per row."""
        titles = [*self.names.values(), *(title for title, _ in self.figures.values())]
        lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
        for row in rows:
            cells = [self.name(row, key) for key in self.names] + [self.figure(row, key) for key in self.figures]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"
