"""Sheet -> text: markdown, LaTeX and terminal share one arrangement; CSV has a line per cell."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
    """Labels, then per column its score and, where there is one, the published number, then the costs."""
    layout = sheet.layout
    quoted = [any(cells[i] and cells[i].published for cells in sheet.lines.values()) for i in range(len(sheet.columns))]
    sources = _number_sources(sheet)
    what = layout.metric.replace("/", " ") + (", %" if _percent(sheet) else "")

    header = [plain(key) for key in layout.by]
    for column, has_published in zip(sheet.columns, quoted, strict=True):
        name = heading(column, layout.across)
        if len(sheet.columns) == 1:
            name = f"{name}: {what}" if name else what
        header += [name, "published"] if has_published else [name]
    counts = ["failed seeds"] + ([f"failed at other {_names(layout.tuned)}"] if layout.tuned else [])
    header += [*counts, "params", "state bytes", "steps/s"]

    body = []
    for line, cells in sheet.lines.items():
        texts = [plain(value) for value in line]
        for cell, has_published in zip(cells, quoted, strict=True):
            texts.append(_score(cell, sheet))
            if has_published:
                published = cell.published if cell else None
                texts.append(f"{_number(published.value, sheet)} [{sources[published.source]}]" if published else "")
        known = [cell for cell in cells if cell]
        runs = {run for cell in known for run in cell.runs}
        failed = {run for cell in known for run in cell.failed}
        texts.append(f"{len(failed)} of {len(runs)}")
        if layout.tuned:
            others = {run for cell in known for run in cell.others}
            texts.append(f"{len({run for cell in known for run in cell.others_failed})} of {len(others)}")
        body.append(texts + [_costs(known, cost) for cost in COSTS])
    for name, spans in sheet.baselines.items():
        texts = [name, *[""] * (len(layout.by) - 1)]
        for found, has_published in zip(spans, quoted, strict=True):
            texts += [_range(found, lambda value: _number(value, sheet))] + [""] * has_published
        body.append(texts + [""] * (len(counts) + len(COSTS)))

    scores = f"{what[0].upper()}{what[1:]}; {SPREAD}"
    tuned = [_budget(sheet)] if layout.tuned else []
    lengths = ", ".join(map(str, sheet.trained))
    trained = [f"Trained at length {lengths}; blank: a length that the model cannot place"] if lengths else []
    notes = [". ".join([scores, *tuned, *TESTED[sheet.tested], *trained, *_targets(sheet), sheet.provenance]) + "."]
    notes += [f"Mixed: {what}." for what in sheet.mixed]
    notes += [f"[{number}] {source}" for source, number in sources.items()]
    changed = {
        run: how for cells in sheet.lines.values() for cell in cells if cell for run, how in cell.changed.items()
    }
    notes += [f"Changed on the way: {run}: {how}" for run, how in sorted(changed.items())]
    notes += [layout.note] if layout.note else []
    numeric = [False] * len(layout.by) + [True] * (len(header) - len(layout.by))
    return Arrangement(header, body, numeric, notes)


def markdown(sheet: Sheet) -> str:
    table = arrange(sheet)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "| " + " | ".join("---:" if numeric else "---" for numeric in table.numeric) + " |"
    title = [f"**{sheet.layout.title}**", ""] if sheet.layout.title else []
    lines = [*title, line(table.header), rule, *map(line, table.body), "", *_paragraphs(table.notes)]
    return "\n".join(lines) + "\n"


def latex(sheet: Sheet) -> str:
    table = arrange(sheet)

    def line(cells: Sequence[str]) -> str:
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
            line(table.header),
            r"\midrule",
            *map(line, table.body),
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
    every = [cell for cells in sheet.lines.values() for cell in cells if cell]
    marked = ["changed"] if any(cell.changed for cell in every) else []
    marked += ["targets"] if any(cell.targets for cell in every) else []
    marked += [*layout.tuned, "others", "others_failed"] if layout.tuned else []
    scores = ["metric", "mean", "spread", "seeds", "failed", *marked]
    numbers = [*scores, *COSTS, *sheet.baselines, "published", "source"]
    writer.writerow([*layout.by, *across, *numbers])
    for line, cells in sheet.lines.items():
        for i, (column, cell) in enumerate(zip(sheet.columns, cells, strict=True)):
            if cell is None:
                continue
            summary, published = cell.summary, cell.published
            costs = [cell.costs.get(cost) for cost in COSTS]
            trivial = [spans[i][0] if spans[i] else None for spans in sheet.baselines.values()]
            place = [*map(plain, line), *([plain(column)] if across else [])]
            scores = [layout.metric, summary.mean, summary.spread, summary.n, summary.failed]
            more = {"changed": len(cell.changed), "targets": cell.targets and cell.targets[0]} | dict(cell.chosen)
            more |= {"others": len(cell.others), "others_failed": len(cell.others_failed)}
            scores += [more[name] for name in marked]
            quote = [published.value, published.source] if published else [None, None]
            writer.writerow([*place, *scores, *costs, *trivial, *quote])
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


def _score(cell: Cell | None, sheet: Sheet) -> str:
    if cell is None:
        return ""
    mean, spread = cell.summary.mean, cell.summary.spread
    if mean is None:
        return "failed"
    text = _number(mean, sheet) + (f" ± {_number(spread, sheet)}" if spread is not None else "")
    remarks = {"failed": cell.summary.failed, "changed": len(cell.changed)}
    said = [f"{_names([key])} {plain(value)}" for key, value in cell.chosen.items()]
    said += [f"{count} {what}" for what, count in remarks.items() if count]
    return text + (f" ({', '.join(said)})" if said else "")


def _names(labels: Iterable[str]) -> str:
    """Labels as a table says them: `optim.lr` is lr."""
    return ", ".join(label.rpartition(".")[2] for label in labels)


def _budget(sheet: Sheet) -> str:
    """How the tuned labels were chosen, and whether all had the same choice."""
    low, high = span(cell.tried for cells in sheet.lines.values() for cell in cells if cell)
    among = f"{low} settings a cell" if low == high else f"{low} to {high} settings a cell, so tuning was not equal"
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
    return f"{value:.3f}" if sheet.layout.metric.endswith("loss") else f"{value:.4g}"


def _costs(cells: Sequence[Cell], cost: str) -> str:
    found = span(cell.costs.get(cost) for cell in cells)
    return _range(found, lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")


def _range(found: tuple[float, float] | None, write: Callable[[float], str]) -> str:
    if found is None:
        return ""
    low, high = map(write, found)
    return low if low == high else f"{low}–{high}"


def _number_sources(sheet: Sheet) -> dict[str, int]:
    quoted = [cell.published for cells in sheet.lines.values() for cell in cells if cell and cell.published]
    return {source: i for i, source in enumerate(dict.fromkeys(p.source for p in quoted), start=1)}


def _paragraphs(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in (note, "")][:-1]
