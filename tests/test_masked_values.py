"""The value of masked vectors and patches as an objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import build as build_task
from data.pipeline import batch_at
from model import build
from model.errors import UserError
from tests.test_model import init, model_config
from train.masked_values import MaskedValues
from train.objective import arguments
from train.objectives import build as build_objective

pytestmark = [pytest.mark.usefixtures("quick_draws"), pytest.mark.usefixtures("quickly_compiled")]
SHAPES, ADDING = build_task("shapes", {"side": 16}), build_task("adding", {"length": 10})


def objective(task, **settings) -> MaskedValues:
    return build_objective({"kind": "masked_values", "label_smoothing": 0.0, "masked_values": settings}, task)


def model_of(one: MaskedValues, **changes):
    config = model_config(**dict(causal=False, patch=4) | changes)
    model = build.build(config, one.asked)
    one.check_model(model, config)
    return model


@pytest.mark.quick
@pytest.mark.few(1)
@pytest.mark.parametrize("task, square, places", [(SHAPES, 8, 4), (SHAPES, 4, 16), (ADDING, 16, 10)], ids=str)
def test_a_share_of_each_row_is_masked_in_whole_squares(task, square, places):
    one, batch = objective(task, square=square, rate=0.5), batch_at(task, 0, "train", 64, 0)
    for rng in (None, jax.random.key(3)):
        masked = np.asarray(one.view(batch, rng)["masked"])
        if task is SHAPES:
            cut = masked.reshape(64, 16 // square, square, 16 // square, square)
            assert (cut == cut[:, :, :1, :, :1]).all()
            masked = cut[:, :, 0, :, 0].reshape(64, -1)
        assert masked.shape == (64, places) and (masked.sum(1) == places // 2).all()
        assert 0.2 < masked.mean(0).min() and masked.mean(0).max() < 0.8, "any place may be"
    alone = one.view({key: array[5:6] for key, array in batch.items()}, jax.random.key(3))["masked"]
    np.testing.assert_array_equal(alone[0], one.view(batch, jax.random.key(3))["masked"][5])


@pytest.mark.few(1)
@pytest.mark.parametrize("task, square", [(SHAPES, 8), (ADDING, 16)], ids=["shapes", "adding"])
def test_the_loss_is_the_mean_error_of_what_is_masked_and_cannot_be_read_off(task, square):
    one = objective(task, square=square, rate=0.5)
    model = model_of(one, position="axial" if task is SHAPES else "rope")
    batch = one.view(batch_at(task, 0, "train", 3, 0), None)
    variables = init(model, batch["inputs"], **arguments(batch))
    assert variables["params"]["mask"].shape == (16,)
    apply = jax.jit(lambda batch: model.apply(variables, batch["inputs"], **arguments(batch))[0])
    found = np.asarray(apply(batch))

    def pixels(values):
        """The model's numbers where the task has its own: patches of 4 back in their places, by hand."""
        if task is ADDING:
            return values
        out = np.zeros((3, 16, 16, 3))
        for place in range(16):
            y, x = divmod(place, 4)
            out[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = values[:, place].reshape(3, 4, 4, 3)
        return out

    masked = np.asarray(batch["masked"])
    off = np.abs(pixels(found) - batch["inputs"])[masked]
    sums = jax.jit(lambda batch: one(model, variables["params"], batch, None))(batch_at(task, 0, "train", 3, 0))
    assert set(sums) == {"loss", "accuracy"}
    total, count = sums["loss"]
    np.testing.assert_allclose(total / count, off.mean(), rtol=1e-5)
    np.testing.assert_allclose(sums["accuracy"][0] / sums["accuracy"][1], (off < 0.1).mean(), rtol=1e-5)
    hidden = {**batch, "inputs": jnp.where(masked[..., None], 7.0, batch["inputs"])}
    np.testing.assert_array_equal(apply(hidden), found)
    seen = {**batch, "inputs": jnp.where(masked[..., None], batch["inputs"], 7.0)}
    assert not np.allclose(apply(seen), found, atol=1e-3)


@pytest.mark.quick
@pytest.mark.parametrize(
    "task, settings, changes, words",
    [
        (build_task("mqar", {}), {}, {}, "needs rows of real numbers, and task 'mqar' .*data.task=adding, shapes"),
        (SHAPES, dict(square=6), {}, "masked_values.square 6 does not divide the image's height 16; .*: 4"),
        (
            SHAPES,
            dict(square=4),
            dict(patch=8),
            "model.patch 8 does not divide objective.masked_values.square 4; .*: 4",
        ),
        (ADDING, {}, dict(causal=True), "a causal model sees one; closest: model.causal=False"),
    ],
)
def test_what_cannot_be_is_one_line(task, settings, changes, words):
    with pytest.raises(UserError, match=words) as raised:
        model_of(objective(task, **settings), **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.quick
def test_the_mask_is_there_only_for_who_masks():
    plain = build.build(model_config(causal=False, patch=4), SHAPES.asked)
    assert "mask" not in init(plain, jnp.zeros((1, 16, 16, 3)))["params"]
