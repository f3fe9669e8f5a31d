"""Runs that read prepared sets: what is not there is said before any starts, and what is may lie anywhere."""

from pathlib import Path

import pytest

from data import TASKS, build
from data.prepared import Unprepared, folder
from experiments.running import campaign, folders
from experiments.running.runs import RunSpec
from experiments.tables.definitions import TABLES
from experiments.tables.rows import changed, read_rows
from model.errors import UserError
from tests import sets
from tests.processes import call
from train import config as configs
from train import places

ENWIK8 = "prepared/enwik8/bytes.npy"


@pytest.mark.quick
@pytest.mark.parametrize(
    "spec, put, lacks",
    [
        ("configs/seqimage.py:task=psmnist", {"data.psmnist.root": "X"}, "mnist"),
        ("configs/lra.py:task=retrieval", {"data.aan.root": "X"}, "lra_aan"),
        ("configs/lra.py:task=listops", {"data.listops.root": "X"}, None),
        ("configs/enwik8.py:size=small", {"data.text.path": f"X/{ENWIK8}"}, "enwik8"),
        ("configs/debug.py", {}, None),
    ],
)
def test_a_config_says_which_set_it_lacks_and_takes_another_root(spec, put, lacks):
    config = configs.load(spec)
    assert places.below(config, "X") == put
    there = configs.load(spec, put.items())
    assert places.lacking(there) == (lacks and ("X", lacks))
    moved = configs.changes(config, there)
    assert moved.keys() == put.keys() and all(places.moved(key, *change) for key, change in moved.items())


@pytest.mark.quick
@pytest.mark.parametrize(
    "key, old, new",
    [
        ("data.text.path", "a.txt", "b.txt"),
        ("data.text.path", f"a/{ENWIK8}", "a/prepared/enwik9/bytes.npy"),
        ("data.image.protocol", "s4", "lra"),
        ("model.root", "a", "b"),
    ],
)
def test_other_changes_are_no_move(key, old, new):
    assert not places.moved(key, old, new)


@pytest.mark.quick
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if "path" in task.__dataclass_fields__])
def test_a_set_that_is_named_by_its_path_may_move(task):
    assert places.moved(f"data.{task}.path", f"a/{ENWIK8}", f"b/{ENWIK8}")
    assert not places.moved(f"data.{task}.path", f"a/{ENWIK8}", "b/prepared/enwik9/bytes.npy")


@pytest.mark.quick
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if "path" in task.__dataclass_fields__])
def test_a_set_that_is_named_by_its_path_is_missed_as_any_other(task):
    with pytest.raises(Unprepared, match=r"no prepared set 'enwik8' below 'a b'; make it by: .* enwik8 --root='a b'"):
        build(task, {"path": f"a b/{ENWIK8}"})


@pytest.mark.quick
def test_what_else_is_wrong_with_data_is_told_as_it_is():
    with pytest.raises(UserError, match=r"data.text.path 'nowhere' does not exist"):
        places.lacking(configs.load("configs/enwik8.py", [("data.text.path", "nowhere")]))


def test_all_sets_are_missed_in_one_line_and_those_of_finished_runs_are_not(tmp_path):
    runs = campaign.below(TABLES["lra"].runs("small"), tmp_path, "X")
    planned = campaign.plan(runs, tmp_path)
    with pytest.raises(UserError) as error:
        campaign.refuse_unprepared((planned, tmp_path))
    told = "imdb, cifar10 below 'X'; make ready by: python -m data.prepare imdb cifar10 --root=X"
    assert str(error.value).endswith(told)
    for name, item in planned.items():
        if item.run.labels["task"] == "text":
            folders.make(tmp_path / name)
            folders.write_json(tmp_path / name / "result.json", {})
    with pytest.raises(UserError, match=r"data.prepare cifar10 --root=X"):
        campaign.refuse_unprepared((planned, tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ("experiments.reproduce", "seqimage", "--scale=smoke", "--root=X"),
        ("experiments.sweep", "--config=configs/seqimage.py:size=smoke,root=X", "--seeds=2"),
    ],
)
def test_nothing_is_begun_without_its_data(words, tmp_path):
    code, printed, told = call(*words, f"--out={tmp_path / 'out'}")
    assert (code, printed) == (2, "") and told.count("\n") == 1, told
    assert "mnist below 'X'; make ready by: python -m data.prepare mnist --root=X" in told
    assert ("--root=DIR" in told) == ("experiments.reproduce" in words)
    assert not (tmp_path / "out").exists()


@pytest.mark.quick
def test_a_finished_run_is_the_same_wherever_its_data_lay(tmp_path):
    run = RunSpec("configs/seqimage.py", {"seed": 0}, {})
    ((name, first),) = campaign.plan([run], tmp_path).items()
    folders.claim(tmp_path / name, run, first.config_hash)
    folders.write_json(tmp_path / name / "config.json", first.config.to_dict())
    ((_, begun),) = campaign.plan(campaign.below([run], tmp_path, "X"), tmp_path).items()
    assert begun.config.data.smnist.root == "X" and begun.config_hash != first.config_hash
    folders.write_json(tmp_path / name / "result.json", {})
    ((_, done),) = campaign.plan(campaign.below([run], tmp_path, "X"), tmp_path).items()
    assert done.config_hash == first.config_hash


@pytest.mark.scale
def test_a_table_goes_on_with_its_data_elsewhere(tmp_path):
    here, there, out = tmp_path / "here", tmp_path / "there", tmp_path / "out"
    sets.write(here)
    words = (
        "experiments.reproduce", "seqimage", "--scale=smoke", "--only=arch=s4d", f"--out={out}", "--jobs=1", "--mixed",
        "--config.steps=4", "--config.checkpoint_every=2", "--config.eval_every=0", "--config.eval_batches=1",
        "--config.data.smnist.n_validation=20", "--config.test_at=last", "--config.model.width=16",
    )  # fmt: skip
    code, printed, told = call(*words, f"--root={here}")
    assert code == 0 and "1 runs: 1 done" in printed, printed + told
    assert printed.startswith("seqimage, scale smoke, to run: 1 run, 4 steps, 1.3e+04 tokens, ")  # 4 rows of 784
    here.rename(there)
    run = out / "arch=s4d,task=smnist,seed=0"
    code, printed, told = call(*words, f"--root={there}")
    assert code == 0 and "1 finished before" in printed and "0 of 1" in printed, printed + told
    assert "to run" not in printed
    (run / "result.json").unlink()
    code, printed, told = call(*words, f"--root={there}")
    assert code == 0 and "1 runs: 1 done" in printed, printed + told
    assert "data.smnist.root" in (run / "log.txt").read_text()
    (made,) = read_rows(out / "rows.jsonl")
    assert made["status"] == "finished" and not changed(made)
    assert (
        folder(there, "mnist").is_dir()
        and Path(folders.read_json(run / "config.json")["data"]["smnist"]["root"]) == there
    )
