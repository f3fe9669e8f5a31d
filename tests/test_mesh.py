"""A mesh can be made wherever the README sends people: on every shape of slice, on several of them, on GPU nodes."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from model.errors import UserError
from train import config as configs
from train.run import prepare
from train.sharding import AXES, check_rules, make_mesh, mesh_shape, rules_of

# What README's pod command asks for.
README = dict(data=-1, fsdp=4, tensor=2, sequence=1, expert=1)


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as its place in a mesh depends on."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    slice_index: int = 0
    core_on_chip: int = 0
    process_index: int = 0


def chips(kind: str, torus: tuple[int, ...], slices: int = 1) -> list[Device]:
    places = [(s, *place) for s in range(slices) for place in np.ndindex(*torus)]
    return [Device(i, "tpu", kind, place, s) for i, (s, *place) in enumerate(places) for place in [tuple(place)]]


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind, torus",
    [
        ("TPU v4", (4, 4, 4)),
        ("TPU v5 lite", (4, 4, 1)),
        ("TPU v5 lite", (16, 16, 1)),
        ("TPU v5p", (2, 2, 4)),
        ("TPU v5p", (4, 4, 4)),
        ("TPU v6 lite", (2, 4, 1)),
        ("TPU v6 lite", (4, 4, 1)),
        ("TPU v6 lite", (8, 8, 1)),
        ("TPU v6 lite", (16, 16, 1)),
    ],
)
def test_the_readme_mesh_can_be_made(kind, torus):
    devices = chips(kind, torus)
    for sizes in (README, README | dict(fsdp=2, sequence=2), README | dict(fsdp=1, tensor=8)):
        mesh = make_mesh(sizes, devices)
        fixed = math.prod(size for size in sizes.values() if size > 0)
        assert dict(mesh.shape) == sizes | {"data": len(devices) // fixed}
        assert sorted(device.id for device in mesh.devices.flat) == list(range(len(devices)))


@pytest.mark.quick
def test_only_the_outer_axes_cross_slices():
    mesh = make_mesh(README, chips("TPU v6 lite", (4, 4, 1), slices=2))
    index = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert mesh.shape["data"] == 4
    assert (index == index[:, :1, :1, :1, :1]).all(), "fsdp or tensor crosses slices"
    assert sorted(index[:, 0, 0, 0, 0]) == [0, 0, 1, 1]

    # Two nodes of four GPUs: data alone cannot take the step between them, so fsdp shares it.
    nodes = [Device(i, "gpu", "NVIDIA H200", (), slice_index=i // 4) for i in range(8)]
    mesh = make_mesh(README | dict(data=1), nodes)
    index = np.vectorize(lambda device: device.slice_index)(mesh.devices)[0, :, :, 0, 0]
    assert index.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


@pytest.mark.quick
def test_a_mesh_over_some_devices():
    mesh = make_mesh(README | dict(fsdp=2, tensor=1), jax.devices()[:4])
    assert mesh.axis_names == AXES and mesh.devices.size == 4 and mesh.shape["data"] == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    "rules",
    [
        (("batch", ("fsdp", "tensor")), ("heads", ("tensor",))),
        (("batch", ("tensor",)), ("inner", ("tensor",))),
        (("batch", ("tensor",)), ("length", ("tensor",))),
        (("length", ("tensor",)), ("heads", ("tensor",))),
        (("experts", ("tensor",)), ("mlp", ("tensor",))),
    ],
)
def test_one_mesh_axis_does_not_split_an_array_twice(rules):
    config = configs.load("configs/debug.py", [("mesh.tensor", "2"), ("mesh.rules", repr(rules))])
    told = f"mesh.tensor to {rules[0][0]!r} and to .*give it to one of them"
    with pytest.raises(UserError, match=told):
        prepare(config)
    config = configs.load("configs/debug.py", [("mesh.rules", repr(rules))])
    check_rules(make_mesh(config.mesh), rules_of(config.mesh))  # of one device there is nothing to share


def whole(given: str, axis: str, instead: str) -> list[str]:
    told = f"{given} do not divide over {axis} = 8, so every device holds all of them"
    return [f"{told}; closest that do: {axis} = 4, or {instead}"]


@pytest.mark.parametrize(
    ("sizes", "model", "told"),
    [
        (dict(data=1, tensor=8), {}, whole("4 heads", "mesh.tensor", "8 heads")),
        (dict(data=1, fsdp=8), {"width": 20, "attention.n_heads": 5}, whole("20 channels", "mesh.fsdp", "24 channels")),
        (dict(data=2, tensor=4), {}, []),
        (dict(data=2, tensor=4), {"attention.n_kv_heads": 1}, []),
        (dict(data=8), {}, []),
    ],
    ids=["heads", "width", "shared", "multi-query", "nothing to share"],
)
def test_what_a_mesh_cannot_share_out_is_told_once(sizes, model, told, caplog):
    given = {f"mesh.{axis}": size for axis, size in sizes.items()} | {f"model.{key}": model[key] for key in model}
    with caplog.at_level("WARNING"):
        prepare(configs.load("configs/debug.py", [(key, str(value)) for key, value in given.items()]))
    assert [record.message for record in caplog.records] == told


def test_a_mesh_for_other_devices_is_refused_with_the_closest():
    for sizes, told in {
        (("data", 4),): "needs 4 devices, and there are 8; closest: mesh.data=-1$",
        (
            ("data", -1),
            ("tensor", 3),
        ): "multiple of 3 devices, and there are 8; closest: mesh.data=-1, mesh.tensor=1$",
    }.items():
        with pytest.raises(UserError, match=told):
            mesh_shape(README | dict(fsdp=1, tensor=1) | dict(sizes), 8)
