"""Programs for machines that need not be here: abstract devices, meshes of them, and lowering for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from configs.base import get_config
from train.sharding import AXES, rules_of

RULES = rules_of(get_config().mesh)
CHIPS = {
    "tpu": AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu"),
    "gpu": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
    "ampere": AbstractDevice(device_kind="NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu"),
    "volta": AbstractDevice(device_kind="Tesla V100-SXM2-16GB", num_cores=80, platform="gpu"),
    "amd": AbstractDevice(device_kind="AMD Instinct MI300X", num_cores=304, platform="gpu"),
    "cpu": AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu"),
}
LOWERED_FOR = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}


def mesh_of(chip: str, **sizes: int) -> AbstractMesh:
    """A mesh with all five axes, of size 1 unless given."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(shape, AXES, (AxisType.Auto,) * len(AXES), abstract_device=CHIPS[chip])


@contextmanager
def in_force(mesh: AbstractMesh) -> Iterator[None]:
    with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(RULES):
        yield


def laid(mesh: AbstractMesh, leaf: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    """An array that lies on the mesh so."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def lowered(mesh: AbstractMesh, function: Callable, *args: Any) -> str:
    """The program of a function on that mesh, as text."""

    def traced(*args):
        with in_force(mesh):
            return function(*args)

    platform = LOWERED_FOR[mesh.abstract_device.platform]
    return jax.jit(traced).trace(*args).lower(lowering_platforms=(platform,)).as_text()
