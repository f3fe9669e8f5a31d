"""Tables are fair, and say what they rest on: the chosen settings, the failures at others, the targets, the code."""

import csv
import inspect
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

import data
from configs import enwik8
from data import TASKS
from data.stored import Stored
from data.text import Text
from experiments.running import campaign, folders
from experiments.running.runs import RunSpec
from experiments.tables import formats, rows, sources, table
from experiments.tables.definitions import TABLES
from experiments.tables.layout import Layout, sheet
from model.errors import UserError
from tests.processes import call
from tests.test_report import row
from train import config as configs

TEXTS = {enwik8.ENWIK8: 90e6}  # bytes to train on
ROOT = Path(__file__).parent.parent
TUNED = Layout("test/accuracy", ("arch",), "task", tuned=("optim.lr",))


def at_rates(arch: str, scores: dict[float, tuple], task: str = "t") -> list[dict]:
    """A row for each rate and seed with this validation score, and the complement of it on the test split."""
    made = [
        row({"arch": arch, "task": task, "optim.lr": lr}, seed, score)
        for lr, found in scores.items()
        for seed, score in enumerate(found)
    ]
    for r in made:
        if r["metrics"]:
            r["metrics"]["test/accuracy"] = 1 - r["metrics"]["validation/accuracy"]
    return made


@pytest.mark.quick
def test_a_tuned_cell_shows_its_setting_and_counts_the_failures_at_others():
    made = at_rates("a", {0.1: (0.5, 0.5), 0.2: (0.7, 0.7), 0.3: (None, 0.9)})
    made += at_rates("b", {0.1: (0.6, None), 0.2: (None, None), 0.3: (None, None)})
    made += at_rates("b", {0.1: (0.2, 0.2), 0.2: (0.3, None), 0.3: (0.1, 0.1)}, "u")
    shown = formats.arrange(sheet(made, TUNED))
    assert shown.header[:5] == ["arch", "t", "u", "failed seeds", "failed at other lr"]
    # The third rate validates best on its one seed, and the lowest rate of each line tests best.
    assert [line[:5] for line in shown.body[:2]] == [
        ["a", "30.0 ± 0.0 (lr 0.2)", "", "0 of 2", "1 of 4"],
        ["b", "40.0 (lr 0.1, 1 failed)", "80.0 ± 0.0 (lr 0.1)", "1 of 4", "5 of 8"],
    ]
    assert {len(line) for line in shown.body} == {len(shown.header)}
    assert "lr chosen on the validation split among 3 settings a cell." in shown.notes[0]
    lines = list(csv.DictReader(io.StringIO(formats.comma_separated(sheet(made, TUNED)))))
    assert [(line["optim.lr"], line["others"], line["others_failed"]) for line in lines] == [
        ("0.2", "4", "1"),
        ("0.1", "4", "4"),
        ("0.1", "4", "1"),
    ]


@pytest.mark.quick
def test_a_table_says_that_budgets_differ():
    made = at_rates("a", {0.1: (0.5,), 0.2: (0.7,), 0.3: (0.6,)}) + at_rates("b", {0.1: (0.5,)})
    (note,) = formats.arrange(sheet(made, TUNED)).notes
    assert "among 1 to 3 settings a cell, so tuning was not equal." in note


@pytest.mark.quick
def test_a_table_says_of_how_many_settings_only_some_were_run():
    lra = table.layout(TABLES["lra"], "small")
    assert (lra.tuned, lra.settings) == (("lr",), 2)
    for tried, told in (
        ({0.1: (0.5,)}, "among 1 setting a cell of 2 that the table defines."),
        ({0.1: (0.5,), 0.2: (0.7,)}, "among 2 settings a cell."),
    ):
        (note,) = formats.arrange(sheet(at_rates("a", tried), replace(TUNED, settings=lra.settings))).notes
        assert told in note
    unequal = at_rates("a", {0.1: (0.5,), 0.2: (0.7,)}) + at_rates("b", {0.1: (0.5,)})
    (note,) = formats.arrange(sheet(unequal, replace(TUNED, settings=3))).notes
    assert "among 1 to 2 settings a cell of 3 that the table defines, so tuning was not equal." in note


@pytest.mark.quick
def test_nothing_is_chosen_without_a_validation_score():
    made = at_rates("a", {0.1: (0.5,), 0.2: (0.7,)})
    for r in made:
        del r["metrics"]["validation/accuracy"]
    with pytest.raises(UserError, match=r"no row has validation/accuracy, by which optim\.lr is chosen"):
        sheet(made, TUNED)


def counted(labels: dict, seed: int, n: int) -> dict:
    return row(labels, seed, 0.5, targets={"test/accuracy": n, "test/loss": 1}, test_at="best")


@pytest.mark.quick
def test_a_table_says_how_many_targets_a_score_rests_on():
    layout = Layout("test/accuracy", ("arch",), "task")
    made = [counted({"arch": arch, "task": "t"}, seed, 1024) for arch in "ab" for seed in (0, 1)]

    def said(rows) -> str:
        return formats.arrange(sheet(rows, layout)).notes[0]

    assert "A seed's score rests on 1,024 targets." in said(made)
    assert "Tested at the step that validation chose." in said(made)
    more = [counted({"arch": "a", "task": "u"}, seed, n) for seed, n in ((0, 96), (1, 128))]
    assert "A seed's score rests on 1,024 (t), 96–128 (u) targets." in said(made + more)
    assert "rests on 1,024 (t) targets" in said([*made, row({"arch": "a", "task": "u"}, 0, 0.5)])
    assert "rests" not in said([row({"arch": "a", "task": "t"}, 0, 0.5), *made])  # one run of the column did not count
    lines = csv.DictReader(io.StringIO(formats.comma_separated(sheet(made + more, layout))))
    assert [line["targets"] for line in lines] == ["1024", "96", "1024"]


@pytest.mark.quick
def test_targets_go_with_the_length_they_were_counted_at():
    lengths = {"test/length_8/accuracy": 0.5, "test/length_16/accuracy": 0.25}
    one = row({"arch": "a"}, 0, 0.5) | {"metrics": lengths}
    one["targets"] = {"test/accuracy": 3, "test/length_8/accuracy": 40, "test/length_16/accuracy": 80}
    (note,) = formats.arrange(sheet([one], Layout("test/accuracy", ("arch",), "length"))).notes
    assert "rests on 40 (length 8), 80 (length 16) targets" in note


@pytest.mark.quick
@pytest.mark.parametrize("name", ["lra", "lra_medium"])
def test_what_is_said_of_published_numbers_of_a_column_stands_below_those(name):
    shown, small = (table.layout(TABLES[name], scale) for scale in ("smoke", "small"))
    (said,) = small.remarks.values()
    for layout, task, arch, stands in (
        (small, "text", "s4d", True),
        (small, "text", "mlstm", False),  # of which nothing is published
        (small, "pathfinder", "s4d", False),
        (shown, "text", "s4d", False),
    ):
        made = sheet([row({"arch": arch, "task": task}, 0, 0.5)], replace(layout, tuned=()))
        assert (said in formats.arrange(made).notes) == stands


# What stands beside each other


def made_by(revision: str, seed: int = 0, data: str = "d", **more) -> dict:
    return row({"arch": revision}, seed, 0.5, revision=revision, data_fingerprint=data, task="mqar", **more)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("made", "told"),
    [
        ([made_by("one"), made_by("two")], "2 revisions of the code: one (1 run), two (1 run)"),
        ([made_by("one"), made_by("one", 1, revisions=["zero", "one"])], "one (1 run), zero then one (1 run)"),
        ([made_by("one", test_at="best"), made_by("one", 1, test_at="last")], "best (1 run), last (1 run)"),
        (
            [made_by("one"), made_by("one", 1, test_at="best")],
            "last (1 run), best (1 run)",
        ),  # before there was a choice
    ],
)
def test_revisions_and_tests_are_not_mixed(made, told):
    assert sources.mixture(made[:1]) == ()
    assert told in "; ".join(sources.mixture(made))
    with pytest.raises(UserError, match=re.escape(told) + ".*needs --mixed"):
        sources.refuse_mixture(sources.mixture(made))
    assert (
        f"Mixed: {sources.mixture(made)[0]}." in formats.arrange(sheet(made, Layout("test/accuracy", ("arch",)))).notes
    )


@pytest.mark.quick
def test_data_may_differ_only_where_other_data_was_asked_for():
    asked = [{"length": 8, "pairs": 2}, {"length": 8, "pairs": 4}]
    made = [made_by("one", data=str(i)) | {"data": setting} for i, setting in enumerate(asked)]
    assert sources.mixture(made) == ()
    assert sources.mixture([made_by("one", length=8), made_by("one", 1, "e", length=16)]) == ()
    (told,) = sources.mixture([made_by("one", length=8), made_by("one", 1, "e", length=8)])
    assert told == "2 makes of the data of mqar: d (1 run), e (1 run)"
    (told,) = sources.mixture([*made, made[0] | {"run": "other", "data_fingerprint": "2"}])
    assert told == "2 makes of the data of mqar: 0 (1 run), 2 (1 run)"


def test_report_and_reproduce_refuse_a_mixture_unless_asked(tmp_path):
    rows.write(tmp_path / "rows.jsonl", [made_by("one"), made_by("two")])
    report = ("experiments.report", f"--rows={tmp_path / 'rows.jsonl'}", "--by=arch", f"--out={tmp_path / 'out'}")
    code, printed, told = call(*report)
    assert (code, printed, told.count("\n")) == (2, "", 1) and "one (1 run), two (1 run)" in told
    assert not (tmp_path / "out").exists()
    code, printed, _ = call(*report, "--mixed")
    assert code == 0 and "Mixed: 2 revisions of the code" in printed

    planned = campaign.plan(TABLES["quickstart"].runs("smoke"), tmp_path)
    for i, (name, item) in enumerate(planned.items()):
        folders.claim(tmp_path / name, item.run, item.config_hash)
        made = row(dict(item.run.labels), item.run.overrides["seed"], 0.5, revision=f"r{i % 2}")
        folders.write_json(tmp_path / name / "result.json", made | {"config_hash": item.config_hash})
    reproduce = ("experiments.reproduce", "quickstart", "--scale=smoke", f"--out={tmp_path}")
    code, _, told = call(*reproduce)
    assert code == 2 and told.count("\n") == 1 and "r0 (15 runs), r1 (15 runs)" in told
    code, printed, _ = call(*reproduce, "--mixed")
    assert code == 0 and "Mixed: 2 revisions of the code" in printed
    # Before anything is trained where something is left to do.
    (tmp_path / next(iter(planned)) / "result.json").unlink()
    code, printed, told = call(*reproduce)
    assert (code, printed) == (2, "") and "has runs of revision r0, r1, and the code is now " in told


# What tables ask for


@pytest.mark.quick
def test_a_grid_is_the_same_for_all():
    runs = [RunSpec("c.py", {"seed": seed}, {"arch": arch}) for arch in "ab" for seed in (0, 1)]
    made = table.over_grid(runs, {"optim.lr": (0.1, 0.2), "optim.weight_decay": (0, 1, 2)})
    assert table.over_grid([RunSpec("c.py", {"lr": 9}, {})], {"lr": (1,)}) == [RunSpec("c.py", {"lr": 1}, {"lr": 1})]
    assert len(made) == 4 * 6 and len({str(run) for run in made}) == 24
    assert made[0] == RunSpec(
        "c.py", {"seed": 0, "optim.lr": 0.1, "optim.weight_decay": 0}, {"arch": "a", "lr": 0.1, "weight_decay": 0}
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_published_setting_or_says_why_not(name):
    asked = TABLES[name]
    assert ("paper" in asked.scales) != bool(asked.unpublished)
    if asked.unpublished:
        with pytest.raises(UserError, match=re.escape(f"no scale 'paper' ({asked.unpublished}); choose from small")):
            table.choose_scale(asked, "paper")


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_a_table_has_the_same_budget(name):
    """As many seeds, the same settings to choose from, and the same order of the same data."""
    asked = TABLES[name]
    for scale in asked.scales:
        budgets: dict[tuple, set] = {}
        for run in asked.runs(scale):
            place = tuple(run.labels.get(key) for key in (*asked.by, asked.across))
            tried = tuple((key, run.labels.get(key)) for key in asked.tuned)
            budgets.setdefault(place, set()).add((tried, run.overrides.get("seed")))
        assert len(set(map(frozenset, budgets.values()))) == 1, scale


@pytest.mark.parametrize("name", TABLES)
def test_the_lines_of_a_column_train_alike(name, tmp_path):
    """Among those that are trained, those that go on from another run, and those that are only asked."""
    asked = TABLES[name]
    trained: dict[tuple, set] = {}
    for run in asked.runs("smoke"):
        c = configs.load(run.config, [(key, str(value)) for key, value in run.overrides.items()])
        data = str(sorted(c.data[c.data.task].to_dict().items()))
        column = (run.labels.get(asked.across), c.data.task, data, run.source is None, c.optim.lr > 0)
        trained.setdefault(column, set()).add((c.steps, c.batch_size, c.data.seed, c.eval_batches, c.test_at))
    assert all(len(found) == 1 for found in trained.values())


@pytest.mark.parametrize("name", TABLES)
def test_what_learns_rows_again_and_again_is_tested_where_validation_chose(name):
    """A test score at the last step is of a model that has met few rows twice."""
    asked = TABLES[name]
    for scale in {"small", "paper"} & {*asked.scales}:
        runs = {re.sub(r"arch=\w+", "", run.config): run for run in asked.runs(scale) if run.program == "train"}
        shown = [run for run in runs.values() if {*asked.by, asked.across} - {None} <= {*run.labels, "length"}]
        for run in shown:
            c = configs.load(run.config, [(key, str(value)) for key, value in run.overrides.items()])
            assert c.test_at == "best" or not c.eval_every or epochs(c) < 1.5, (scale, run)


def epochs(c) -> float:
    """How often a run's training meets a row, at least; sets that are not here are met again and again."""
    kind, section = TASKS[c.data.task], c.data.get(c.data.task, {})
    if kind is Text:  # its last tenth is not trained on
        return c.steps * c.batch_size * section.length / TEXTS.get(section.path, 1)
    if issubclass(kind, Stored) and section.get("source", "released") == "released":
        return float("inf")
    n = data.build(c.data.task, section.to_dict() if section else {}).sizes()["train"]
    return c.steps * c.batch_size / n if n else 0.0


def test_the_page_on_tables_states_the_rules_of_the_code():
    rules = inspect.getdoc(table).partition("\n- ")[2]
    assert rules.count("\n- ") == 5
    assert f"- {rules}" in (ROOT / "experiments" / "README.md").read_text()
