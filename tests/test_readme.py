"""The pages say what is so: their tables come from the committed rows, and what they point at is there."""

import json
import re
import shutil

import pytest

from data import TASKS
from experiments.measurements import features, pods
from experiments.measurements.scaling import ALONE
from experiments.tables import formats, overview, rows, scaling, zoo
from experiments.tables.definitions import TABLES
from experiments.tables.layout import sheet
from experiments.tables.table import choose_scale, layout
from tests.pages import PAGES, between
from tests.processes import ROOT

RESULTS = ROOT / "experiments" / "results"


def test_the_table_of_the_quickstart_is_of_committed_rows():
    """If this fails after new rows, paste `experiments/results/quickstart/table.md` between the README's marks."""
    table = TABLES["quickstart"]
    committed = rows.read_rows(RESULTS / "quickstart" / "rows.jsonl")
    made = formats.markdown(sheet(committed, layout(table, choose_scale(table, None))))
    assert between("table: quickstart", "README.md") == made
    assert (RESULTS / "quickstart" / "table.md").read_text() == made


def test_committed_tables_are_those_of_their_rows():
    """All but the title, which may say what the runs were given."""
    folders = [path.parent for path in RESULTS.glob("*/rows.jsonl")]
    named = [folder for folder in folders if folder.name in TABLES]
    assert len(named) >= 4
    for folder in named:
        table = TABLES[folder.name]
        made = formats.markdown(sheet(rows.read_rows(folder / "rows.jsonl"), layout(table, choose_scale(table, None))))
        assert (folder / "table.md").read_text().splitlines()[1:] == made.splitlines()[1:]


def test_tables_of_benches_are_those_of_their_rows():
    """If this fails after new rows, paste the first table of `bench_features.md` between model/README.md's marks."""
    for name, table in {"features": features.table, "pods": pods.table, "scaling": scaling.table}.items():
        file = RESULTS / f"bench_{name}.jsonl"
        if file.exists():
            measured = [json.loads(line) for line in file.read_text().splitlines()]
            assert file.with_suffix(".md").read_text() == table(measured)
    measured = [json.loads(line) for line in (RESULTS / "bench_features.jsonl").read_text().splitlines()]
    assert between("bench: features", "model/README.md").strip() == features.part(measured, "output_error").strip()


def test_the_overview_is_of_the_committed_tables():
    """If this fails after new rows, paste what `python -m experiments.overview` prints between the README's marks."""
    assert between("overview", "README.md") == overview.overview(RESULTS)


def test_the_mixers_are_those_of_the_zoo():
    """If this fails, paste what `python -m experiments.overview --mixers` prints between model/README.md's marks."""
    assert between("mixers", "model/README.md") == zoo.zoo(RESULTS)


@pytest.mark.parametrize("name", sorted(ALONE))
def test_a_mixer_has_a_line_and_a_paper(name):
    """Classics and what is spelt out need none."""
    cells = zoo.line(name, ALONE[name])
    assert len(cells) == 7 and all(cells[:5])
    assert ("arxiv.org" in cells[0]) == (name not in {"rnn", "lstm", "gru", "block_sparse"})
    assert "arxiv" not in cells[1].lower()


def test_what_pages_point_at_is_there():
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", re.sub(r"\s+", " ", text)):
            path, _, part = target.partition("#")
            assert (page.parent / path).exists(), (page, target)
            assert not part or f"\n## {part.capitalize()}\n" in (page.parent / path).read_text(), (page, target)


def test_the_page_on_data_names_every_task():
    said = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "data" / "README.md").read_text()))
    assert {name for name in TASKS if not name.startswith("mad_") and name != "noise"} <= said


def test_an_overview_leaves_blank_what_was_not_run(tmp_path):
    shutil.copytree(RESULTS / "selective_copying", tmp_path / "selective_copying")
    header, _, *lines = (line.split(" | ") for line in overview.overview(tmp_path).splitlines())
    whole = overview.overview(RESULTS)
    assert " | ".join(header) == whole.splitlines()[0]
    for arch, copying, *others in lines:
        assert f"{arch} | {copying} | " in whole and copying and not "".join(others).strip(" |")


def test_the_quickstart_shows_the_known_truth():
    committed = rows.read_rows(RESULTS / "quickstart" / "rows.jsonl")

    def accuracy(arch, task):
        mine = [r for r in committed if r["labels"]["arch"] == arch and r["labels"]["task"] == task]
        assert len(mine) >= 2
        return sum(r["metrics"]["test/accuracy"] for r in mine) / len(mine)

    for arch in ("attention", "mamba"):
        assert accuracy(arch, "mqar") >= 0.99 and accuracy(arch, "induction") >= 0.99
    assert accuracy("mamba", "selective_copying") > 0.98 > 0.9 > accuracy("s4d", "selective_copying")
