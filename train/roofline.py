"""How long a step takes at the least: its work over what a chip can do, and its exchanges over what the network can.

Exchanges are reckoned as rings: of what a group of g devices gathers or scatters, each receives (g - 1) / g, and of a
sum that all get, twice that. A group that lies in several slices first exchanges among the chips that lie alike in each
slice, over the data centre's network, which each of them does for its part; then within the slices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from train.chips import Chip
from train.hlo import Collective, Work
from train.sharding import over_slices


@dataclass(frozen=True)
class Times:
    """Seconds of a step that each takes alone."""

    compute: float
    hbm: float
    near: float  # exchanges within slices
    far: float  # and between them

    @property
    def overlapped(self) -> float:
        """If all of them go on at once."""
        return max(self.compute, self.hbm, self.near, self.far)

    @property
    def apart(self) -> float:
        """If chips do nothing while they exchange."""
        return max(self.compute, self.hbm) + self.near + self.far

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = {"compute": self.compute, "memory": self.hbm, "network": self.near, "network between slices": self.far}
        return max(times, key=times.__getitem__)


def times(work: Work, state_bytes: float, chip: Chip, mesh: Mapping[str, int], slices: int) -> Times:
    """`state_bytes`: of what the step is given and makes, which go through memory besides the products' operands."""
    near = far = 0.0
    for each in work.collectives:
        inner, outer = received(each, mesh, slices)
        near, far = near + inner / chip.near_rate, far + outer / chip.far_rate
    return Times(work.flops / chip.peak, (work.moved + state_bytes) / chip.hbm_rate, near, far)


def received(each: Collective, mesh: Mapping[str, int], slices: int) -> tuple[float, float]:
    """Bytes that a device receives from its own slice and from others."""
    group = each.group or range(math.prod(mesh.values()))
    g, s = (slices, slices) if each.slices else (len(group), len(set(slice_of(group, mesh, slices))))
    w = g / s
    if each.kind == "collective-permute":
        return (each.size, 0.0) if s == 1 else (0.0, each.size)
    if "all-to-all" in each.kind:
        return each.size * (w - 1) / g, each.size * (s - 1) / s
    times = 2 if each.kind == "all-reduce" else 1
    return times * each.size * (w - 1) / w, times * each.size * (s - 1) / s / w


def slice_of(places: Sequence[int], mesh: Mapping[str, int], slices: int) -> list[int]:
    """The slice of each device, given by its place in the mesh."""
    shape = list(mesh.values())
    across, within = over_slices(shape, slices)
    at = np.asarray(np.unravel_index(np.asarray(places, int), shape))
    return list(np.ravel_multi_index(tuple(at // np.asarray(within)[:, None]), across))


def axes_between(mesh: Mapping[str, int], slices: int) -> tuple[str, ...]:
    """The mesh axes that lie across slices."""
    across, _ = over_slices(list(mesh.values()), slices)
    return tuple(axis for axis, n in zip(mesh, across, strict=True) if n > 1)


def axes_of(group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    if not group:
        return tuple(axis for axis, n in mesh.items() if n > 1)
    at = np.asarray(np.unravel_index(np.asarray(group), list(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, at, strict=True) if len(set(row)) > 1)
