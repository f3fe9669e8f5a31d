"""What runs cost is computed from their configs: steps, tokens, and 6 x parameters x tokens operations."""

import pytest

from experiments.running import cost
from model.errors import UserError
from train import config as configs
from train.run import prepare

CONFIGS = {
    "tokens": ("configs/debug.py", {}, 1),
    "statistics of batches, which are not trained": ("configs/lra.py:task=listops,arch=s4d,size=paper", {}, 1),
    "two rows each": ("configs/debug.py:arch=attention", {"data.task": "matching", "model.kind": "towers"}, 2),
    "hidden tokens": ("configs/lra.py:task=listops,arch=attention,size=smoke,start=pretrain_masked", {}, 1),
    "encoder and decoder": ("configs/seq2seq.py:size=smoke", {}, 1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_costs_what_its_steps_and_parameters_say(name):
    spec, changes, rows = CONFIGS[name]
    config = configs.load(spec, {**changes, "batch_size": "8", "steps": "30"}.items())
    run = prepare(config)
    tokens = 30 * 8 * run.task.length * rows
    assert cost.of({"a": config}) == (1, 30, tokens, 6 * run.params * tokens)


def test_what_only_other_machines_can_do_is_counted_here():
    plain, cudnn = (
        configs.load("configs/debug.py:arch=attention", overrides)
        for overrides in ([], [("model.attention.implementation", "cudnn"), ("model.dtype", "bfloat16")])
    )
    assert cost.of({"a": cudnn}) == cost.of({"a": plain}) and cudnn.model.attention.implementation == "cudnn"


def test_runs_add_up_and_a_model_is_counted_once(monkeypatch):
    asked = {str(seed): configs.load("configs/debug.py", [("seed", str(seed)), ("steps", "7")]) for seed in range(3)}
    one, counted, count = cost.of({"0": asked["0"]}), [], cost.parameters
    monkeypatch.setattr(cost, "parameters", lambda *words: counted.append(words) or count(*words))
    assert cost.of(asked) == tuple(3 * number for number in one) and len(counted) == 1
    assert str(cost.of(asked)).startswith("3 runs, 21 steps, ")


def test_a_model_that_cannot_be_made_is_told_by_its_run(monkeypatch):
    def asked(**changes: str):
        """A run that can begin, and one with these changes."""
        spec = "configs/debug.py:arch=attention"
        return {"good": configs.load(spec), "odd": configs.load(spec, [(f"model.{k}", v) for k, v in changes.items()])}

    traced, built = asked(width="48", **{"attention.n_heads": "16"}), asked(mixers="retention")
    for how, runs, told in (
        (cost.of, traced, "run odd: rope rotates pairs"),
        (cost.check, traced, "run odd: rope rotates pairs"),
        (cost.check, built, "run odd: position 'rope' acts on"),
    ):
        with pytest.raises(UserError, match=told):
            how(runs)
    monkeypatch.setattr(cost, "MOST", 1)  # all further ones are built, and not gone through
    cost.check(traced)
    with pytest.raises(UserError, match="run odd: position 'rope' acts on"):
        cost.check(built)


def test_a_model_whose_data_are_elsewhere_is_left_to_its_run():
    asked = {"a": configs.load("configs/seqimage.py:root=nowhere")}
    cost.check(asked, elsewhere=True)
    with pytest.raises(UserError, match=r"run a: .*nowhere"):
        cost.check(asked)
    made_here = {"a": configs.load("configs/debug.py", [("objective.kind", "masked")])}
    with pytest.raises(UserError, match="run a: "):
        cost.check(made_here, elsewhere=True)
