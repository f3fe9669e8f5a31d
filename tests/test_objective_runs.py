"""Runs with every objective: they learn, are tested by it, go on, resume, and lie on meshes."""

import math
from functools import lru_cache

import numpy as np
import pytest

from eval.accuracy import measure
from eval.continuation import continuation
from eval.generate import check
from eval.restore import restore
from model.errors import UserError
from tests.alone import alone, one_step
from tests.objectives import DEBUG, NEEDS, load, write_text
from train import config as configs
from train import log
from train.loop import train
from train.objectives import OBJECTIVES
from train.run import prepare
from train.workdir import read_json

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.scale
@pytest.mark.parametrize("kind", NEEDS)
def test_a_run_learns_and_is_tested_by_its_objective(kind, text, tmp_path, capsys):
    rate = [("optim.lr", "0.01"), ("steps", "40"), ("eval_every", "0"), ("checkpoint_every", "0")]
    result = train(load(text, kind, *NEEDS[kind], *rate, ("test_lengths", "24")), str(tmp_path))
    losses = [line["loss"] for line in log.read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert losses[0] > 5 and np.mean(losses[-5:]) < 2.5, losses
    restored = restore(str(tmp_path), "latest")
    found = measure(restored, "test")
    assert found["metrics"]["loss"] == pytest.approx(result["metrics"]["test/loss"], rel=1e-5)
    assert result["metrics"]["test/length_24/loss"] < 5, "the same model, asked at another length"
    assert found["metrics"]["accuracy"] > found["baselines"]["chance"]
    if OBJECTIVES[kind].likelihood:
        assert found["metrics"]["perplexity"] == pytest.approx(math.exp(found["metrics"]["loss"]))
    else:
        assert set(found["metrics"]) == {"loss", "accuracy"}, "no perplexity of what is no text"
    if kind != "masked":
        capsys.readouterr()
        continuation(restored, prompt="a cat <mask> mat", tokens=6, temperature=0.0, top_k=0, top_p=1.0, seed=0)
        assert len(capsys.readouterr().out) > len("a cat <mask> mat\n"), "every causal model goes on"


@pytest.mark.scale
@pytest.mark.parametrize("mixer, causal", [("gru", "True"), ("attention", "False")])
def test_a_label_for_each_token_is_learnt(mixer, causal, tmp_path):
    """The sum of two, which a bidirectional model cannot tell without knowing the place."""
    task = [("data.task", "running_sum"), ("data.running_sum.length", "2"), ("model.causal", causal)]
    model = [("model.mixers", mixer), ("model.position", "sinusoidal"), ("model.width", "16"), ("model.pool", "cls")]
    rate = [("optim.lr", "0.01"), ("steps", "160"), ("eval_every", "0"), ("checkpoint_every", "0")]
    config = configs.load(DEBUG, [*task, *model, *rate])
    run = prepare(config)
    assert (run.model.n_classes, run.model.cls) == (2, False)
    result = train(config, str(tmp_path))
    found = measure(restore(str(tmp_path), "latest"), "test")
    assert result["metrics"]["test/accuracy"] == found["metrics"]["accuracy"] > 0.9
    assert set(found["metrics"]) == {"loss", "accuracy"} and len(found["slices"]["position"]) == 2
    with pytest.raises(UserError, match="a classifier of 2 classes cannot generate"):
        check(run.model, 1, 1)


@pytest.mark.scale
def test_masked_resumes_bit_for_bit(text, tmp_path):
    def losses(folder):
        return [float(line["loss"]).hex() for line in log.read_metrics(folder / "metrics.jsonl") if "loss" in line]

    fixed = [*NEEDS["masked"], ("optim.schedule", "constant"), ("eval_every", "0"), ("eval_batches", "1")]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(load(text, "masked", *fixed, ("steps", "6")), str(whole))
    for steps in ("3", "6"):
        train(load(text, "masked", *fixed, ("steps", steps)), str(parts))
    assert len(losses(whole)) == 6 and losses(whole) == losses(parts)
    tested = [read_json(folder / "result.json")["metrics"]["test/loss"] for folder in (whole, parts)]
    assert tested[0] == tested[1]


def accumulated(kind: str, accumulate: str) -> list[tuple[str, str]]:
    return [*NEEDS[kind], ("optim.accumulate", accumulate), ("batch_size", "16")]


@lru_cache(1)  # two meshes of one kind come one after the other
def asked_alone(kind: str, accumulate: str, text):
    """The first state, and what a step that knows of no mesh measures."""
    first, _, want = alone(prepare(load(text, kind, *accumulated(kind, accumulate))))
    return first, want


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize(
    "kind, accumulate, mesh",
    [
        ("masked", "1", dict(data=8)),
        ("masked", "1", dict(fsdp=2, tensor=2, sequence=2)),
        ("masked", "2", dict(fsdp=2, tensor=2, sequence=2)),
        ("span_corruption", "1", dict(fsdp=2, tensor=2, sequence=2)),
        ("infilling", "2", dict(data=8)),
    ],
    ids=str,
)
def test_a_mesh_corrupts_and_asks_as_one_device_does(kind, accumulate, mesh, text):
    first, want = asked_alone(kind, accumulate, text)
    axes = [(f"mesh.{axis}", str(n)) for axis, n in ({"data": 1} | mesh).items()]
    _, sums = one_step(prepare(load(text, kind, *accumulated(kind, accumulate), *axes)), first)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(sums[key][0], want[key][0], rtol=2e-5, err_msg=key)
    assert sums["loss"][1] == want["loss"][1] == 16 * {"masked": 2, "span_corruption": 4, "infilling": 17}[kind]
