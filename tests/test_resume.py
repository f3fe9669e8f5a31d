"""What may change when a run is resumed, what a refusal leaves behind, and what the result says of it."""

import pytest

from data import Mqar
from experiments.running.packing import pack, unpack
from model.errors import UserError
from tests.test_train import load, stop_after
from train import config as configs
from train import loop
from train.checkpoint import steps
from train.identity import refuse_changes
from train.log import read_metrics
from train.loop import train
from train.workdir import read_json

SHORT = [("steps", "4"), ("checkpoint_every", "4"), ("eval_every", "0"), ("eval_batches", "1"), ("model.layers", "1")]


def change(step: int, key: str, old, new) -> dict:
    return {"step": step, "key": key, "old": old, "new": new}


@pytest.mark.quick
def test_changes_are_noted_at_the_step_they_were_made():
    old, new = {"steps": 20, "lr": 0.1}, {"steps": 40, "lr": 0.1}
    assert configs.noted([], {}, new, 0) == []  # a run begins
    assert configs.noted([], old, new, 0) == []  # nothing was trained under the old one
    once = configs.noted([], old, new, 20)
    assert once == [change(20, "steps", 20, 40)]
    assert configs.noted(once, new, new, 30) == once  # resumed as it was
    twice = configs.noted(once, new, new | {"lr": 0.2}, 30)
    assert twice == [*once, change(30, "lr", 0.1, 0.2)]
    # Back at an earlier checkpoint, what came after it never happened.
    assert configs.noted(twice, new | {"lr": 0.2}, new | {"lr": 0.2}, 25) == [*once, change(25, "lr", 0.1, 0.2)]
    assert configs.noted(twice, new | {"lr": 0.2}, old, 20) == []
    # A kill between the two files: the note is written, the config is not.
    assert configs.noted(once, old, new, 20) == once
    assert configs.noted(once, old, old, 20) == []
    shape = [change(20, "rules", [["batch", ["data"]]], [])]  # as JSON has it
    assert configs.noted(shape, {"rules": ()}, {"rules": (("batch", ("data",)),)}, 20) == []


@pytest.mark.scale
def test_a_refusal_leaves_the_folder_as_it_was_and_a_change_is_told(tmp_path):
    config = load(*SHORT)
    assert train(config, str(tmp_path))["changes"] == []
    small_files = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    allowed = ",".join([*config.resume_safe, "model.width"])
    with pytest.raises(UserError, match="does not fit"):
        train(load(*SHORT, ("model.width", "32"), ("resume_safe", allowed)), str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == small_files
    assert train(config, str(tmp_path))["status"] == "finished"

    longer = load(*SHORT, ("steps", "8"))  # on a cosine: no rate is that of a run that was so all along
    twice = train(longer, str(tmp_path))
    assert twice["changes"] == [change(4, "steps", 4, 8)]
    assert read_json(tmp_path / "result.json") == twice
    assert train(longer, str(tmp_path)) == twice  # finished already


def test_a_result_has_validation_scores_though_the_last_step_was_saved_without(tmp_path, monkeypatch):
    longer = [("steps", "8"), ("checkpoint_every", "4"), ("eval_every", "8")]
    for test_at in ("last", "best"):
        folder = tmp_path / test_at
        with monkeypatch.context() as patched:
            patched.setattr(loop, "graceful_stop", stop_after(4))
            assert train(load(*SHORT, *longer, ("test_at", test_at)), str(folder)) is None
        assert steps(folder / "checkpoints") == [4]
        row = train(load(*SHORT, *longer, ("test_at", test_at), ("steps", "4")), str(folder))
        scores = {name: value for name, value in row["metrics"].items() if name.startswith("validation/")}
        assert (row["steps"], row["tested_step"]) == (4, 4) and {"validation/loss", "validation/accuracy"} <= set(
            scores
        )
        assert read_metrics(folder / "metrics.jsonl")[-1] == {"step": 4} | scores


@pytest.mark.parametrize(("last", "tested"), [(0.9, 3), (0.1, 2)])
def test_the_last_step_is_compared_with_the_best_though_it_was_saved_without(last, tested, tmp_path, monkeypatch):
    said = {2: 0.5, 3: last}
    monkeypatch.setattr(loop, "validate", lambda run, state, split: {"validation/accuracy": said[int(state.step)]})
    longer = [("steps", "8"), ("eval_every", "2"), ("test_at", "best")]
    with monkeypatch.context() as patched:
        patched.setattr(loop, "graceful_stop", stop_after(3))
        assert train(load(*SHORT, *longer), str(tmp_path)) is None
    row = train(load(*SHORT, *longer, ("steps", "3")), str(tmp_path))
    assert (row["steps"], row["tested_step"], row["metrics"]["validation/accuracy"]) == (3, tested, said[tested])


def test_of_data_there_is_one_fingerprint_a_run(tmp_path, monkeypatch):
    made, fingerprint = [], Mqar.fingerprint
    monkeypatch.setattr(Mqar, "fingerprint", lambda self, seed: made.append(fingerprint(self, seed)) or made[-1])
    row = train(load(*SHORT), str(tmp_path))
    assert made == [row["data_fingerprint"]] == [read_json(tmp_path / "data.json")["fingerprint"]]


def test_a_finished_run_without_its_checkpoints_is_not_begun_again(tmp_path, capsys):
    row = train(load(*SHORT), str(tmp_path / "here"))
    pack(tmp_path / "here", tmp_path / "pack", 2**20)
    unpack(tmp_path / "pack", tmp_path / "there")
    assert train(load(*SHORT), str(tmp_path / "there")) == row
    small_files = {path: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    with pytest.raises(UserError, match=r"result of 4 steps and no checkpoint to go on from; .*--checkpoints=all"):
        train(load(*SHORT, ("steps", "8")), str(tmp_path / "there"))
    assert {path: path.read_bytes() for path in (tmp_path / "there").iterdir()} == small_files

    pack(tmp_path / "here", tmp_path / "whole", 2**20, all_checkpoints=True)
    unpack(tmp_path / "whole", tmp_path / "anywhere")
    capsys.readouterr()
    assert train(load(*SHORT, ("steps", "8")), str(tmp_path / "anywhere"))["steps"] == 8
    assert "resumed at step 4" in capsys.readouterr().out


@pytest.mark.quick
def test_another_mesh_needs_no_flag(tmp_path):
    changes = configs.changes(load(), load(("mesh.fsdp", "2"), ("mesh.rules", "()")))
    assert set(changes) == {"mesh.fsdp", "mesh.rules"}
    refuse_changes(changes, load(), tmp_path)
    with pytest.raises(UserError, match=r"\(optim\.lr: 0\.1 -> 0\.2\)"):
        refuse_changes(changes | {"optim.lr": (0.1, 0.2)}, load(), tmp_path)


@pytest.mark.quick
def test_another_config_is_told_in_one_line_by_the_choice_that_made_it(tmp_path, capsys):
    """The keys that a choice brings and takes come behind it and are counted; nothing is announced as changed."""
    changes = configs.changes(load(), load(("model.mixers", "mamba"), ("steps", "4")))
    assert len(changes) > 20 and next(iter(changes)) == "model.attention.bias"
    with pytest.raises(UserError, match=r"another config \(model\.mixers: .*attention.* -> .*mamba.* more\);") as error:
        refuse_changes(changes, load(), tmp_path)
    assert str(error.value).count("->") == 4 and capsys.readouterr().out == ""
