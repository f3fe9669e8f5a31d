"""From rows to tables: nothing averaged that should not be, nothing dropped, nothing misprinted."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from experiments.running import folders
from experiments.running.runs import RunSpec
from experiments.tables import formats, plot, rows
from experiments.tables.layout import Layout, Published, sheet
from experiments.tables.publish import publish
from model.errors import UserError

ROOT = Path(__file__).parent.parent
DEBUG = "configs/debug.py"


def row(labels: dict, seed: int, accuracy: float | None, status: str = "finished", **more) -> dict:
    """A row with these scores on both splits; None: the run failed."""
    name = ",".join([*(f"{k}={v}" for k, v in labels.items()), f"seed={seed}"])
    if accuracy is None:
        return {"status": "failed", "error": "x", "metrics": {}, "labels": labels, "seed": seed, "run": name}
    metrics = {"test/accuracy": accuracy, "validation/accuracy": accuracy, "test/loss": 1 - accuracy}
    made = {"status": status, "labels": labels, "seed": seed, "run": name, "metrics": metrics, "params": 1200}
    return made | {"state_bytes": 64, "steps_per_s": 10.0, "baselines": {"chance": 0.1}, "device": "cpu"} | more


@pytest.mark.quick
def test_summary_is_mean_and_sample_deviation_over_the_seeds_that_count():
    seeds = [
        row({}, 0, 0.2),
        row({}, 1, 0.4),
        row({}, 2, 0.9),
        row({}, 3, None),
        row({}, 4, 0.8, "nonfinite"),
    ]
    seeds.append(row({}, 5, float("nan")))
    found = rows.summarise(seeds, "test/accuracy")
    # Mean of .2 .4 .9 is .5; squared distances .09 + .01 + .16 = .26, over n - 1 = 2.
    assert found.mean == pytest.approx(0.5)
    assert found.spread == pytest.approx(0.13**0.5)
    assert (found.n, found.failed) == (3, 3)
    assert rows.summarise(seeds[:1], "test/accuracy").spread is None
    assert rows.summarise(seeds[3:], "test/accuracy") == rows.Summary(None, None, 0, 3)


@pytest.mark.quick
def test_rows_are_written_the_same_way_in_any_order(tmp_path):
    made = [row({"b": 2, "a": 1}, 1, 0.5), row({"b": 2, "a": 1}, 0, 0.25)]
    rows.write(tmp_path / "x" / "rows.jsonl", made)
    rows.write(tmp_path / "rows.jsonl", [dict(reversed(r.items())) for r in reversed(made)])
    text = (tmp_path / "rows.jsonl").read_text()
    assert text == (tmp_path / "x" / "rows.jsonl").read_text()
    assert [line["seed"] for line in map(json.loads, text.splitlines())] == [0, 1]
    assert rows.read_rows(tmp_path / "rows.jsonl") == [made[1], made[0]]


def test_collect_misses_no_run(tmp_path):
    for name in ("ok", "crashed", "waiting"):
        folders.claim(tmp_path / name, RunSpec(DEBUG, {"seed": 3}, {"name": name}), "abc")
    result = {"status": "finished", "seed": 3, "metrics": {"m": 1}, "config_hash": "abc"}
    folders.write_json(tmp_path / "ok" / "result.json", result)
    folders.write_json(tmp_path / "crashed" / "failed.json", {"code": 1, "error": "it broke"})
    found = rows.collect(tmp_path)
    assert [(r["run"], r["status"], r["seed"], r["labels"]["name"]) for r in found] == [
        ("crashed", "failed", 3, "crashed"),
        ("ok", "finished", 3, "ok"),
        ("waiting", "missing", 3, "waiting"),
    ]
    assert rows.summarise(found, "m") == rows.Summary(1, None, 1, 2)


@pytest.mark.quick
@pytest.mark.parametrize(
    "odd",
    [
        {"metrics": {"test/accuracy": "high"}},
        {"metrics": {"test/accuracy": [1]}},
        {"labels": {"arch": {"name": "mamba"}}},
        {"seed": []},
        {"params": "many"},
        {"length": {}},
        {"baselines": {"chance": "low"}},
        {"length_baselines": {"64": 0.5}},
        {"length_baselines": {"64": {"chance": "low"}}},
        {"targets": 5},
        {"untested": {"long": "out of memory"}},
        {"changes": [5]},
        {"changes": [{"step": 1, "key": None, "old": 1, "new": 2}]},
        {"data_fingerprint": []},
        {"data": []},
        {"revisions": 5},
    ],
    ids=str,
)
def test_a_row_that_no_table_can_hold_is_told_where_it_is_read(odd, tmp_path):
    made = row({"arch": "mamba"}, 0, 0.5) | odd
    (tmp_path / "rows.jsonl").write_text(json.dumps(made))
    with pytest.raises(UserError, match=f"of row 1, .*{next(iter(odd))}"):
        rows.read_rows(tmp_path / "rows.jsonl")
    if "labels" not in odd:  # of them a sweep keeps its own note
        folders.claim(tmp_path / "a", RunSpec(DEBUG, {}, {}), "abc")
        folders.write_json(tmp_path / "a" / "result.json", made)
        with pytest.raises(UserError, match=f"a/result.json is damaged: .*{next(iter(odd))}"):
            rows.collect(tmp_path)


@pytest.mark.quick
def test_a_row_without_its_seed_is_none(tmp_path):
    made = row({}, 0, 0.5)
    del made["seed"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(made))
    with pytest.raises(UserError, match="of row 1, what it must have is run, status, labels, metrics, seed"):
        rows.read_rows(tmp_path / "rows.jsonl")


AWKWARD = "m_1 & 50% | {x}"  # every character that some format takes for its own


@pytest.fixture
def table():
    made = [row({"arch": AWKWARD, "task": "t1"}, seed, score) for seed, score in enumerate([0.2, 0.4, None])]
    made += [row({"arch": AWKWARD, "task": "t2"}, seed, None) for seed in range(2)]
    made += [row({"arch": "plain", "task": "t1"}, 0, 1.0, params=3400)]
    published = {("plain", "t1"): Published(0.998, "Someone 2020, Table 1")}
    return sheet(made, Layout("test/accuracy", ("arch",), "task", order={"arch": ["plain"]}, published=published))


@pytest.mark.quick
def test_the_arrangement_has_everything(table):
    shown = formats.arrange(table)
    head = ["arch", "t1", "published", "t2", "failed seeds", "params", "state bytes", "steps/s"]
    assert shown.header == head
    assert shown.body == [
        ["plain", "100.0", "99.8 [1]", "", "0 of 1", "3,400", "64", "10"],
        [AWKWARD, "30.0 ± 14.1 (1 failed)", "", "failed", "3 of 5", "1,200", "64", "10"],
        ["chance", "10.0", "", "", "", "", "", ""],
    ]
    assert shown.notes[-1] == "[1] Someone 2020, Table 1"


@pytest.mark.quick
def test_markdown_has_as_many_cells_in_every_line(table):
    lines = [line for line in formats.markdown(table).splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}


@pytest.mark.quick
def test_csv_reads_back_to_the_numbers(table):
    lines = list(csv.DictReader(io.StringIO(formats.comma_separated(table))))
    assert [(line["arch"], line["task"]) for line in lines] == [
        ("plain", "t1"),
        (AWKWARD, "t1"),
        (AWKWARD, "t2"),
    ]
    plain, awkward, failed = lines
    assert (float(plain["mean"]), float(plain["published"]), plain["source"]) == (
        1.0,
        0.998,
        "Someone 2020, Table 1",
    )
    assert float(awkward["mean"]) == pytest.approx(0.3)
    assert float(awkward["spread"]) == pytest.approx(0.02**0.5)
    assert (awkward["seeds"], awkward["failed"], awkward["chance"]) == ("2", "1", "0.1")
    assert (failed["mean"], failed["seeds"], failed["failed"]) == ("", "0", "2")


@pytest.mark.quick
def test_latex_is_escaped_and_aligned(table):
    text = formats.latex(table)
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {7}
    assert r"m\_1 \& 50\% | \{x\} & 30.0 $\pm$ 14.1 (1 failed)" in text
    assert r"\begin{tabular}{lrrrrrrr}" in text
    bare = re.sub(r"\\[&%$#_{}]", "", body)
    assert not re.search(r"[%#_~^]", bare)
    assert formats.escape_latex("\\~^<>") == (
        r"\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}"
    )


@pytest.mark.quick
def test_the_terminal_gets_tables_it_can_show(table):
    for width in (60, 300):
        console = Console(width=width, file=io.StringIO())
        console.print(formats.terminal(table, width))
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert all(" ".join(cell.split()) in text for cells in formats.arrange(table).body for cell in cells)


def test_files_and_picture_are_the_same_for_the_same_rows(table, tmp_path):
    first, second = publish(table, tmp_path / "a"), publish(table, tmp_path / "b")
    assert [path.name for path in first] == ["table.md", "table.csv", "table.tex", "plot.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[-1].read_bytes().startswith(b"\x89PNG")
    widths = [row({"model.width": width}, seed, width / 200) for width in (16, 64, 128) for seed in (0, 1)]
    assert publish(sheet(widths, Layout("test/accuracy", ("model.width",))), tmp_path / "c")[-1].stat().st_size > 5000


@pytest.mark.quick
def test_a_run_that_was_changed_on_the_way_is_marked():
    longer = [{"step": 20, "key": "steps", "old": 20, "new": 40}, {"step": 20, "key": "mesh.fsdp", "old": 1, "new": 2}]
    made = [row({"arch": "a"}, 0, 0.5, changes=longer), row({"arch": "a"}, 1, 0.5, changes=longer[1:])]
    marked = sheet(made, Layout("test/accuracy", ("arch",)))
    shown = formats.arrange(marked)
    assert shown.body[0][1] == "50.0 ± 0.0 (1 changed)"
    assert "Changed on the way: arch=a,seed=0: steps 20 -> 40 at step 20" in shown.notes
    assert next(csv.DictReader(io.StringIO(formats.comma_separated(marked))))["changed"] == "1"


@pytest.mark.quick
def test_only_seeds_are_averaged():
    mixed = [row({"arch": "a", "optim.lr": lr}, 0, lr) for lr in (0.1, 0.2)]
    with pytest.raises(UserError, match=r"differ in optim\.lr"):
        sheet(mixed, Layout("test/accuracy", ("arch",)))
    for bad, told in (("model", "unknown label 'model'"), ("arhc", "closest: arch")):
        with pytest.raises(UserError, match=told):
            sheet(mixed, Layout("test/accuracy", (bad,)))
    with pytest.raises(UserError, match="unknown metric"):
        sheet(mixed, Layout("test/acuracy", ("arch", "optim.lr")))


@pytest.mark.quick
def test_seeds_on_different_data_are_not_averaged():
    made = [row({"arch": "a"}, seed, 0.5, data_fingerprint=f"f{seed}") for seed in (0, 1)]
    with pytest.raises(UserError, match="different data"):
        sheet(made, Layout("test/accuracy", ("arch",)))


@pytest.mark.quick
def test_tuning_looks_at_validation_and_never_at_test():
    made = [row({"arch": "a", "optim.lr": lr}, seed, 0.5) for lr in (1, 2, 3) for seed in (0, 1)]
    for r in made:
        lr = r["labels"]["optim.lr"]
        # The third rate validates best but loses a seed; the first is best on test only.
        r["metrics"] |= {"validation/accuracy": lr / 10, "test/accuracy": 1 - lr / 10}
    made[-1] = row({"arch": "a", "optim.lr": 3}, 1, None)
    (cells,) = sheet(made, Layout("test/accuracy", ("arch",), tuned=("optim.lr",))).lines.values()
    assert cells[0].summary.mean == pytest.approx(0.8)
    lowest = rows.best([row({"lr": lr}, 0, lr, **{"status": "finished"}) for lr in (0.1, 0.2)], ["lr"], "test/loss")
    assert len(lowest) == 1


def test_accuracy_is_drawn_against_a_cost_where_the_layout_says_so(monkeypatch, tmp_path):
    """Each width stands where its bytes of state are; a run that failed has no cost and no point."""
    made = [
        row({"arch": arch, "width": width}, 0, accuracy, state_bytes=bytes_ * width)
        for arch, bytes_ in (("attention", 1000), ("mamba", 10))
        for width, accuracy in ((32, 0.5), (64, 0.75))
    ]
    made.append(row({"arch": "mamba", "width": 128}, 0, None))
    kept = []
    monkeypatch.setattr(plot.plt, "close", kept.append)
    layout = Layout("test/accuracy", ("arch", "width"), against="state_bytes")
    plot.plot(sheet(made, layout), tmp_path / "plot.png")
    axis = kept[0].axes[0]
    drawn = [line for line in axis.lines if line.get_marker() in plot.MARKERS]
    assert [list(line.get_xdata()) for line in drawn] == [[32_000, 64_000], [320, 640]]
    assert axis.get_xlabel() == "state bytes" and axis.get_xscale() == "log"
