"""Chips that programs are compiled for, and how many of them a topology joins.

`v5e:16x16` is a slice of TPUs by its shape, `2xv5e:16x16` two of them joined by the data centre's network, `h100:64`
GPUs in nodes of eight, and `cpu:256` so many devices played by this machine's CPU. A number of TPU chips stands for the
shape of that many: `v5e:256` is `v5e:16x16`.
"""

import math
import re
from dataclasses import dataclass

from model.errors import UserError, choose, closest

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """What one can do, as its maker tells."""

    platform: str
    kind: str  # as JAX names the device
    cores: int | None = None  # multiprocessors of a GPU
    peak: float = 0.0  # bfloat16 operations a second, dense; 0: not known, and so below
    hbm: float = 0.0  # bytes of memory
    hbm_rate: float = 0.0  # bytes a second that the memory moves
    near_rate: float = 0.0  # that a chip receives from its slice, along one axis of a torus or over NVLink
    far_rate: float = 0.0  # that it receives from other slices or nodes
    joined: int = 1  # chips that the fast network joins at most
    shapes: tuple[str, ...] = ()  # that a slice may have


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
DEEP += ("16x16x24",)
# TPUs: docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e, read in November 2026. They give both directions of all links
# together (400, 1200 and 800 GB/s); a ring along one of the torus's 2, 3 and 2 axes receives a half of an axis's share.
# The data centre's network: 50 Gbit/s a v5p chip; 6.4 and 25.6 Tbit/s a pod of 256 v5e and v6e. H100 SXM, dense, as
# glennklockwood.com/garden/processors/h100 has it from NVIDIA; both directions of NVLink are 900 GB/s together. Nodes
# of eight with 400 Gbit/s of InfiniBand for each: those of mlcommons/inference_results_v3.1, closed/Dell/systems.
CHIPS = {
    "v5e": Chip("tpu", "TPU v5 lite", None, 197e12, 16 * GIB, 819e9, 100e9, 3.125e9, 256, FLAT),
    "v5p": Chip("tpu", "TPU v5", None, 459e12, 95 * GIB, 2765e9, 200e9, 6.25e9, 6144, DEEP),
    "v6e": Chip("tpu", "TPU v6 lite", None, 918e12, 32 * GIB, 1638e9, 200e9, 12.5e9, 256, FLAT),
    "h100": Chip("gpu", "NVIDIA H100 80GB HBM3", 132, 989e12, 80e9, 3350e9, 450e9, 50e9, 8),
    "cpu": Chip("cpu", "cpu", joined=4096),
}
FORM = re.compile(r"(?:(\d{1,3})x)?([a-z]\w*):(\d{1,4}(?:x\d{1,2})*)")
MOST = 4096  # devices that a topology may have: more take this machine too long to go through


@dataclass(frozen=True)
class Topology:
    """So many slices of so many chips."""

    name: str  # of a chip
    shape: str  # of a slice: its sides, or a number of chips
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.name]

    @property
    def each(self) -> int:
        """Chips of a slice."""
        return size(self.shape)

    @property
    def chips(self) -> int:
        return self.slices * self.each

    def __str__(self) -> str:
        if self.chip.platform == "gpu":
            return f"{self.name}:{self.chips}"
        return f"{self.slices}x{self.name}:{self.shape}" if self.slices > 1 else f"{self.name}:{self.shape}"


def parse(text: str) -> Topology:
    """The topology that a name stands for."""
    found = FORM.fullmatch(text)
    if not found:
        known = [f"{name}:{chip.shapes[-1] if chip.shapes else 8}" for name, chip in CHIPS.items()]
        near = closest(text, known) or f"; closest: {known[0]}"
        raise UserError(
            f"--topology is {text!r}; it takes CHIP:SHAPE or CHIP:NUMBER, with SLICESx before it for several, such as "
            f"{', '.join(known)} or 2x{known[0]}{near}"
        )
    slices, name, shape = int(found[1] or 1), found[2], found[3]
    chip = choose("chip", name, CHIPS)
    topology = of_shape(text, name, chip, shape) if chip.shapes else of_number(text, name, chip, shape)
    topology = Topology(topology.name, topology.shape, topology.slices * slices)
    if not 1 <= topology.chips <= MOST:
        raise UserError(f"--topology is {text!r}, which is {topology.chips} chips; allowed: 1 to {MOST}")
    return topology


def of_shape(text: str, name: str, chip: Chip, shape: str) -> Topology:
    """A slice of TPUs, whose shape must be one that is offered."""
    if "x" not in shape:
        sizes = {size(each): each for each in chip.shapes}
        if int(shape) not in sizes:
            near, allowed = closest(int(shape), sizes), ", ".join(map(str, sizes))
            raise UserError(f"--topology is {text!r}; a slice of {name} has {allowed} chips{near}")
        return Topology(name, sizes[int(shape)])
    if shape not in chip.shapes:
        near = min(chip.shapes, key=lambda each: abs(math.log(size(each) / max(size(shape), 1))))
        allowed = ", ".join(chip.shapes)
        raise UserError(f"--topology is {text!r}; a slice of {name} is {allowed}; closest: {name}:{near}")
    return Topology(name, shape)


def of_number(text: str, name: str, chip: Chip, number: str) -> Topology:
    """GPUs in whole nodes, or a part of one; or devices of a CPU."""
    if "x" in number:
        raise UserError(f"--topology is {text!r}; {name} takes a number; closest: {name}:{max(size(number), 1)}")
    count = int(number)
    if count <= chip.joined:
        return Topology(name, number)
    if count % chip.joined:
        near = round(count / chip.joined) * chip.joined
        raise UserError(f"--topology is {text!r}; beyond {chip.joined}, {name} come by nodes; closest: {name}:{near}")
    return Topology(name, str(chip.joined), count // chip.joined)


def size(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))
