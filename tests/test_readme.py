"""The README says what is so: its table comes from the committed rows."""

import re
from pathlib import Path

from experiments.tables import formats, rows
from experiments.tables.definitions import TABLES
from experiments.tables.layout import sheet
from experiments.tables.table import choose_scale, layout

ROOT = Path(__file__).parent.parent


def test_tables_are_generated_from_committed_rows():
    """If this fails after new rows, paste `experiments/results/TABLE/table.md` between the README's marks."""
    found = re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert found
    for name, text in found:
        table = TABLES[name]
        committed = rows.read_rows(ROOT / "experiments" / "results" / name / "rows.jsonl")
        made = formats.markdown(sheet(committed, layout(table, choose_scale(table, None))))
        assert text.strip() == made.strip()
        assert (ROOT / "experiments" / "results" / name / "table.md").read_text() == made


def test_committed_tables_are_those_of_their_rows():
    """All but the title, which may say what the runs were given."""
    folders = [path.parent for path in (ROOT / "experiments" / "results").glob("*/rows.jsonl")]
    named = [folder for folder in folders if folder.name in TABLES]
    assert len(named) >= 4
    for folder in named:
        table = TABLES[folder.name]
        made = formats.markdown(sheet(rows.read_rows(folder / "rows.jsonl"), layout(table, choose_scale(table, None))))
        assert (folder / "table.md").read_text().splitlines()[1:] == made.splitlines()[1:]


def test_the_quickstart_shows_the_known_truth():
    committed = rows.read_rows(ROOT / "experiments" / "results" / "quickstart" / "rows.jsonl")

    def accuracy(arch, task):
        mine = [r for r in committed if r["labels"]["arch"] == arch and r["labels"]["task"] == task]
        assert len(mine) >= 2
        return sum(r["metrics"]["test/accuracy"] for r in mine) / len(mine)

    for arch in ("attention", "mamba"):
        assert accuracy(arch, "mqar") >= 0.99 and accuracy(arch, "induction") >= 0.99
    assert accuracy("mamba", "selective_copying") > 0.98 > 0.9 > accuracy("s4d", "selective_copying")
