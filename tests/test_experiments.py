"""Sweeps expand to what was written, survive what befalls them, and tables say what the rows say."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import list as listed
from experiments.measurements import startup
from experiments.running import campaign, folders
from experiments.running.expand import expand, pick, split
from experiments.running.runs import RunSpec, names, read_value, short_keys, with_argument
from experiments.tables import formats, rows
from experiments.tables.definitions import TABLES
from experiments.tables.layout import sheet
from experiments.tables.table import choose_scale, layout
from model.errors import UserError
from tests.processes import ROOT, fork
from tests.test_report import row
from train import config as configs

DEBUG = "configs/debug.py"


def call(*words: str) -> tuple[int, str, str]:
    process = fork(*words)
    return process.wait(300), process.stdout, process.stderr


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# From notation to runs


@pytest.mark.quick
def test_expansion_multiplies():
    runs = expand(
        DEBUG,
        grids=["optim.lr=1e-3,3e-3", "model.width=32,64,128"],
        zips=["optim.b1=0.8,0.9;optim.b2=0.95,0.98"],
        lists=["steps=10,batch_size=8;steps=20"],
        seeds=3,
    )
    assert len(runs) == 2 * 3 * 2 * 2 * 3
    assert len(set(names(runs))) == len(runs)
    assert {(run.overrides["optim.b1"], run.overrides["optim.b2"]) for run in runs} == {
        (0.8, 0.95),
        (0.9, 0.98),
    }
    assert {(run.overrides["steps"], run.overrides.get("batch_size")) for run in runs} == {
        (10, 8),
        (20, None),
    }
    assert {run.overrides["seed"] for run in runs} == {0, 1, 2}
    assert not any("seed" in run.labels for run in runs)


@pytest.mark.quick
def test_keys_with_a_colon_are_the_config_files_arguments():
    runs = expand(f"{DEBUG}:arch=s4d", grids=[":arch=mamba,mqa"], common={"steps": 5})
    assert [run.config for run in runs] == [f"{DEBUG}:arch=mamba", f"{DEBUG}:arch=mqa"]
    assert [run.labels for run in runs] == [{"arch": "mamba"}, {"arch": "mqa"}]
    assert [run.overrides for run in runs] == [{"steps": 5, "seed": 0}] * 2
    assert with_argument("a.py:x=1,y=2", {"y": 3}) == "a.py:x=1,y=3"


@pytest.mark.quick
def test_values_are_read_and_tuples_stay_whole():
    assert split("('a','b'),c;d", ",") == ["('a','b')", "c;d"]
    (one, two) = expand(DEBUG, grids=["model.mixers=('mamba','attention'),s4d"])
    assert one.overrides["model.mixers"] == ("mamba", "attention")
    assert names([one, two]) == ["mixers=mamba+attention,seed=0", "mixers=s4d,seed=0"]
    assert read_value("1e-3") == read_value("0.001") == 0.001
    assert read_value("rope") == "rope"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"grids": ["optim.lr"]}, "cannot read 'optim.lr'"),
        ({"grids": ["optim.lr=1,,2"]}, "empty value"),
        ({"grids": ["optim.lr=1", "optim.lr=2"]}, "optim.lr is given twice"),
        ({"lists": ["optim.lr=1,optim.lr=2"]}, "optim.lr is given twice"),
        ({"grids": ["steps=1,2"], "common": {"steps": 3}}, "steps is given twice"),
        ({"zips": ["optim.b1=1,2;optim.b2=1"]}, "optim.b1 has 2, optim.b2 has 1"),
        ({"grids": ["seed=1,2"], "seeds": 2}, "use one of the two"),
        ({"seeds": 0}, "from 1 up"),
    ],
)
def test_bad_notation_is_refused(options, told):
    with pytest.raises(UserError, match=re.escape(told)):
        expand(DEBUG, **options)


@pytest.mark.quick
def test_a_part_of_a_table_is_picked_by_labels():
    runs = TABLES["lra"].runs("small")
    some = pick(runs, "task=image,text;arch=s4d;lr=4e-3;seed=1")
    assert [run.coordinates for run in some] == [
        dict(arch="s4d", task=task, lr=0.004, seed=1) for task in ("text", "image")
    ]
    assert set(names(some)) < set(names(runs))  # whose folders serve the whole table later
    for text, told in {
        "task=imag": "'imag'.*closest: image",
        "tsk=image": "'tsk'.*closest: task",
        "task": "cannot read 'task'.*for example arch=",
        "task=image;task=text": "task is given twice",
    }.items():
        with pytest.raises(UserError, match=told):
            pick(runs, text)
    tuned = pick(TABLES["extension"].runs("small"), "tuned=yes;scaling=yarn;seed=0")
    assert sorted(run.labels["tuned"] for run in tuned) == ["no", "yes"], "a run brings along what it begins with"


@pytest.mark.quick
def test_names_are_short_unique_and_do_not_change_as_a_sweep_grows():
    assert short_keys(["optim.lr", "model.mamba.state", "model.s4d.state"]) == {
        "optim.lr": "lr",
        "model.mamba.state": "mamba.state",
        "model.s4d.state": "s4d.state",
    }
    few = names(expand(DEBUG, grids=["optim.lr=1e-3"]))
    more = names(expand(DEBUG, grids=["optim.lr=1e-3,3e-3"], seeds=2))
    assert few == ["lr=0.001,seed=0"]
    assert set(few) < set(more)
    odd = names(
        [
            RunSpec(DEBUG, {}, {"path": "a/b"}),
            RunSpec(DEBUG, {}, {"path": "a b"}),
            RunSpec(DEBUG, {}, {"path": "x" * 300}),
        ]
    )
    assert len(set(odd)) == 3
    assert all(re.fullmatch(r"[\w.,=+-]{1,170}", name) for name in odd)


def test_a_plan_keeps_each_config_once_and_refuses_mistakes_before_anything_is_made(tmp_path):
    out = tmp_path / "sweep"
    # The width of the second setting is the config's own, so it is the same run as the first.
    runs = expand(DEBUG, lists=["optim.lr=1e-3;model.width=32;optim.lr=3e-3"])
    planned = campaign.plan(runs, out)
    assert list(planned) == ["lr=0.001,seed=0", "lr=0.003,seed=0"]
    assert campaign.repeats(runs, planned) == ["model.width=32, seed=0"]
    assert list(campaign.plan(expand(DEBUG, grids=["optim.lr=1e-3,0.001"]), out)) == ["lr=0.001,seed=0"]
    for grid in ("optim.lrr=1,2", "model.width=wide", ":arch=mambo", "steps=-1"):
        with pytest.raises(UserError):
            campaign.plan(expand(DEBUG, grids=[grid]), out)
    assert not out.exists()


def test_a_folder_with_another_config_is_refused(tmp_path):
    (run,) = expand(DEBUG, common={"steps": 7})
    ((name, item),) = campaign.plan([run], tmp_path).items()
    folders.claim(tmp_path / name, run, item.config_hash)
    folders.write_json(tmp_path / name / "config.json", item.config.to_dict() | {"resume_safe": ["keep"]})
    assert list(campaign.plan([run], tmp_path)) == [name] == ["seed=0"]
    with pytest.raises(UserError, match="holds a run with steps=7, not steps=8"):
        campaign.plan(expand(DEBUG, common={"steps": 8}), tmp_path)


def test_a_finished_run_stays_so_when_the_code_gets_other_keys(tmp_path):
    """Of this run's time there was no `deterministic` and no `model.final_norm`, but a `colour`."""
    (run,) = expand(DEBUG)
    ((name, item),) = campaign.plan([run], tmp_path).items()
    then = item.config.to_dict() | {"colour": "red", "resume_safe": ["steps"]}
    del then["deterministic"], then["model"]["final_norm"]
    own = configs.digest(then)
    folders.claim(tmp_path / name, run, own)
    folders.write_json(tmp_path / name / "config.json", then)
    ((_, begun),) = campaign.plan([run], tmp_path).items()
    assert begun.config_hash == item.config_hash != own, "what is not over will be of the code that ends it"
    made = row({}, 0, 0.5, steps=9, config_hash=own)
    folders.write_json(tmp_path / name / "result.json", made)
    planned = campaign.plan([run], tmp_path)
    campaign.carry_out(planned, tmp_path)
    (found,) = rows.read_rows(tmp_path / "rows.jsonl")
    assert (found["status"], found["config_hash"]) == ("finished", own)
    for key, value in (("deterministic", False), ("model.final_norm", False)):
        with pytest.raises(UserError, match=f"holds a run of before there was {key}, not {key}=False; choose"):
            campaign.plan(expand(DEBUG, common={key: value}), tmp_path)


# Whole commands


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


# Measurements


@pytest.mark.scale
def test_overhead_is_measured_on_the_real_loop(tmp_path):
    file = tmp_path / "new" / "bench.jsonl"
    code, printed, _ = call(
        "experiments.bench", "loop", f"--config={DEBUG}", *TINY, "--steps=20", "--rounds=2", f"--out={file}"
    )
    assert code == 0
    (found,) = map(json.loads, file.read_text().splitlines())
    # Wide bounds: on a busy machine either side may have the bad luck.
    assert found["step_ms"] > 0 < found["loop_ms"]
    assert -2 < found["lowest"] <= found["overhead"] <= found["highest"] < 1
    assert f"{DEBUG}: {found['overhead']:.1%} overhead" in printed


STUB = """
import resource, signal
from experiments import bench
from train import cli

def rows():
    yield {"n": 1}, "one"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    yield {"n": 2}, "two"

bench.BENCHES["features"], bench.MARKDOWN["features"] = rows, lambda rows: "row\\n" * 20 * len(rows)
cli.run(bench.main)
"""


@pytest.mark.parametrize(("room", "full"), [(100, "rows.jsonl"), (1000, "")])
def test_rows_of_a_bench_stay_when_the_disk_is_full(room, full, tmp_path):
    file = tmp_path / "rows.jsonl"
    words = [sys.executable, "-c", STUB.replace("ROOM", str(room)), "features", f"--out={file}"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = [json.loads(line)["n"] for line in file.read_text().splitlines()]
    if full:
        assert ended.returncode == 2 and f"cannot write {tmp_path / full}: File too large" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
    assert found == ([1] if full else [1, 2])
    assert (tmp_path / "rows.md").read_text() == "row\n" * 20 * len(found)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "rows.md"}


def test_startup_is_timed_twice_with_one_new_cache(monkeypatch):
    """A stand-in that is slow as long as the cache is empty."""
    program = (
        "import os, pathlib, sys, time\n"
        "cache = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])\n"
        "time.sleep(0 if cache.exists() else 1)\n"
        "cache.mkdir(exist_ok=True)\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "folder.mkdir()\n"
        "(folder / 'metrics.jsonl').write_text('{}')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(startup, "command", lambda run, folder: [sys.executable, "-c", program, str(folder)])
    found = startup.measure(DEBUG, {})
    assert found["first_s"] > found["second_s"] + 0.5
    assert found["ratio"] == pytest.approx(found["second_s"] / found["first_s"])
    monkeypatch.setattr(startup, "command", lambda run, folder: [sys.executable, "-c", "raise SystemExit('it broke')"])
    with pytest.raises(UserError, match="it broke"):
        startup.measure(DEBUG, {})
