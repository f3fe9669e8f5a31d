"""Sweeps expand to what was written, survive what befalls them, and tables say what the rows say."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from experiments import campaign, folders, formats, launch, progress, rows, startup
from experiments.expand import expand, split
from experiments.launch import Event, Job, local
from experiments.layout import Layout, Published, sheet
from experiments.publish import publish
from experiments.runs import Run, names, read_value, short_keys, with_argument
from experiments.tables import TABLES, choose_scale, layout
from model.errors import UserError

ROOT = Path(__file__).parent.parent
DEBUG = "configs/debug.py"


def start(module: str, *arguments: str, **options) -> subprocess.Popen:
    """A command as a user types it, on the plain CPU rather than the tests' forced devices."""
    env = {**os.environ, "XLA_FLAGS": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, env=env, **pipes)


def call(module: str, *arguments: str) -> tuple[int, str, str]:
    process = start(module, *arguments)
    out, err = process.communicate()
    return process.returncode, out, err


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
            Run(DEBUG, {}, {"path": "a/b"}),
            Run(DEBUG, {}, {"path": "a b"}),
            Run(DEBUG, {}, {"path": "x" * 300}),
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
    folder = tmp_path / "seed=0"
    folders.claim(folder, run, "abc")
    folders.write_json(folder / "config.json", {"steps": 7, "batch_size": 16})
    assert list(campaign.plan([run], tmp_path)) == ["seed=0"]
    with pytest.raises(UserError, match="holds a run with steps=7, not steps=8"):
        campaign.plan(expand(DEBUG, common={"steps": 8}), tmp_path)


# Launching, with a stand-in for training that keeps to the same files

STAND_IN = """
import fcntl, json, pathlib, signal, sys, time
folder, how, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
lock = open(folder / ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
def stop(*_):
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with open(folder.parent / "alive.txt", "a") as alive:
    alive.write("+")
    alive.flush()
    time.sleep(seconds)
    alive.write("-")
if how == "crash":
    sys.exit("first line\\nit broke")
if how == "leave":
    sys.exit(0)
result = {"status": "finished", "seed": 0, "metrics": {}, "config_hash": sys.argv[4]}
(folder / "result.json").write_text(json.dumps(result))
"""


def job(out: Path, name: str, how: str = "finish", seconds: float = 0.2, config: str = "abc") -> Job:
    folders.claim(out / name, Run(DEBUG, {"seed": 0}, {"name": name}), "abc")
    return Job(name, [sys.executable, "-c", STAND_IN, str(out / name), how, str(seconds), config], out / name)


def outcome(events) -> dict[str, tuple[str, str]]:
    """Each job's last word."""
    return {event.name: (event.kind, event.detail) for event in events if event.kind != "tick"}


def test_runs_are_skipped_finished_or_failed_and_one_failure_stops_nothing(tmp_path):
    done = job(tmp_path, "done")
    folders.write_json(done.folder / "result.json", {"status": "finished", "config_hash": "abc"})
    jobs = [
        done,
        job(tmp_path, "a"),
        job(tmp_path, "b", "crash"),
        job(tmp_path, "c", "leave"),
        job(tmp_path, "d"),
    ]
    result = outcome(local(jobs, 2))
    assert {name: kind for name, (kind, _) in result.items()} == {
        "done": "skip",
        "a": "done",
        "b": "fail",
        "c": "fail",
        "d": "done",
    }
    assert result["b"][1] == "it broke"
    assert "before its last step" in result["c"][1]
    marks = (tmp_path / "alive.txt").read_text()
    assert marks.count("+") == 4
    assert max(marks[:i].count("+") - marks[:i].count("-") for i in range(len(marks) + 1)) == 2
    # The next call tries again what failed, and a row keeps the reason until then.
    assert rows.row_of(tmp_path / "b")["error"] == "it broke"
    assert outcome(local([job(tmp_path, "b"), done], 1)) == {"b": ("done", ""), "done": ("skip", "")}
    assert rows.row_of(tmp_path / "b")["status"] == "finished"


def test_a_result_of_another_config_is_a_failure(tmp_path):
    """As when a config file is edited while a sweep that read it is running."""
    result = outcome(local([job(tmp_path, "a"), job(tmp_path, "b", config="def")], 2))
    assert result == {"a": ("done", ""), "b": ("fail", launch.STRAYED)}
    assert [row["status"] for row in rows.collect(tmp_path)] == ["finished", "failed"]


def test_a_killed_run_says_so(tmp_path):
    long = job(tmp_path, "long", seconds=60)
    events = local([long], 1)
    while not (tmp_path / "alive.txt").exists():
        next(events)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (child,) = [int(pid) for pid in children if _runs(int(pid), str(long.folder))]
    os.kill(child, signal.SIGKILL)
    assert outcome(events) == {"long": ("fail", "killed by SIGKILL")}


def _runs(pid: int, word: str) -> bool:
    return word in Path(f"/proc/{pid}/cmdline").read_text()


def test_a_run_that_another_process_trains_is_waited_for(tmp_path):
    taken = job(tmp_path, "taken", seconds=1.5)
    with subprocess.Popen(taken.command) as other:
        wait_until(lambda: folders.in_use(taken.folder))
        seen = [event.kind for event in local([taken, job(tmp_path, "free")], 2) if event.name == "taken"]
    assert other.returncode == 0
    assert set(seen[:-1]) == {"wait"}
    assert seen[-1] == "done"
    assert not folders.in_use(taken.folder)


def test_a_run_that_loses_the_race_for_its_folder_is_not_a_failure(tmp_path):
    folder = job(tmp_path, "late").folder
    (folder / "log.txt").write_text("error: workdir x is in use by pid 7 on host; stop that run\n")
    assert launch.ended(Job("late", [], folder), 2).kind == "wait"
    (folder / "log.txt").write_text("error: unknown config key\n")
    assert launch.ended(Job("late", [], folder), 2).kind == "fail"


def test_a_signal_lets_every_run_save_and_none_start(tmp_path):
    jobs = [job(tmp_path, name, seconds=60) for name in "abc"]
    folders.write_json(tmp_path / "a" / "failed.json", {"code": 1, "error": "an earlier try"})
    kinds = []
    for event in local(jobs, 2):
        kinds.append((event.kind, event.name, event.detail))
        if event.kind == "tick" and (tmp_path / "alive.txt").exists():
            wait_until(lambda: (tmp_path / "alive.txt").read_text() == "++")
            os.kill(os.getpid(), signal.SIGTERM)
    assert kinds[-1] == ("stop", "", "SIGTERM")
    assert [(tmp_path / name / "saved").exists() for name in "abc"] == [True, True, False]
    assert not any(folders.in_use(tmp_path / name) for name in "abc")
    assert rows.row_of(tmp_path / "a")["status"] == "missing"


@pytest.mark.quick
def test_cores_are_shared_out():
    cores = list(range(8))
    shares = [launch.share(cores, slot, 3) for slot in range(3)]
    assert sorted(core for share in shares for core in share) == cores
    assert min(map(len, shares)) >= 2
    assert launch.share(cores, 11, 12) == cores


@pytest.mark.quick
def test_progress_counts(tmp_path, capsys):
    events = [Event("skip", "a"), Event("start", "b"), Event("start", "c"), Event("tick"), Event("wait", "d")]
    events += [Event("wait", "d"), Event("done", "b"), Event("fail", "c", "it broke"), Event("done", "d")]
    tally = progress.follow(iter(events), tmp_path, total=4)
    assert (tally.done, tally.skipped, tally.failed) == (["b", "d"], ["a"], {"c": "it broke"})
    assert campaign.exit_code(tally) == 1
    printed = capsys.readouterr().out.splitlines()
    assert sum("wait" in line for line in printed) == 1
    assert printed[-2:] == [
        "4 runs: 2 done, 1 finished before, 1 failed",
        f"failed: {tmp_path / 'c'}: it broke",
    ]


# Rows and tables


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
    assert rows.read(tmp_path / "rows.jsonl") == [made[1], made[0]]


def test_collect_misses_no_run(tmp_path):
    for name in ("ok", "crashed", "waiting"):
        folders.claim(tmp_path / name, Run(DEBUG, {"seed": 3}, {"name": name}), "abc")
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


# Whole commands


def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "empty").mkdir()
    out = f"--out={tmp_path / 'out'}"
    cases = {
        ("experiments.sweep", f"--config={DEBUG}", out, "--grid=optim.lrr=1,2"): "closest: optim.lr",
        ("experiments.sweep", f"--config={DEBUG}", out, "--grids=optim.lr=1"): "closest: --grid",
        ("experiments.reproduce", "quickstrat"): "closest: quickstart",
        ("experiments.report", f"--dir={tmp_path / 'empty'}"): "no rows to report on",
        ("experiments.bench", "lop"): "closest: loop",
        ("experiments.list", "all"): "unexpected argument 'all'",
    }
    processes = {case: start(*case) for case in cases}
    for case, process in processes.items():
        printed, told = process.communicate()
        assert (process.returncode, printed) == (2, ""), told
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
        rows.read(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("not json\n")
    with pytest.raises(UserError, match="not a file of rows"):
        rows.read(tmp_path / "rows.jsonl")


def test_dry_run_prints_commands_that_a_shell_takes_and_makes_nothing(tmp_path):
    out = tmp_path / "sweep"
    code, printed, _ = call(
        "experiments.sweep", f"--config={DEBUG}:arch=mamba", "--grid=model.mixers=('mamba','attention'),s4d",
        "--config.steps=5", "--seeds=2", f"--out={out}", "--dry-run",
    )  # fmt: skip
    assert code == 0
    lines = printed.splitlines()
    assert len(lines) == 4
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {lines[0]}"], capture_output=True, text=True).stdout
    assert words.splitlines() == [
        sys.executable, "-m", "train", f"--config={DEBUG}:arch=mamba",
        f"--workdir={out}/mixers=mamba+attention,seed=0",
        "--config.steps=5", "--config.model.mixers=('mamba', 'attention')", "--config.seed=0",
    ]  # fmt: skip
    assert not out.exists()


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


@pytest.mark.parametrize("name", TABLES)
def test_no_two_runs_of_a_table_are_the_same(name, tmp_path):
    for scale in TABLES[name].scales:
        runs = TABLES[name].runs(scale)
        assert campaign.repeats(runs, campaign.plan(runs, tmp_path)) == []
        assert layout(TABLES[name], scale).order.keys() >= {*TABLES[name].by, TABLES[name].across} - {None}


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
    made = sheet(rows.read(tmp_path / "rows.jsonl"), layout(TABLES["quickstart"], "smoke"))
    assert (tmp_path / "table.md").read_text() == formats.markdown(made)


TINY = (
    "--config.model.width=16",
    "--config.model.layers=1",
    "--config.eval_batches=1",
    "--config.eval_every=0",
)


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
    process = start(*command, "--jobs=2", f"--out={out}")
    wait_until(lambda: folders.position(out / "lr=0.001,seed=0").get("step", 0) > 5)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM" in printed
    stopped = folders.position(out / "lr=0.001,seed=0")["step"]
    assert stopped < 400
    assert rows.row_of(out / "lr=0.001,seed=0")["status"] == "missing"
    assert not folders.in_use(out / "lr=0.001,seed=0")

    code, printed, _ = call(*command, "--jobs=2", f"--out={out}")
    assert code == 0
    assert printed.count("diverged:") == 1
    log = (out / "lr=0.001,seed=0" / "log.txt").read_text()
    assert f"resumed at step {stopped}" in log
    made = rows.read(out / "rows.jsonl")
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


def test_overhead_is_measured_on_the_real_loop(tmp_path):
    file = tmp_path / "new" / "bench.jsonl"
    code, printed, _ = call(
        "experiments.bench", "loop", f"--config={DEBUG}", *TINY, "--steps=20", "--rounds=2", f"--out={file}"
    )
    assert code == 0
    (found,) = rows.read(file)
    # Wide bounds: on a busy machine either side may have the bad luck.
    assert found["step_ms"] > 0 < found["loop_ms"]
    assert -2 < found["lowest"] <= found["overhead"] <= found["highest"] < 1
    assert f"{DEBUG}: {found['overhead']:.1%} overhead" in printed


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
