"""An encoder and a decoder on meshes of devices: the loss, the gradient and the next loss of one device."""

import jax
import numpy as np
import pytest

from data import pipeline
from tests.alone import placed
from tests.draws import quickly
from train import config as configs
from train.run import Run, prepare
from train.sharding import put_batch
from train.step import RunState

pytestmark = [pytest.mark.scale, pytest.mark.usefixtures("quick_draws")]

# Sources and targets of 8 tokens, so that the length can be shared out, on either side.
SMALL = {"model.width": 16, "data.reverse.length": 8, "batch_size": 8, "test_lengths": "()", "optim.lr": 1e-2}
SHAPES = {
    "attention": {"model.position": "t5", "model.t5.shared": "True"},
    "mixed": {"model.mixers": "mamba,attention", "model.encoder_mixers": "s4d", "model.layers": 2, "model.mlp": "none"},
    "seq2seq": {},
}
MESHES = [
    {"data": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "tensor": 2, "sequence": 2},
    {"fsdp": 4, "sequence": 2},
]


def prepared(shape: str, **mesh: int) -> Run:
    arch = "seq2seq" if shape == "seq2seq" else "transformer"
    changes = SMALL | SHAPES[shape] | {f"mesh.{axis}": size for axis, size in ({"data": 1} | mesh).items()}
    return prepare(
        configs.load(f"configs/seq2seq.py:arch={arch},size=smoke", [(k, str(v)) for k, v in changes.items()])
    )


def measured(run: Run, state: RunState) -> np.ndarray:
    """Loss and gradient norm of the first steps."""
    found = []
    for batch in pipeline.stream(run.task, 0, run.config.batch_size, stop=2):
        state, sums = run.train_step(state, put_batch(batch, run.batch_sharding))
        found.append([float(sums[key][0] / sums[key][1]) for key in ("loss", "grad_norm")])
    return np.array(found)


@pytest.fixture(scope="module", params=SHAPES)
def alone(request):
    """On one device: the mesh takes all there are, so the others are hidden."""
    with pytest.MonkeyPatch.context() as patched:
        quickly(patched)
        first = jax.devices()[:1]
        patched.setattr(jax, "devices", lambda *_: first)
        run = prepared(request.param)
        first = jax.device_get(run.init())
        return request.param, first, measured(run, placed(first, run))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_changes_nothing(alone, mesh):
    shape, first, wanted = alone
    if shape == "seq2seq" and "sequence" in mesh:
        pytest.skip("its loops go along whole rows")
    run = prepared(shape, **mesh)
    np.testing.assert_allclose(measured(run, placed(first, run)), wanted, rtol=2e-4)
