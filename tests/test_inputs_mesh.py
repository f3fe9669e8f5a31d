"""On eight devices, in any layout, patches, pairs and contrastive training have the loss of one device."""

import numpy as np
import pytest

from tests.alone import alone, one_step
from train import config as configs
from train.run import prepare

pytestmark = [pytest.mark.scale, pytest.mark.usefixtures("quick_draws")]

SMALL = {"model.width": 16, "model.layers": 1, "batch_size": 8, "model.causal": False, "optim.warmup": 1}
MATCHING = {"data.task": "matching", "data.matching.length": 8, "model.kind": "towers"}
PICTURES = {"data.task": "shapes", "data.shapes.side": 16, "model.patch": 4, "model.position": "axial"}
KINDS = {
    "adding": {"data.task": "adding", "data.adding.length": 16},
    "patches": PICTURES,
    "cls": PICTURES | {"model.pool": "cls", "model.position": "sincos2d"},
    "masked values": PICTURES | {"objective.kind": "masked_values", "objective.masked_values.square": 8},
    "image and text": {"data.task": "shape_questions", "data.shape_questions.side": 16, "model.patch": 4},
    "towers": MATCHING,
    "one row": MATCHING | {"model.kind": "stack"},
    "contrastive": MATCHING | {"objective.kind": "contrastive"},
}
SPREAD = [dict(data=2, fsdp=2, tensor=2)]
SEQUENCE = [dict(data=1, fsdp=2, tensor=2, sequence=2)]
MESHES = {
    "image and text": SPREAD,  # three tokens do not divide over a sequence axis
    "contrastive": [dict(data=8), *SEQUENCE],
    "towers": SPREAD + SEQUENCE,
}


def config(kind: str, **mesh: int):
    settings = SMALL | KINDS[kind] | {f"mesh.{axis}": size for axis, size in mesh.items()}
    return configs.load("configs/debug.py", [(key, str(value)) for key, value in settings.items()])


@pytest.mark.parametrize("kind", KINDS)
def test_any_mesh_has_the_loss_of_one_device(kind):
    meshes = MESHES.get(kind, SEQUENCE)
    runs = [prepare(config(kind, **mesh)) for mesh in meshes]
    first, _, sums = alone(runs[0])  # which knows of no mesh
    for mesh, run in zip(meshes, runs, strict=True):
        _, found = one_step(run, first)
        for key in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[key][0], sums[key][0], rtol=3e-5, err_msg=f"{key} on {mesh}")
            np.testing.assert_allclose(found[key][1], sums[key][1], err_msg=f"{key} on {mesh}")
