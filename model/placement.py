"""Where a program will run: the platform it is made for, and what the mesh in force leaves on one device.

`jax.default_backend()` is this machine's, and a program may be compiled for another; the shape of a traced array is
the whole array's, and a device may hold a part. Whatever chooses by platform or by size asks here.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

# Of a logical axis; several names: one that is shared out by the mesh axes of all of them.
Name = str | tuple[str, ...] | None

# Compute capabilities, for programs made on a machine without such a GPU.
GPUS = {
    **{"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "A10G": (8, 6), "A40": (8, 6), "L4": (8, 9)},
    **{"L40": (8, 9), "L40S": (8, 9), "H100": (9, 0), "H200": (9, 0), "GH200": (9, 0), "B200": (10, 0)},
    **{"GB200": (10, 0), "B300": (10, 3), "GB300": (10, 3)},
}


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: that of the mesh in force, else this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def one_cpu() -> bool:
    """Whether one CPU does all of it: its compiler is quick at other forms, which shared arrays would not stand."""
    return platform() == "cpu" and math.prod(jax.sharding.get_abstract_mesh().shape.values()) == 1


def capability() -> tuple[int, int]:
    """The compute capability of the NVIDIA GPU that a program is made for; (0, 0) where it is made for none.

    The platform `gpu` is AMD's too.
    """
    if platform() != "gpu":
        return 0, 0
    meant = jax.sharding.get_abstract_mesh().abstract_device
    for device in jax.devices():
        if meant is None or device.device_kind == meant.device_kind:
            version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
            return (int(version[1]), int(version[2])) if version else (0, 0)
    return next((GPUS[word] for word in re.split(r"[\s-]", meant.device_kind) if word in GPUS), (0, 0))


def chip() -> str:
    """The platform and, of an NVIDIA GPU, its compute capability: what to call it in a message."""
    version = capability()
    return f"gpu of compute capability {version[0]}.{version[1]}" if any(version) else platform()


def axes(name: Name) -> tuple[str, ...]:
    """The mesh axes that share out a logical axis, by the rules in force; none inside a shard_map that has split it."""
    mesh, rules = jax.sharding.get_abstract_mesh(), dict(nn.get_logical_axis_rules())
    found = []
    for one in name if isinstance(name, tuple) else (name,):
        given = rules.get(one) or ()
        found += (given,) if isinstance(given, str) else given
    return tuple(axis for axis in found if mesh.shape.get(axis, 1) > 1 and axis not in mesh.manual_axes)


def shards(name: Name, size: int | None = None) -> int:
    """Into how many parts a logical axis is split; 1 where they do not divide its size, which keeps it whole."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in axes(name))
    return 1 if size is not None and size % parts else parts


def spec(names: Iterable[Name], shape: Iterable[int]) -> PartitionSpec:
    """How an array with these logical axes lies on the mesh; an axis that does not divide is whole."""
    pairs = zip(names, shape, strict=True)
    return PartitionSpec(*(axes(name) or None if shards(name, size) > 1 else None for name, size in pairs))


def held(names: Iterable[Name], shape: Iterable[int]) -> tuple[int, ...]:
    """The shape of the part of such an array that one device holds."""
    return tuple(size // shards(name, size) for name, size in zip(names, shape, strict=True))


def on_each_device(run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`run` on the parts that a device holds: the compiler, which cannot look into kernels, would gather them all."""
    mesh = jax.sharding.get_abstract_mesh()
    split = set(mesh.axis_names) - set(mesh.manual_axes)
    if math.prod(mesh.shape[axis] for axis in split) == 1:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=split, check_vma=False)
