"""Sheet -> text: markdown, LaTeX and terminal share one arrangement; CSV has a line per cell."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from experiments.measurements.sheet import markdown_table
from experiments.tables.layout import COSTS, Cell, Sheet, heading, plain, span

TESTED = {"best": ["Tested at the step that validation chose"], "last": ["Tested at the last step"], "": []}
SPREAD = "± is the sample standard deviation over seeds"


@dataclass(frozen=True)
class Arrangement:
    """A sheet as strings."""

    header: list[str]
    body: list[list[str]]
    numeric: list[bool]  # which columns hold numbers
    notes: list[str]


def arrange(sheet: Sheet) -> Arrangement:
    """Labels, then per column its score and, where there is one, the published number, then failures and costs."""
    body = [line(sheet, labels, cells) for labels, cells in sheet.lines.items()]
    body += [baseline(sheet, name, spans) for name, spans in sheet.baselines.items()]
    titles, labels = header(sheet), len(sheet.layout.by)
    return Arrangement(titles, body, [False] * labels + [True] * (len(titles) - labels), notes(sheet))


def header(sheet: Sheet) -> list[str]:
    layout = sheet.layout
    names = [heading(column, layout.across) for column in sheet.columns]
    if len(names) == 1:
        names = [": ".join(filter(None, [names[0], _metric(sheet)]))]
    failed = ["failed seeds"] + ([f"failed at other {_names(layout.tuned)}"] if layout.tuned else [])
    published = ["published"] * len(names)
    return [*map(plain, layout.by), *_beside(sheet, names, published), *failed, "params", "state bytes", "steps/s"]


def line(sheet: Sheet, labels: Sequence[Any], cells: Sequence[Cell | None]) -> list[str]:
    known = [cell for cell in cells if cell]
    scores = [_score(cell, sheet) for cell in cells]
    published = [_quote(cell, sheet) for cell in cells]
    failed = [_of((cell.failed for cell in known), (cell.runs for cell in known))]
    if sheet.layout.tuned:
        failed.append(_of((cell.others_failed for cell in known), (cell.others for cell in known)))
    costs = [_costs(known, cost) for cost in COSTS]
    return [*map(plain, labels), *_beside(sheet, scores, published), *failed, *costs]


def baseline(sheet: Sheet, name: str, spans: Sequence[tuple[float, float] | None]) -> list[str]:
    """The line of a trivial score, which has no runs and no costs."""
    scores = [_range(found, lambda value: _number(value, sheet)) for found in spans]
    labels = [name, *[""] * (len(sheet.layout.by) - 1)]
    failed = [""] * (2 if sheet.layout.tuned else 1)
    return [*labels, *_beside(sheet, scores, [""] * len(scores)), *failed, *[""] * len(COSTS)]


def notes(sheet: Sheet) -> list[str]:
    layout, what, lengths = sheet.layout, _metric(sheet), ", ".join(map(str, sheet.trained))
    said = [
        f"{what[0].upper()}{what[1:]}; {SPREAD}",
        *([_budget(sheet)] if layout.tuned else []),
        *([f"Mean over every {', '.join(layout.averaged)}"] if layout.averaged else []),
        *TESTED[sheet.tested],
        *([f"Trained at length {lengths}; blank: a length that the model cannot place"] if lengths else []),
        *_targets(sheet),
        sheet.provenance,
    ]
    changed = {run: how for cell in _cells(sheet) for run, how in cell.changed.items()}
    return [
        ". ".join(said) + ".",
        *(f"Mixed: {told}." for told in sheet.mixed),
        *(f"[{number}] {source}" for source, number in _number_sources(sheet).items()),
        *(f"Changed on the way: {run}: {how}" for run, how in sorted(changed.items())),
        *(layout.remarks[column] for column in _quoted(sheet) if column in layout.remarks),
        *([layout.note] if layout.note else []),
    ]


def markdown(sheet: Sheet) -> str:
    table = arrange(sheet)
    title = [f"**{sheet.layout.title}**", ""] if sheet.layout.title else []
    body = markdown_table(table.header, table.body, table.numeric)
    return "\n".join([*title, body, *_paragraphs(table.notes)]) + "\n"


def latex(sheet: Sheet) -> str:
    table = arrange(sheet)

    def row(cells: Sequence[str]) -> str:
        return " & ".join(map(escape_latex, cells)) + r" \\"

    columns = "".join("r" if numeric else "l" for numeric in table.numeric)
    caption = " ".join(filter(None, [sheet.layout.title and sheet.layout.title + ".", *table.notes]))
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            row(table.header),
            r"\midrule",
            *map(row, table.body),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{escape_latex(caption)}}}",
            r"\end{table}",
            "",
        ]
    )


def escape_latex(text: str) -> str:
    special = {char: "\\" + char for char in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
        "–": "--",
    }
    return "".join(special.get(char, char) for char in text)


def comma_separated(sheet: Sheet) -> str:
    """Numbers as they are: fractions, bytes, no rounding."""
    layout, text = sheet.layout, io.StringIO()
    across = [layout.across] if layout.across else []
    writer = csv.writer(text, lineterminator="\n")
    every = _cells(sheet)
    marked = ["changed"] if any(cell.changed for cell in every) else []
    marked += ["targets"] if any(cell.targets for cell in every) else []
    marked += [*layout.tuned, "others", "others_failed"] if layout.tuned else []
    names = ["metric", "mean", "spread", "seeds", "failed", *marked, *COSTS, *sheet.baselines, "published", "source"]
    writer.writerow([*layout.by, *across, *names])
    for labels, cells in sheet.lines.items():
        for i, (column, cell) in enumerate(zip(sheet.columns, cells, strict=True)):
            if cell is None:
                continue
            summary, published = cell.summary, cell.published
            costs = [cell.costs.get(cost) for cost in COSTS]
            trivial = [spans[i][0] if spans[i] else None for spans in sheet.baselines.values()]
            place = [*map(plain, labels), *([plain(column)] if across else [])]
            found = [layout.metric, summary.mean, summary.spread, summary.n, summary.failed]
            more = {"changed": len(cell.changed), "targets": cell.targets and cell.targets[0]} | dict(cell.chosen)
            more |= {"others": len(cell.others), "others_failed": len(cell.others_failed)}
            found += [more.get(name) for name in marked]
            quote = [published.value, published.source] if published else [None, None]
            writer.writerow([*place, *found, *costs, *trivial, *quote])
    return text.getvalue()


def terminal(sheet: Sheet, width: int) -> Group:
    """Tables no wider than the terminal, one below the other, each beginning with the labels."""
    table = arrange(sheet)
    widths = [max(map(len, column)) + 3 for column in zip(table.header, *table.body, strict=True)]
    labels = table.numeric.index(True)
    blocks, room = [[]], width - 1 - sum(widths[:labels])
    for i in range(labels, len(widths)):
        if blocks[-1] and sum(widths[j] for j in blocks[-1]) + widths[i] > room:
            blocks.append([])
        blocks[-1].append(i)
    shown = []
    for block in blocks:
        part = Table(box=box.ROUNDED)
        for i in [*range(labels), *block]:
            part.add_column(Text(table.header[i]), justify="right" if table.numeric[i] else "left")
        for cells in table.body:
            part.add_row(*(Text(cells[i]) for i in [*range(labels), *block]))
        shown.append(part)
    return Group(Text(sheet.layout.title, style="bold"), *shown, Text("\n".join(table.notes)))


def mean_and_spread(cell: Cell, sheet: Sheet) -> str:
    mean, spread = cell.summary.mean, cell.summary.spread
    if mean is None:
        return "failed"
    return _number(mean, sheet) + (f" ± {_number(spread, sheet)}" if spread is not None else "")


def _cells(sheet: Sheet) -> list[Cell]:
    """Those there are."""
    return [cell for cells in sheet.lines.values() for cell in cells if cell]


def _metric(sheet: Sheet) -> str:
    return sheet.layout.metric.replace("/", " ") + (", %" if _percent(sheet) else "")


def _beside(sheet: Sheet, scores: Sequence[str], published: Sequence[str]) -> list[str]:
    """What stands in a line for each column: its score, and the published number if any line of it has one."""
    quoted, triples = _quoted(sheet), zip(sheet.columns, scores, published, strict=True)
    return [text for column, *both in triples for text in (both if column in quoted else both[:1])]


def _quoted(sheet: Sheet) -> list[Any]:
    """The columns in which any line has a published number."""
    columns = zip(sheet.columns, zip(*sheet.lines.values(), strict=True), strict=True)
    return [column for column, cells in columns if any(cell and cell.published for cell in cells)]


def _quote(cell: Cell | None, sheet: Sheet) -> str:
    if cell is None or cell.published is None:
        return ""
    return f"{_number(cell.published.value, sheet)} [{_number_sources(sheet)[cell.published.source]}]"


def _of(few: Iterable[frozenset[str]], every: Iterable[frozenset[str]]) -> str:
    """How many of a line's runs; one that stands in several columns is counted once."""
    return f"{len(frozenset().union(*few))} of {len(frozenset().union(*every))}"


def _score(cell: Cell | None, sheet: Sheet) -> str:
    if cell is None:
        return ""
    if cell.summary.mean is None:
        return "failed"
    remarks = {"failed": cell.summary.failed, "changed": len(cell.changed)}
    said = [f"{_names([key])} {plain(value)}" for key, value in cell.chosen.items()]
    said += [f"{count} {what}" for what, count in remarks.items() if count]
    return mean_and_spread(cell, sheet) + (f" ({', '.join(said)})" if said else "")


def _names(labels: Iterable[str]) -> str:
    """Labels as a table says them: `optim.lr` is lr."""
    return ", ".join(label.rpartition(".")[2] for label in labels)


def _budget(sheet: Sheet) -> str:
    """How the tuned labels were chosen, and whether all had the same choice, and all of it."""
    low, high = span(cell.tried for cell in _cells(sheet))
    among = f"{_range((low, high), str, ' to ')} setting{'s' * (high != 1)} a cell"
    among += f" of {sheet.layout.settings} that the table defines" if high < sheet.layout.settings else ""
    among += ", so tuning was not equal" if low < high else ""
    return f"{_names(sheet.layout.tuned)} chosen on the validation split among {among}"


def _targets(sheet: Sheet) -> list[str]:
    """How many answers the score of one seed is the mean of, where the rows say it."""
    found: dict[tuple[int, int], list[str]] = {}
    for column, cells in zip(sheet.columns, zip(*sheet.lines.values(), strict=True), strict=True):
        known = [cell.targets for cell in cells if cell and cell.summary.n]
        if known and None not in known:
            bounds = min(low for low, _ in known), max(high for _, high in known)
            found.setdefault(bounds, []).append(heading(column, sheet.layout.across))
    texts = {_range(bounds, lambda value: f"{value:,}"): columns for bounds, columns in found.items()}
    whole = len(texts) == 1 and len(next(iter(texts.values()))) == len(sheet.columns)
    said = [text + ("" if whole else f" ({', '.join(columns)})") for text, columns in texts.items()]
    return [f"A seed's score rests on {', '.join(said)} targets"] if said else []


def _percent(sheet: Sheet) -> bool:
    return sheet.layout.is_share


def _number(value: float, sheet: Sheet) -> str:
    if _percent(sheet):
        return f"{100 * value:.1f}"
    return f"{value:.3f}" if sheet.layout.metric.endswith(("loss", "bits_per_byte")) else f"{value:.4g}"


def _costs(cells: Sequence[Cell], cost: str) -> str:
    found = span(cell.costs.get(cost) for cell in cells)
    return _range(found, lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")


def _range(found: tuple[float, float] | None, write: Callable[[float], str], to: str = "–") -> str:
    if found is None:
        return ""
    low, high = map(write, found)
    return low if low == high else f"{low}{to}{high}"


def _number_sources(sheet: Sheet) -> dict[str, int]:
    quoted = dict.fromkeys(cell.published.source for cell in _cells(sheet) if cell.published)
    return {source: i for i, source in enumerate(quoted, start=1)}


def _paragraphs(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in (note, "")][:-1]
