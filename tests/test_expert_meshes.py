"""Experts over a mesh: the loss, gradients and reports of one device, whoever holds which expert."""

import jax
import numpy as np
import optax
import pytest

from data import pipeline
from model.errors import UserError
from model.groups import group_rules
from tests import meshes
from tests.alone import alone as first_step
from tests.alone import one_step
from tests.test_train import load
from train import optim
from train.run import prepare
from train.step import train_step

EXPERTS = [("model.mlp", "experts"), ("model.experts.n_experts", "8"), ("model.layers", "2")]
SETTINGS = {
    "dropless": [],
    "ragged": [("model.experts.implementation", "ragged")],
    "capacity": [("model.experts.capacity", "0.75"), ("model.experts.shared", "1")],
}
MESHES = [
    dict(data=1, expert=8),
    dict(data=2, expert=2, tensor=2),
    dict(data=1, expert=4, sequence=2),
    dict(data=1, fsdp=2, expert=2, tensor=2),
]


def sized(sizes: dict[str, int]) -> list[tuple[str, str]]:
    return [(f"mesh.{axis}", str(size)) for axis, size in sizes.items()]


@pytest.fixture(scope="module")
def alone():
    """The states before and after one step that knows of no mesh, and its metrics."""
    found = {}

    def step_of(kind: str):
        if kind not in found:
            found[kind] = first_step(prepare(load(*EXPERTS, *SETTINGS[kind])))
        return found[kind]

    return step_of


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    # How groups are multiplied is one device's matter: the other way is tried where columns are shared, and tokens.
    [
        pytest.param(kind, sizes, id="-".join([kind, *(f"{k}{v}" for k, v in sizes.items())]))
        for kind in SETTINGS
        for sizes in (MESHES[1:3] if kind == "ragged" else MESHES)
    ],
)
def test_a_mesh_changes_nothing_but_rounding(kind, sizes, alone):
    first, after, sums = alone(kind)
    state, metrics = one_step(prepare(load(*EXPERTS, *SETTINGS[kind], *sized(sizes))), first)
    assert metrics.keys() == sums.keys() and {"losses/balance", "losses/router_z"} < metrics.keys()
    for key, (total, count) in sums.items():
        np.testing.assert_allclose(metrics[key][0] / metrics[key][1], total / count, rtol=2e-5, atol=1e-7, err_msg=key)
    assert (sums["reports/dropped"][0] > 0) == (kind == "capacity")
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        assert np.isclose(a, b, atol=2e-5).mean() > 0.99


def test_each_device_holds_its_experts_alone():
    run = prepare(load(*EXPERTS, *sized(dict(data=1, expert=4, tensor=2))))
    up = run.abstract.params["stack"]["layers"]["block_0"]["mlp"]["up"]
    assert up.shape == (2, 8, 16, 64) and up.sharding.shard_shape(up.shape) == (2, 2, 16, 32)


@pytest.mark.quick
def test_experts_that_the_mesh_does_not_divide_are_refused():
    with pytest.raises(UserError, match=r"n_experts 6 does not divide over mesh.expert = 4; closest that does: 8"):
        prepare(load(*EXPERTS, ("model.experts.n_experts", "6"), ("mesh.data", "2"), ("mesh.expert", "4")))


@pytest.mark.few(2)
@pytest.mark.parametrize("chip", ["tpu", "gpu"])
@pytest.mark.parametrize("kind", ["dropless", "capacity"])
def test_experts_lower_for_many_chips(kind, chip):
    run = prepare(load(*EXPERTS, *SETTINGS[kind]))
    mesh = meshes.mesh_of(chip, data=2, fsdp=2, tensor=2, expert=4)
    abstract = jax.tree.map(lambda leaf: meshes.laid(mesh, leaf), run.abstract)
    batch = pipeline.batch_at(run.task, 0, "train", 16, 0)
    rows = {key: meshes.laid(mesh, array, ("data", "fsdp", "expert")) for key, array in batch.items()}
    tx = optim.optimizer(run.config.optim, 10, group_rules(run.config.model))
    step = train_step(run.model, run.objective, tx, optax.constant_schedule(0.0))
    text = meshes.lowered(mesh, step, abstract, rows)
    assert ("ragged_dot" in text) == (chip == "tpu" and kind == "dropless")
    assert ("all_to_all" in text) == (kind == "capacity")
