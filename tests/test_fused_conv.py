"""The GPU kernels of short convolutions with SiLU, interpreted, against the sum in float64; and that they lower."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.ops import conv
from model.ops import fused_conv as op
from model.ops.conv import short_conv_silu
from tests import meshes
from tests.host_mesh import mesh_of, on_mesh

B = 2


def inputs(L: int, E: int, W: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = dict(x=(B, L, E), kernel=(W, E), bias=(E,), past=(B, W - 1, E))
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def documents(L: int) -> jax.Array:
    """How far each token may look back, where documents of one to nine tokens follow each other."""
    opens = np.random.default_rng(1).random((B, L)) < 0.2
    last = np.maximum.accumulate(np.where(opens, np.arange(L), -5), axis=1)
    return jnp.asarray(np.arange(L) - last, jnp.int32)


def gradients_and_value(run, x: dict) -> tuple[dict, jax.Array]:
    """The gradients of a weighted sum, and what is summed."""

    def objective(x):
        y = run(**x)
        return jnp.sum(y * np.random.default_rng(2).normal(size=y.shape).astype(y.dtype)), y

    return jax.grad(objective, has_aux=True)(x)


def value_and_gradients(run, x: dict) -> dict[str, np.ndarray]:
    grads, y = jax.jit(partial(gradients_and_value, run))(x)
    return {name: np.asarray(leaf, np.float64) for name, leaf in (grads | dict(y=y)).items()}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("L", "E", "W", "packed"),
    [
        (128, 256, 4, False),
        (130, 40, 4, True),
        (2, 8, 4, False),
        (100, 384, 2, True),
        (63, 128, 3, False),
        (7, 1, 5, True),
    ],
    ids=["whole tiles", "ragged documents", "less than a window", "two taps", "a ragged tile", "one channel"],
)
def test_kernels_are_the_convolution(L, E, W, packed):
    x, reach = inputs(L, E, W), documents(L) if packed else None
    with jax.enable_x64(True):
        want = value_and_gradients(lambda **x: short_conv_silu(**x, reach=reach), jax.tree.map(jnp.asarray, x))
    found = value_and_gradients(
        lambda **x: op.fused_conv_silu(**x, reach=reach, interpret=True), jax.tree.map(jnp.float32, x)
    )
    for name, leaf in want.items():
        assert np.abs(found[name] - leaf).max() <= 1e-5 * np.abs(leaf).max(), name


@pytest.mark.few(2)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_inputs_are_summed_wide(dtype, packed):
    """And rounded once: no farther from the sum of the same numbers in float32 than that takes."""
    x, reach = jax.tree.map(jnp.float32, inputs(70, 48, 4)), documents(70) if packed else None
    narrow = x | {name: x[name].astype(dtype) for name in ("x", "past")}
    found = op.fused_conv_silu(**narrow, reach=reach, interpret=True)
    want = short_conv_silu(**jax.tree.map(jnp.float32, narrow), reach=reach)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.float32(found), want, rtol=float(jnp.finfo(dtype).eps), atol=1e-5)


MESHES = [{}, dict(data=4), dict(fsdp=4), dict(tensor=4), dict(sequence=4), dict(data=2, tensor=2, sequence=2)]


def lowered(chip: str, sizes: dict, packed: bool, L: int = 256, E: int = 256, W: int = 4) -> str:
    """The gradient of a convolution with padding, or without, on a mesh."""
    mesh, rows, channels = meshes.mesh_of(chip, **sizes), ("data", "fsdp"), "tensor"
    whole = dict(x=(8, L, E), kernel=(W, E), bias=(E,), past=(8, W - 1, E))
    places = dict(
        x=(rows, "sequence", channels), kernel=(None, channels), bias=(channels,), past=(rows, None, channels)
    )
    dtypes = dict(x=jnp.bfloat16, past=jnp.bfloat16)
    arrays = {
        name: meshes.laid(mesh, jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.float32)), *places[name])
        for name, shape in whole.items()
    }
    reach = meshes.laid(mesh, jax.ShapeDtypeStruct((8, L), jnp.int32), rows, "sequence")

    def objective(arrays, reach):
        marks = (reach, reach >= 0) if packed else ()
        return jnp.sum(short_conv_silu(**arrays, **dict(zip(("reach", "real"), marks, strict=False))) ** 2)

    return meshes.lowered(mesh, jax.value_and_grad(objective), arrays, reach)


@pytest.mark.parametrize("sizes", [pytest.param({}, marks=pytest.mark.quick), *MESHES[1:]], ids=str)
def test_kernels_lower_for_a_gpu_on_every_mesh(sizes):
    for packed in (False, True):
        text = lowered("gpu", sizes, packed)
        assert all(f'name = "conv_{kernel}' in text for kernel in ("outputs", "gradients"))


@pytest.mark.parametrize(
    ("chip", "shape"),
    [("tpu", {}), ("volta", {}), ("amd", {}), ("gpu", dict(L=1)), ("gpu", dict(W=1)), ("gpu", dict(W=9))],
    ids=str,
)
def test_what_kernels_do_not_take_goes_without(chip, shape):
    assert "conv_outputs" not in lowered(chip, {}, True, **shape)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_devices_that_share_all_axes_change_nothing(monkeypatch, packed):
    """Values and gradients of kernels, on each device's rows, channels and stretch of the length."""
    monkeypatch.setattr(conv, "kernels_serve", lambda x, kernel: True)
    monkeypatch.setattr(op, "fused_conv_silu", partial(op.fused_conv_silu, interpret=True))
    x = jax.tree.map(jnp.float32, inputs(64, 32, 4))
    marks = dict(reach=documents(64), real=jnp.asarray(np.random.default_rng(3).random((B, 64)) > 0.1))

    def step(x):
        return gradients_and_value(lambda **x: short_conv_silu(**x, **(marks if packed else {})), x)

    mesh = mesh_of(data=2, tensor=2, sequence=2)
    found = on_mesh(step, mesh)(jax.device_put(x, NamedSharding(mesh, PartitionSpec())))
    monkeypatch.undo()
    for mine, want in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(x)), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.scale
def test_ragged_rows_lower_for_a_gpu():
    for shape in (dict(L=100, E=40), dict(L=3, E=1), dict(L=1000, E=1000)):
        assert "conv_gradients" in lowered("gpu", {}, True, **shape)
