"""What programs ask about where they run: answers come from the mesh in force, not from this machine."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from model import placement
from tests import meshes

TPU = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
MESH = AbstractMesh((4, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, abstract_device=TPU)
RULES = (("batch", ("data", "fsdp")), ("heads", ("tensor",)), ("length", ("sequence",)))

pytestmark = pytest.mark.quick


def test_without_a_mesh_everything_is_here_and_whole():
    assert placement.platform() == "cpu"
    with nn.logical_axis_rules(RULES):
        assert placement.held(("batch", "heads"), (16, 4)) == (16, 4)


def test_on_a_mesh():
    with jax.sharding.use_abstract_mesh(MESH), nn.logical_axis_rules(RULES):
        assert placement.platform() == "tpu"
        assert placement.held(("batch", "length", "heads", None), (16, 64, 4, 8)) == (2, 64, 2, 8)
        assert placement.spec(("batch", "length", "heads"), (16, 64, 3)) == P(("data", "fsdp"), None, None)
        assert placement.shards("heads", 3) == 1 and placement.shards("heads") == 2


def test_an_axis_shared_out_by_several():
    mesh = meshes.mesh_of("tpu", tensor=2, sequence=4)
    with meshes.in_force(mesh):
        assert placement.axes(("heads", "length")) == ("tensor", "sequence")
        assert placement.spec((("heads", "length"), None), (16, 3)) == P(("tensor", "sequence"), None)
        assert placement.held((("heads", "length"), "length"), (12, 12)) == (12, 3)


@pytest.mark.parametrize(
    ("chip", "capability", "name"),
    [
        ("gpu", (9, 0), "gpu of compute capability 9.0"),
        ("ampere", (8, 0), "gpu of compute capability 8.0"),
        ("volta", (7, 0), "gpu of compute capability 7.0"),
        ("amd", (0, 0), "gpu"),
        ("tpu", (0, 0), "tpu"),
    ],
)
def test_the_gpu_that_a_program_is_made_for(chip, capability, name):
    with meshes.in_force(meshes.mesh_of(chip)):
        assert (placement.capability(), placement.chip()) == (capability, name)


@pytest.mark.parametrize(("version", "capability"), [("8.6", (8, 6)), ("gfx942", (0, 0))])
def test_the_gpu_that_is_here(version, capability, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=version, device_kind="any")])
    assert placement.capability() == capability


def test_inside_a_shard_map_what_it_split_is_whole():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def look(x):
        seen.append((placement.shards("batch"), placement.shards("heads")))
        return x

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES):
        split = jax.shard_map(look, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        jax.eval_shape(split, jax.ShapeDtypeStruct((8, 2), "float32"))
    assert seen[-1] == (1, 2)
