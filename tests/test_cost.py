"""What runs cost is computed from their configs: steps, tokens, and 6 x parameters x tokens operations."""

import pytest

from experiments.running import cost
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
    assert cost.of([config]) == (1, 30, tokens, 6 * run.params * tokens)


def test_what_only_other_machines_can_do_is_counted_here():
    plain, cudnn = (
        configs.load("configs/debug.py:arch=attention", overrides)
        for overrides in ([], [("model.attention.implementation", "cudnn"), ("model.dtype", "bfloat16")])
    )
    assert cost.of([cudnn]) == cost.of([plain]) and cudnn.model.attention.implementation == "cudnn"


def test_runs_add_up_and_a_model_is_counted_once(monkeypatch):
    asked = [configs.load("configs/debug.py", [("seed", str(seed)), ("steps", "7")]) for seed in range(3)]
    one, counted, count = cost.of(asked[:1]), [], cost.parameters
    monkeypatch.setattr(cost, "parameters", lambda *words: counted.append(words) or count(*words))
    assert cost.of(asked) == tuple(3 * number for number in one) and len(counted) == 1
    assert str(cost.of(asked)).startswith("3 runs, 21 steps, ")
