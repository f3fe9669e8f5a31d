"""How far back answers reach: gradients against the definition, in the objective, in the suite."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import build
from data.pipeline import batch_at
from eval.accuracy import measure as accuracy
from eval.reach import measure, reach
from eval.restore import Restored
from model.errors import UserError
from model.layers import Embed
from train import config as configs
from train.objectives import Reach
from train.reach import last_place, sensitivity
from train.run import prepare
from train.scores import validate

pytestmark = pytest.mark.usefixtures("quickly_compiled", "quick_draws")
SMALL = [("model.width", "8"), ("model.layers", "1"), ("batch_size", "8"), ("eval_batches", "2")]
DELAYED = (("data.task", "delayed_recall"), ("data.delayed_recall.length", "12"))


def prepared(*overrides: tuple[str, str], arch: str = "gru", task: tuple[tuple[str, str], ...] = DELAYED):
    return prepare(
        configs.load(f"configs/debug.py:arch={arch}", [*SMALL, *task, ("objective.kind", "reach"), *overrides])
    )


@pytest.mark.quick
def test_the_last_place_is_where_a_row_is_asked_last():
    inputs = jnp.zeros((2, 5), jnp.int32)
    at, weights = jnp.array([[3, 1, 4], [2, 0, 4]]), jnp.array([[1.0, 1, 0], [1, 1, 0]])
    assert last_place({"inputs": inputs, "at": at, "weights": weights}).tolist() == [3, 2]
    assert last_place({"inputs": inputs, "segments": jnp.array([[1, 1, 1, 0, 0], [1] * 5])}).tolist() == [2, 4]
    assert last_place({"inputs": inputs}).tolist() == [4, 4]


def test_gradients_are_those_of_the_embedded_tokens():
    """Against a finite difference: each embedded token is moved by itself."""
    run = prepared()
    batch = batch_at(run.task, 0, "test", 8, 0)
    params = run.init().params
    norms = np.asarray(jax.jit(lambda p: sensitivity(run.model, p, batch))(params))

    @jax.jit
    def answer(move):
        def moved(call, args, kwargs, context):
            out = call(*args, **kwargs)
            return out + move if isinstance(context.module, Embed) and context.method_name == "__call__" else out

        with nn.intercept_methods(moved):
            logits, _ = run.model.apply({"params": params}, batch["inputs"], at=batch["at"])
        logits = logits[:, 0]
        return jnp.sum(logits * jax.random.rademacher(jax.random.key(0), logits.shape[1:], logits.dtype), axis=1)

    for place in (0, 5, 11):
        square = np.zeros(8)
        for d in range(8):
            move = jnp.zeros((8, 12, 8)).at[:, place, d].set(1e-3)
            square += np.asarray((answer(move) - answer(-move)) / 2e-3, np.float64) ** 2
        np.testing.assert_allclose(norms[:, place], square**0.5, rtol=0.02, atol=1e-4)
    assert norms.shape == (8, 12)


def test_the_objective_tells_of_the_first_token_in_tests_alone():
    run = prepared()
    batch = batch_at(run.task, 0, "test", 8, 0)
    batch["weights"][5:] = 0
    params = run.init().params
    sums = run.eval_step(params, batch)
    expected = np.log10(np.asarray(jax.jit(lambda p: sensitivity(run.model, p, batch))(params))[:5, 0])
    np.testing.assert_allclose(sums["reach"][0], expected.sum(), rtol=1e-4)
    assert sums["reach"][1] == 5, "rows past the end of a split do not count"
    _, trained = jax.eval_shape(run.train_step, run.abstract, batch)
    assert "reach" not in trained and "accuracy" in trained


def test_a_token_out_of_a_window_has_no_part_in_the_answer():
    run = prepared(("model.attention.window", "4"), arch="attention")
    batch = batch_at(run.task, 0, "test", 8, 0)
    params = run.init().params
    norms = np.asarray(jax.jit(lambda p: sensitivity(run.model, p, batch))(params))
    assert (norms[:, :8] == 0).all() and (norms[:, 8:] > 0).all()
    assert float(run.eval_step(params, batch)["reach"][0]) == pytest.approx(8 * -30), "no infinity"


def test_other_suites_tell_of_it_as_the_run_does(tmp_path):
    run = prepared()
    restored = Restored(tmp_path, run.config, run, 7, run.init().params)
    metrics, told = accuracy(restored, "test")["metrics"], validate(run, run.init(), "test")
    assert {f"test/{name}": metrics[name] for name in ("accuracy", "loss", "reach")} == told


@pytest.mark.scale
def test_the_suite_writes_gradients_by_distance(tmp_path, capsys):
    run = prepared()
    params = jax.tree.map(lambda p: 2 * p, run.init().params)
    restored = Restored(tmp_path, run.config, run, 7, params)
    reach(restored, split="test")
    lines = json.loads((tmp_path / "eval" / "reach-test-7.json").read_text())["distances"]
    assert [line["distance"] for line in lines] == ["0", "1", "2-3", "4-7", "8-15"]
    assert [line["count"] for line in lines] == [16, 16, 32, 64, 64]
    gradients = jax.jit(lambda batch: sensitivity(run.model, params, batch))
    norms = np.concatenate([np.asarray(gradients(batch_at(run.task, 0, "test", 8, step))) for step in range(2)])
    expected = [norms[:, 11], norms[:, 10], norms[:, 8:10], norms[:, 4:8], norms[:, :4]]
    np.testing.assert_allclose([line["trained"] for line in lines], [part.mean() for part in expected], rtol=1e-4)
    assert all(line["fresh"] != line["trained"] for line in lines)
    assert "tokens back" in capsys.readouterr().out
    assert measure(restored, "validation")[0]["trained"] != lines[0]["trained"]


def test_rows_past_the_end_of_a_split_are_in_no_mean(tmp_path):
    """Batches of 8 and of 16 have the same five; the last of them is repeated to fill up."""
    sizes = {"length": 12, "max_length": 12, "min_length": 2, "max_args": 3, "max_depth": 3, "n_test": 5}
    short = (("data.task", "listops"), *((f"data.listops.{name}", str(n)) for name, n in sizes.items()))
    found = []
    for batch in ("8", "16"):
        run = prepared(("batch_size", batch), ("eval_batches", "0"), task=short)
        found.append(measure(Restored(tmp_path, run.config, run, 7, run.init().params), "test"))
    assert found[0][0]["count"] == 5
    for one, other in zip(*found, strict=True):
        assert (one["distance"], one["count"]) == (other["distance"], other["count"])
        assert one["trained"] == pytest.approx(other["trained"], rel=1e-4)


@pytest.mark.quick
def test_mistakes_are_told_in_one_line():
    for task in ("adding", "matching", "shape_questions"):
        with pytest.raises(UserError, match=f"objective 'reach' asks about the tokens of one row, and task '{task}'"):
            Reach(build(task, {}))
    with pytest.raises(UserError, match=r"objective 'reach' cannot be served by model.kind 'encoder_decoder'"):
        prepared(arch="transformer")
