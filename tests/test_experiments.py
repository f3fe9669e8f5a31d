"""Whole commands: sweeps survive what befalls them, and tables say what the rows say."""

import os
import signal
import subprocess
import sys

import pytest

from experiments import list as listed
from experiments.running import campaign, folders
from experiments.running.expand import expand
from experiments.tables import formats, rows
from experiments.tables.definitions import TABLES
from experiments.tables.layout import sheet
from experiments.tables.table import choose_scale, layout
from model.errors import UserError
from tests.processes import ROOT, call, fork, wait_until
from tests.test_report import row
from train import config as configs

DEBUG = "configs/debug.py"


def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    odd = (f"--config={DEBUG}:arch=attention", "--config.model.width=48", "--grid=model.attention.n_heads=2,16")
    out = f"--out={tmp_path / 'out'}"
    cases = {
        ("experiments.sweep", f"--config={DEBUG}", out, "--grid=optim.lrr=1,2"): "closest: optim.lr",
        ("experiments.sweep", f"--config={DEBUG}", out, "--grids=optim.lr=1"): "closest: --grid",
        ("experiments.sweep", *odd, out): "run n_heads=16,seed=0: rope rotates pairs",
        ("experiments.sweep", *odd, out, "--launcher=print"): "run n_heads=16,seed=0: rope rotates pairs",
        ("experiments.reproduce", "quickstrat"): "closest: quickstart",
        ("experiments.reproduce", "lra", "--config.optim.lr=1", out): "table lra varies optim.lr itself (0.001, 0.004)",
        (
            "experiments.reproduce",
            "lra",
            "--only=lr=0.001",
            "--config.optim.lr=0.005",
            out,
        ): "closest: --config.optim.lr=0.001",
        (
            "experiments.reproduce",
            "recall",
            "--scale=smoke",
            "--config.model.width=32",
            out,
        ): "model.width itself (16, 32)",
        ("experiments.report", f"--dir={tmp_path / 'empty'}"): "no rows to report on",
        ("experiments.bench", "lop"): "closest: loop",
        ("experiments.bench", "features", "--kills=2"): "features does not read --kills; allowed: --out",
        ("experiments.bench", "features", f"{out}/x.md"): "x.md is for rows, and .md for what is made of them; closest",
        ("experiments.bench", "scaling", f"{out}/x.png"): "out/x.jsonl",
        ("experiments.bench", "features", f"--out={tmp_path / 'pipe'}"): "is a device or a pipe",
        ("experiments.list", "mambo"): "unknown name 'mambo'; choose from",
    }
    for case in cases:
        code, printed, told = call(*case)
        assert (code, printed) == (2, ""), told
        assert told.count("\n") == 1, told
        assert cases[case] in told
    assert not (tmp_path / "out").exists()


@pytest.mark.quick
def test_more_mistakes(tmp_path):
    with pytest.raises(UserError, match="closest: smoke"):
        choose_scale(TABLES["quickstart"], "smok")
    with pytest.raises(UserError, match="closest: local"):
        campaign.carry_out({}, tmp_path, launcher="lokal")
    with pytest.raises(UserError, match="--jobs=0"):
        campaign.carry_out({}, tmp_path, slots=0)
    with pytest.raises(UserError, match="no rows at"):
        rows.read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("not json\n")
    with pytest.raises(UserError, match="not a file of rows"):
        rows.read_rows(tmp_path / "rows.jsonl")


def test_print_shows_commands_that_a_shell_takes_anywhere_and_makes_nothing(tmp_path):
    out = tmp_path / "sweep"
    code, printed, _ = call(
        "experiments.sweep", f"--config={DEBUG}:arch=mamba", "--grid=model.mixers=('mamba','attention'),s4d",
        "--config.steps=5", "--seeds=2", f"--out={out}", "--launcher=print",
    )  # fmt: skip
    assert code == 0
    lines = printed.splitlines()
    assert len(lines) == 4
    there, _, words = lines[0].partition(" && ")
    assert there == f"cd {ROOT}"
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {words}"], capture_output=True, text=True).stdout
    assert words.splitlines() == [
        sys.executable, "-m", "train", f"--config={DEBUG}:arch=mamba",
        f"--workdir={out}/mixers=mamba+attention,seed=0",
        "--config.steps=5", "--config.model.mixers=('mamba', 'attention')", "--config.seed=0",
    ]  # fmt: skip
    wrong = ["sh", "-c", f"{lines[0]} --config.stepz=1"]
    told = subprocess.run(wrong, cwd=tmp_path, capture_output=True, text=True, timeout=60).stderr
    assert told.startswith("error: unknown config key 'stepz'"), "it found the program, and the config file"
    assert not out.exists()


def test_print_leaves_out_what_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    planned = campaign.plan(expand(DEBUG, seeds=2), tmp_path)
    (tmp_path / "seed=0").mkdir()
    (tmp_path / "seed=0" / "result.json").write_text("{}")
    (line,) = campaign.commands(planned, tmp_path)
    assert line.endswith(f"--workdir={tmp_path / 'seed=1'} --config.seed=1")


def test_list_prints_the_settings_of_what_is_named():
    code, printed, _ = call("experiments.list", "mamba", "rope", "mqar")
    assert code == 0
    assert "mixer mamba (model.mamba)" in printed and "architecture mamba (arch=mamba)" in printed
    assert "  state           16; a whole number from 1 to " in printed
    assert "  layout            'half'; half, interleaved\n" in printed and "task mqar (data.mqar)" in printed


def test_list_tells_what_a_table_compares():
    code, printed, _ = call("experiments.list", "lra", "positions")
    assert code == 0
    assert "table lra (experiments.reproduce lra)\n  asks         Long Range Arena" in printed
    runs = TABLES["lra"].runs("paper")
    steps = sum(configs.load(run.config).steps for run in runs)
    assert f"  scale paper  {len(runs)} runs of {steps:,} steps together; arch attention, " in printed
    assert "; task listops, text, retrieval, image, pathfinder, pathx; seed 0, 1\n" in printed
    assert "  takes along  positions_text\n" in printed


def test_what_list_shows_may_be_asked_for(monkeypatch):
    monkeypatch.setattr(listed, "compared", lambda table: {"asks": table.description})
    everything = listed.catalogue()
    monkeypatch.setattr(listed, "catalogue", lambda: everything)
    for section, shown in everything.items():
        for name in shown if not section.startswith("what each") else ():
            assert listed.described(name), section


def test_list_names_everything():
    code, printed, _ = call("experiments.list")
    assert code == 0
    found = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert {
        "attention",
        "mamba",
        "s4d",
        "rope",
        "alibi",
        "mqar",
        "induction",
        "hybrid",
        "quickstart",
        DEBUG,
    } <= set(found)
    assert "configs/base.py" not in found
    assert all(found.values()), "a line without a description"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(t, marks=pytest.mark.scale) if t == "mad" else t for t in TABLES])
def test_no_two_runs_of_a_table_are_the_same(name, tmp_path):
    for scale in TABLES[name].scales:
        runs = TABLES[name].runs(scale)
        assert campaign.repeats(runs, campaign.plan(runs, tmp_path)) == []
        # Lengths of testing are no label of a run; they stand by size.
        assert layout(TABLES[name], scale).order.keys() >= {*TABLES[name].by, TABLES[name].across} - {None, "length"}


@pytest.mark.parametrize(("scale", "tuned"), [("small", ("lr",)), ("smoke", ()), ("paper", ("lr",))])
def test_a_table_says_that_it_chose_where_there_was_a_choice(scale, tuned):
    assert layout(TABLES["recall"], scale).tuned == tuned


def test_reproduce_prints_the_table_with_its_failed_seeds(tmp_path):
    """Every run has its result already, so nothing is trained."""
    planned = campaign.plan(TABLES["quickstart"].runs("smoke"), tmp_path)
    assert len(planned) == 5 * 3 * 2
    for name, item in planned.items():
        run = item.run
        folders.claim(tmp_path / name, run, item.config_hash)
        diverged = run.labels["arch"] == "s4d" and run.overrides["seed"] == 1
        made = row(dict(run.labels), run.overrides["seed"], 0.75, "nonfinite" if diverged else "finished", steps=9)
        folders.write_json(tmp_path / name / "result.json", made | {"config_hash": item.config_hash})
    code, printed, _ = call("experiments.reproduce", "quickstart", "--scale=smoke", f"--out={tmp_path}")
    assert code == 0
    assert "30 runs: 0 done, 30 finished before" in printed
    assert printed.count("diverged:") == 3
    for line in ("75.0 ± 0.0", "75.0 (1 failed)", "3 of 6", "chance", "99.8 [", "plot.png"):
        assert line in printed
    names = [line.split("|")[1].strip() for line in (tmp_path / "table.md").read_text().splitlines() if "|" in line]
    assert names[2:] == ["attention", "mqa", "s4d", "mamba", "hybrid", "chance"]
    made = sheet(rows.read_rows(tmp_path / "rows.jsonl"), layout(TABLES["quickstart"], "smoke"))
    assert (tmp_path / "table.md").read_text() == formats.markdown(made)


TINY = (
    "--config.model.width=16",
    "--config.model.layers=1",
    "--config.eval_batches=1",
    "--config.eval_every=0",
)


@pytest.mark.scale
@pytest.mark.long
def test_a_sweep_of_real_runs_is_stopped_taken_up_and_finished(tmp_path):
    out = tmp_path / "sweep"
    # The second learning rate cannot but diverge, which is a result.
    command = (
        "experiments.sweep",
        f"--config={DEBUG}",
        "--grid=optim.lr=1e-3,1e30",
        "--config.steps=400",
        *TINY,
    )
    process = fork(*command, "--jobs=2", f"--out={out}")
    wait_until(lambda: folders.position(out / "lr=0.001,seed=0").get("step", 0) > 5)
    process.send(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "SIGTERM" in process.stdout
    stopped = folders.position(out / "lr=0.001,seed=0")["step"]
    assert stopped < 400
    assert rows.row_of(out / "lr=0.001,seed=0")["status"] == "missing"
    assert not folders.in_use(out / "lr=0.001,seed=0")

    code, printed, _ = call(*command, "--jobs=2", f"--out={out}")
    assert code == 0
    assert printed.count("diverged:") == 1
    log = (out / "lr=0.001,seed=0" / "log.txt").read_text()
    assert f"resumed at step {stopped}" in log
    made = rows.read_rows(out / "rows.jsonl")
    assert [(r["labels"]["optim.lr"], r["status"]) for r in made] == [
        (0.001, "finished"),
        (1e30, "nonfinite"),
    ]
    assert made[0]["steps"] == 400
    assert rows.summarise(made, "test/accuracy").failed == 1

    code, printed, _ = call(*command, f"--out={out}")
    assert code == 0
    assert "2 runs: 0 done, 2 finished before" in printed
