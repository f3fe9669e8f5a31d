"""What an evaluation asks: the same rows however it is cut, of the data of the training, on the devices there are."""

import logging

import jax
import numpy as np
import pytest

from data.pipeline import batch_at
from eval.report import write
from eval.restore import restore
from tests.test_interrupted import config
from train import config as configs
from train.loop import train
from train.reach import sensitivity
from train.run import at_length, prepare
from train.scores import batches_of, measure

TOWERS = [
    ("data.task", "matching"),
    ("model.kind", "towers"),
    ("model.causal", "False"),
    ("objective.kind", "contrastive"),
    ("eval_batches", "2"),
    ("optim.accumulate", "2"),
]
ONE = jax.devices()[:1]
FEW = jax.devices()[:4]
pytestmark = pytest.mark.usefixtures("quickly_compiled")


def asked(**settings):
    return config(**{key.replace("__", "."): value for key, value in settings.items()})


def test_rows_are_asked_in_pieces_for_which_training_has_room():
    whole, cut = (prepare(asked(optim__accumulate=n, eval_batches=2), devices=ONE) for n in (1, 4))
    sizes = [[batch.size for batch in batches_of(run, "test")] for run in (whole, cut)]
    assert sizes == [[16] * 2, [4] * 8]
    state = whole.init()
    assert measure(cut, state, "test").targets == measure(whole, state, "test").targets
    assert measure(cut, state, "test").scores == pytest.approx(measure(whole, state, "test").scores, rel=1e-5)
    assert at_length(cut, 64).config.batch_size <= 4, "longer rows take no more room"


def test_rows_that_are_compared_are_asked_as_many_at_a_time():
    """Whatever their length, and however a step takes them."""
    run = prepare(configs.load("configs/debug.py", TOWERS), devices=ONE)
    for other in (run, at_length(run, run.task.length * 4)):
        assert [batch.size for batch in batches_of(other, "test")] == [16, 16]


def test_how_far_an_answer_reaches_is_told_of_each_row_by_itself():
    run = prepare(config(), devices=ONE)
    params, batch = run.init().params, batch_at(run.task, 0, "test", 8, 0)
    whole = sensitivity(run.model, params, batch)
    half = sensitivity(run.model, params, {key: x[4:] for key, x in batch.items()})
    np.testing.assert_allclose(half, whole[4:], rtol=1e-4, atol=1e-6)


def test_other_data_than_were_trained_on_are_told_and_leave_the_report_of_those(tmp_path, caplog):
    text, run = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("abcdefgh" * 500)
    c = configs.load(
        f"configs/text.py:path={text}", [("data.text.length", "16"), ("model.layers", "1"), ("steps", "1")]
    )
    c.eval_batches, c.batch_size, c.model.width = 1, 8, 16
    train(c, str(run))
    same = write(restore(str(run), "latest"), "accuracy", "test", {})
    text.write_text("abcdefgh" * 400)
    with caplog.at_level(logging.WARNING):
        other = restore(str(run), "latest")
    assert "the data of task text have changed since" in caplog.text
    assert other.other_data and write(other, "accuracy", "test", {}) != same
    overridden = restore(str(run), "latest", [("data.seed", "1")])
    assert not overridden.other_data, "what was asked for need not be told"


def loss_of(restored) -> float:
    state = restored.run.abstract.replace(params=restored.params)
    return measure(restored.run, state, "test").scores["test/loss"]


def test_a_run_of_many_devices_is_evaluated_on_those_there_are(tmp_path, monkeypatch, capsys):
    train(asked(mesh__data=2, mesh__tensor=4), str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_count", lambda: len(FEW))
        patched.setattr(jax, "devices", lambda: FEW)
        found = restore(str(tmp_path), "latest")
        assert dict(found.run.mesh.shape) == dict(data=4, fsdp=1, tensor=1, sequence=1, expert=1)
        assert "the run's mesh was for other devices: here it is mesh.data=4" in capsys.readouterr().out
        loss = loss_of(found)
    there = restore(str(tmp_path), "latest")
    assert dict(there.run.mesh.shape)["tensor"] == 4
    assert loss == pytest.approx(loss_of(there), rel=1e-5)
