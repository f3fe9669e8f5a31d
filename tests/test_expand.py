"""From notation to runs: what a sweep expands to, and whose folder a run finds."""

import re

import pytest

from experiments.running import campaign, folders
from experiments.running.expand import expand, pick, split
from experiments.running.runs import RunSpec, names, read_value, short_keys, with_argument
from experiments.tables import rows
from experiments.tables.definitions import TABLES
from model.errors import UserError
from tests.test_report import row
from train import config as configs

DEBUG = "configs/debug.py"


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
