"""The device mesh, and how arrays lie on it.

Parameters carry logical axis names; the config's rules map those to mesh axes. A dimension that its mesh axes do not
divide is kept whole (one key-value head on two tensor devices, say).
"""

import contextlib
import contextvars
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from data.pipeline import Batch
from model import placement
from model.errors import UserError
from model.paths import by_path

AXES = ("data", "fsdp", "tensor", "sequence", "expert")

Rules = list[tuple[str, tuple[str, ...]]]  # logical axis -> mesh axes


def make_mesh(config: Mapping[str, Any], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices, one axis a kind of parallelism; one size may be -1: what the others leave over."""
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(config, len(devices))
    return Mesh(laid_out(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_shape(config: Mapping[str, Any], n: int) -> list[int]:
    """The size of each axis over n devices."""
    sizes = [config[axis] for axis in AXES]
    given = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise UserError(f"mesh sizes must be positive, and at most one may be -1: {given}")
    fixed = math.prod(size for size in sizes if size > 0)
    if n % fixed or (-1 not in sizes and n != fixed):
        needs = f"a multiple of {fixed}" if -1 in sizes else f"{fixed}"
        others = [f"mesh.{axis}=1" for axis, size in zip(AXES[1:], sizes[1:], strict=True) if size != 1]
        near = ", ".join(["mesh.data=-1", *([] if n % math.prod(sizes[1:]) == 0 else others)])
        raise UserError(f"mesh {given} needs {needs} devices, and there are {n}; closest: {near}")
    return [n // fixed if size == -1 else size for size in sizes]


def laid_out(shape: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array: neighbours along an axis are near each other, and the first axes cross the slices.

    A slice is what one fast network joins: a TPU slice, or the GPUs of a node.
    """
    across, within = over_slices(shape, len({getattr(device, "slice_index", 0) for device in devices}))
    # Splitting a physical axis lets fsdp=4, tensor=2 lie on a torus of 4 x 4; it is done only where nothing else fits.
    if math.prod(across) == 1:
        return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def over_slices(shape: Sequence[int], slices: int) -> tuple[list[int], list[int]]:
    """How a mesh lies over slices: of each axis, the part that crosses them and the part within one."""
    across = []
    for size in shape:
        across.append(math.gcd(size, slices))
        slices //= across[-1]
    return across, [size // outer for size, outer in zip(shape, across, strict=True)]


def rules_of(config: Mapping[str, Any]) -> Rules:
    rules = [(name, tuple(axes)) for name, axes in config["rules"]]
    for name, axes in rules:
        for axis in axes:
            if axis not in AXES:
                raise UserError(f"mesh rule for {name!r} names axis {axis!r}; the mesh has {', '.join(AXES)}")
        if len(set(axes)) < len(axes):
            raise UserError(f"mesh rule for {name!r} names an axis twice: {', '.join(axes)}")
        if [other for other, _ in rules].count(name) > 1:
            raise UserError(f"mesh.rules has two rules for {name!r}; give all its axes in one")
    return rules


# Logical axes of one array: a mesh axis can share out one of the two.
TOGETHER = (
    *(("batch", other) for other in ("length", "heads", "inner")),
    *(("length", other) for other in ("heads", "inner")),
    ("experts", "mlp"),
)


def check_rules(mesh: Mesh, rules: Rules) -> None:
    """Refuses rules by which an array would be split twice over the same devices."""
    given = dict(rules)
    for one, other in TOGETHER:
        shared = [axis for axis in given.get(one, ()) if axis in given.get(other, ()) and mesh.shape[axis] > 1]
        if shared:
            raise UserError(
                f"mesh.rules give mesh.{shared[0]} to {one!r} and to {other!r}, which are axes of the same arrays; "
                f"give it to one of them"
            )


# The device that those of a mesh stand for while a program is made for others; None: themselves.
_meant: contextvars.ContextVar[AbstractDevice | None] = contextvars.ContextVar("meant", default=None)


@contextlib.contextmanager
def standing_for(device: AbstractDevice) -> Iterator[None]:
    """Programs traced meanwhile are made for another device than those of their mesh, which are its stand-ins."""
    token = _meant.set(device)
    try:
        yield
    finally:
        _meant.reset(token)


@contextlib.contextmanager
def in_force(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """The mesh and the axis rules that whatever asks `model.placement` will find."""
    abstract = mesh.abstract_mesh
    if (device := _meant.get()) is not None:
        abstract = AbstractMesh(abstract.axis_sizes, abstract.axis_names, abstract.axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(abstract), nn.logical_axis_rules(rules):
        yield


def check_batch(mesh: Mesh, rules: Rules, batch_size: int, length: int, accumulate: int) -> None:
    """Refuses a batch that the mesh cannot share out evenly."""
    with in_force(mesh, rules):
        rows, pieces = placement.shards("batch"), placement.shards("length")
    check_rows(rules, batch_size, rows, accumulate)
    if length % pieces:
        near = max(pieces, round(length / pieces) * pieces)
        raise UserError(
            f"length {length} does not divide over {product(rules, 'length')} = {pieces}; closest that does: {near}"
        )


def check_rows(rules: Rules, batch_size: int, shares: int, accumulate: int) -> None:
    """Refuses a batch whose rows cannot be shared out so."""
    micro = batch_size // accumulate
    if micro % shares:
        near = max(shares, round(micro / shares) * shares) * accumulate
        raise UserError(
            f"batch_size {batch_size} (in {accumulate} micro-batches) does not divide over "
            f"{product(rules, 'batch')} = {shares}; closest that does: {near}"
        )


def product(rules: Rules, name: str) -> str:
    """The mesh sizes by which a logical axis is divided, as a user sets them."""
    return " x ".join(f"mesh.{axis}" for axis in dict(rules)[name])


def fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding a spec asks for, less the axes that do not divide their dimension."""

    def keep(axes, size):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        return axes if size % math.prod(mesh.shape[name] for name in names) == 0 else None

    return NamedSharding(mesh, PartitionSpec(*(keep(a, s) for a, s in zip(spec, shape, strict=False))))


def shardings(abstract: Any, mesh: Mesh, rules: Rules) -> Any:
    """The sharding of every leaf of a tree of boxed (logically named) abstract arrays."""
    specs = nn.logical_to_mesh(nn.get_partition_spec(abstract), rules)
    return jax.tree.map(lambda leaf, spec: fitting(spec, leaf.shape, mesh), nn.unbox(abstract), specs)


# Logical axes of parameters whose sizes follow from a config, in words.
SIZED = dict(heads="heads", inner="inner channels", mlp="hidden channels", experts="experts", embed="channels")


def kept_whole(params: Any, mesh: Mesh, rules: Rules) -> list[str]:
    """A line for what the mesh is to share out and no array of a mixer or MLP has in parts; params: boxed.

    Of a mixer's heads it is enough if its queries' are shared: fewer key-value heads are then repeated.
    """
    sizes: dict[tuple[str, str], set[int]] = {}
    names = by_path(nn.get_partition_spec(params))
    for path, leaf in by_path(nn.unbox(params)).items():
        module = re.match(r"(.*?block_\d+/)?[^/]+", path)[0]
        for name, size in zip(names[path], leaf.shape, strict=False):
            if name in SIZED:
                sizes.setdefault((module, name), set()).add(size)
    lines = {}
    for (_, name), found in sizes.items():
        parts, size = math.prod(mesh.shape[axis] for axis in dict(rules).get(name, ())), max(found)
        if size > 1 and all(each % parts for each in found):
            over, fewer = product(rules, name), math.gcd(size, parts)
            lines[name, size] = (
                f"{size} {SIZED[name]} do not divide over {over} = {parts}, so every device holds all of them; closest "
                f"that do: {f'{over} = {fewer}, or ' if fewer > 1 else ''}{-(-size // parts) * parts} {SIZED[name]}"
            )
    return list(lines.values())


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """How the rows of a batch lie on the mesh."""
    with in_force(mesh, rules):
        return NamedSharding(mesh, PartitionSpec(placement.axes("batch")))


def put_batch(batch: Batch, sharding: NamedSharding) -> dict[str, jax.Array]:
    """A batch as global arrays. Of its rows this host makes those that its devices hold, each once."""
    held = held_rows(sharding, batch.size)
    return _put(batch.rows(held), held, batch.size, sharding, axis=0)


def put_batches(batches: Sequence[Batch], most: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """The same of several, stacked `[most, ...]` and sent as one; the last stands for those that are missing."""
    size, stacked = batches[0].size, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    held = held_rows(sharding, size)
    made = [batch.rows(held) for batch in batches]
    made += made[-1:] * (most - len(made))
    return _put({key: np.stack([rows[key] for rows in made]) for key in made[0]}, held, size, stacked, axis=1)


def _put(
    arrays: Mapping[str, np.ndarray], held: np.ndarray, size: int, sharding: NamedSharding, axis: int
) -> dict[str, jax.Array]:
    """Global arrays, of whose rows, `size` along an axis, those held are given."""

    def part(array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[axis].indices(size)
        return array[(slice(None),) * axis + (slice(*np.searchsorted(held, (start, stop))),)]

    return {
        key: jax.make_array_from_callback(
            (*array.shape[:axis], size, *array.shape[axis + 1 :]), sharding, functools.partial(part, array)
        )
        for key, array in arrays.items()
    }


@functools.lru_cache(maxsize=64)
def held_rows(sharding: NamedSharding, size: int) -> np.ndarray:
    """The numbers, in order, of the rows that this host's devices hold of a batch of `size`."""
    places = sharding.addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for index in places]))
