"""The README says what is so: its table comes from the committed rows."""

import json
import re
import shutil
from pathlib import Path

from experiments.measurements import features, pods
from experiments.tables import formats, overview, rows, scaling
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


def test_tables_of_benches_are_those_of_their_rows():
    """If this fails after new rows, paste the first table of `bench_features.md` between the README's marks."""
    results = ROOT / "experiments" / "results"
    for name, table in {"features": features.table, "pods": pods.table, "scaling": scaling.table}.items():
        file = results / f"bench_{name}.jsonl"
        if file.exists():
            measured = [json.loads(line) for line in file.read_text().splitlines()]
            assert file.with_suffix(".md").read_text() == table(measured)
    (shown,) = re.findall(r"<!-- bench: features -->\n(.*?)<!-- end -->", (ROOT / "README.md").read_text(), re.DOTALL)
    measured = [json.loads(line) for line in (results / "bench_features.jsonl").read_text().splitlines()]
    assert shown.strip() == features.part(measured, "output_error").strip()


def test_the_overview_is_of_the_committed_tables():
    """If this fails after new rows, paste what `python -m experiments.overview` prints between the README's marks."""
    (shown,) = re.findall(r"<!-- overview -->\n(.*?)<!-- end -->", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == overview.overview(ROOT / "experiments" / "results")


def test_an_overview_leaves_blank_what_was_not_run(tmp_path):
    shutil.copytree(ROOT / "experiments" / "results" / "selective_copying", tmp_path / "selective_copying")
    header, _, *lines = (line.split(" | ") for line in overview.overview(tmp_path).splitlines())
    whole = overview.overview(ROOT / "experiments" / "results")
    assert " | ".join(header) == whole.splitlines()[0]
    for arch, copying, *others in lines:
        assert f"{arch} | {copying} | " in whole and copying and not "".join(others).strip(" |")


def test_the_quickstart_shows_the_known_truth():
    committed = rows.read_rows(ROOT / "experiments" / "results" / "quickstart" / "rows.jsonl")

    def accuracy(arch, task):
        mine = [r for r in committed if r["labels"]["arch"] == arch and r["labels"]["task"] == task]
        assert len(mine) >= 2
        return sum(r["metrics"]["test/accuracy"] for r in mine) / len(mine)

    for arch in ("attention", "mamba"):
        assert accuracy(arch, "mqar") >= 0.99 and accuracy(arch, "induction") >= 0.99
    assert accuracy("mamba", "selective_copying") > 0.98 > 0.9 > accuracy("s4d", "selective_copying")
