"""Where a program will run: the platform it is made for, and what the mesh in force leaves on one device.

`jax.default_backend()` is this machine's, and a program may be compiled for another; the shape of a traced array is
the whole array's, and a device may hold a part. Whatever chooses by platform or by size asks here.
"""

import math
from collections.abc import Iterable

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: that of the mesh in force, else this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def axes(name: str | None) -> tuple[str, ...]:
    """The mesh axes that share out a logical axis, by the rules in force; none inside a shard_map that has split it."""
    mesh = jax.sharding.get_abstract_mesh()
    found = dict(nn.get_logical_axis_rules()).get(name) or ()
    found = (found,) if isinstance(found, str) else found
    return tuple(axis for axis in found if mesh.shape.get(axis, 1) > 1 and axis not in mesh.manual_axes)


def shards(name: str | None, size: int | None = None) -> int:
    """Into how many parts a logical axis is split; 1 where they do not divide its size, which keeps it whole."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in axes(name))
    return 1 if size is not None and size % parts else parts


def spec(names: Iterable[str | None], shape: Iterable[int]) -> PartitionSpec:
    """How an array with these logical axes lies on the mesh; an axis that does not divide is whole."""
    pairs = zip(names, shape, strict=True)
    return PartitionSpec(*(axes(name) or None if shards(name, size) > 1 else None for name, size in pairs))


def held(names: Iterable[str | None], shape: Iterable[int]) -> tuple[int, ...]:
    """The shape of the part of such an array that one device holds."""
    return tuple(size // shards(name, size) for name, size in zip(names, shape, strict=True))
