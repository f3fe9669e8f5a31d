"""What a compiled program does on one device, read from its text: products, bytes, and collectives by kind.

XLA's own cost analysis counts the body of a loop once. Here every instruction counts as often as the loops around it go
round, so that layers in a scan, micro-batches and tiles are all counted. Of a choice every branch counts alike, which
is right for tiles that a causal mask may hide: half of them are.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from train.kernels import Call
from train.windows import multiplied

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
BYTES |= {f"{kind}{bits}": bits // 8 for kind in "su" for bits in (8, 16, 32, 64)}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)")
HEADER = re.compile(r"\s*(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
CLOSED = re.compile(r"\s*\}(, execution_thread=.*)?$")  # with the name of the core, if it is another
OPCODE = re.compile(r"\s*([\w\-]+)\(")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
FAR = {kind.replace("-", "_").upper(): kind for kind in COLLECTIVES}  # as the runtime names them
KERNELS = ("tpu_custom_call", "__cudnn", "triton", "mosaic")

Shape = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shapes: tuple[Shape, ...]  # of what it makes
    opcode: str
    operands: tuple[str, ...]
    text: str  # its attributes
    root: bool


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.root)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange among one choice of devices."""

    kind: str
    group: tuple[int, ...]  # the devices of its first group, by their place in the mesh; of a permute, a pair
    size: float  # bytes a device ends up with, or for a reduce-scatter begins with; of all rounds together
    count: int  # rounds
    slices: bool = False  # of devices that lie alike in each slice, one there: the group is empty


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device in one run of the program."""

    flops: float  # of products, convolutions, Fourier transforms, and kernels that are known
    moved: float  # bytes of operands and results: theirs, and of all kernels
    collectives: tuple[Collective, ...]
    kernels: int  # calls of others, whose work does not show in the program
    open_loops: int  # loops whose number of rounds is not known when compiled; they count once


def array_shapes(text: str) -> tuple[Shape, ...]:
    return tuple((kind, tuple(map(int, filter(None, dims.split(","))))) for kind, dims in ARRAY.findall(text))


def numbers(shape: Shape) -> int:
    return math.prod(shape[1])


def size(shapes: tuple[Shape, ...]) -> float:
    return sum(BYTES.get(shape[0], 1) * numbers(shape) for shape in shapes)


def balanced(text: str) -> int:
    """Where the bracket that the text begins with is closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    return len(text)


def instruction(line: str) -> Instruction | None:
    found = LINE.match(line)
    if not found:
        return None
    root, name, rest = bool(found[1]), found[2], found[3]
    end = balanced(rest) if rest.startswith("(") else rest.find(" ")
    made, rest = rest[:end], rest[end:]
    opcode = OPCODE.match(rest)
    if not opcode:
        return None
    rest = rest[opcode.end() - 1 :]
    end = balanced(rest)
    operands = tuple(re.findall(r"%([\w.\-#]+)", rest[:end]))
    if opcode[1] in ("constant", "parameter"):
        operands = (rest[1 : end - 1],)
    return Instruction(name, array_shapes(made), opcode[1], operands, rest[end:], root)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and which of them it begins with."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if header := HEADER.match(line):
                current = Computation(header[2], {})
                entry = header[2] if header[1] else entry
        elif CLOSED.match(line):
            computations[current.name] = current
            current = None
        elif found := instruction(line):
            for name in found.operands:
                if "#" in name:
                    current.instructions[name] = element(name, current)
            current.instructions[found.name] = found
    return computations, entry


def element(name: str, inside: Computation) -> Instruction:
    """What newer compilers write as `a#1`: that part of a tuple, with no instruction of its own."""
    whole, _, index = name.partition("#")
    made = inside.instructions[whole].shapes[int(index)]
    return Instruction(name, (made,), "get-tuple-element", (whole,), f", index={index}", False)


def called(each: Instruction, key: str) -> list[str]:
    """The computations that an instruction names under a key."""
    found = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", each.text)
    if not found:
        return []
    return re.findall(r"%?([\w.\-]+)", found[1] if found[1] is not None else found[2])


def op_name(each: Instruction) -> str:
    """What JAX calls the operation, by the functions that it is in; empty where the compiler made it."""
    found = re.search(r'\bop_name="([^"]*)"', each.text)
    return found[1] if found else ""


PASSED = ("bitcast", "convert", "copy", "reshape", "transpose")


def source(name: str, inside: Computation) -> Instruction | None:
    """What a value is a copy of."""
    each = inside.instructions.get(name)
    while each is not None and each.opcode in PASSED:
        each = inside.instructions.get(each.operands[0])
    return each


def rounds(loop: Instruction, inside: Computation, computations: dict[str, Computation]) -> int | None:
    """How often a loop goes round; None where that is not known.

    It is noted by a late pass of the compiler. Before that, the condition tells: a counter below a constant.
    """
    if noted := TRIPS.search(loop.text):
        return int(noted[1])
    condition = computations[called(loop, "condition")[0]]
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.text:
        return None
    counter, bound = (source(name, condition) for name in test.operands)
    if bound.opcode != "constant" or counter.opcode != "get-tuple-element":
        return None
    start, first = source(loop.operands[0], inside), None
    if start is not None and start.opcode == "tuple":
        first = source(start.operands[int(re.search(r"index=(\d+)", counter.text)[1])], inside)
    begin = int(first.operands[0]) if first is not None and first.opcode == "constant" else 0
    return max(int(bound.operands[0]) - begin, 0)


def product(each: Instruction, inside: Computation) -> float:
    """Operations of a product, a convolution or a Fourier transform; 0 for anything else."""
    if each.opcode == "dot":
        left = inside.instructions[each.operands[0]].shapes[0]
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.text)
        summed = [left[1][int(dim)] for dim in filter(None, dims[1].split(","))] if dims else []
        return 2.0 * numbers(each.shapes[0]) * math.prod(summed)
    if each.opcode == "convolution":
        return 2.0 * multiplied(
            each.text, *(inside.instructions[name].shapes[0][1] for name in each.operands), each.shapes[0][1]
        )
    if each.opcode == "fft":
        lengths = re.search(r"fft_length=\{([\d,]*)\}", each.text)[1]
        n = math.prod(map(int, lengths.split(",")))
        made, taken = each.shapes[0], inside.instructions[each.operands[0]].shapes[0]
        return 2.5 * max(numbers(made), numbers(taken)) * math.log2(max(n, 2)) * (1 if "RFFT" in each.text else 2)
    return 0.0


def grouped(kernel: str, each: Instruction, inside: Computation) -> float | None:
    """Operations of the TPU compiler's own kernel for rows in groups, of which each has a matrix; of others None."""
    if kernel == "ragged-dot-metadata":  # where the groups lie
        return 0.0
    if kernel != "ragged-dot-none":
        return None
    rows = inside.instructions[each.operands[-2]].shapes[0]
    return 2.0 * numbers(rows) * each.shapes[0][1][-1]


def users(inside: Computation) -> dict[str, list[Instruction]]:
    found = defaultdict(list)
    for each in inside.instructions.values():
        for name in each.operands:
            found[name].append(each)
    return found


def sliced(each: Instruction, by: dict[str, list[Instruction]]) -> bool:
    """Whether of a sum each device takes its own part alone: accelerators' compilers make that a reduce-scatter."""
    if each.root or not by[each.name]:
        return False
    return all(user.opcode == "dynamic-slice" or (user.opcode in PASSED and sliced(user, by)) for user in by[each.name])


def group_of(each: Instruction) -> tuple[tuple[int, ...], int]:
    """The devices of the first group, and how many there are in each; none are named where all are in one.

    They are listed, or told by how the numbers of all devices are laid out: in rows, or along the axes of a mesh.
    """
    if each.opcode.startswith("collective-permute"):
        pairs = re.findall(r"\{(\d+),(\d+)\}", each.text.partition("source_target_pairs=")[2].partition("}}")[0] + "}")
        far = max(((int(a), int(b)) for a, b in pairs), key=lambda pair: abs(pair[0] - pair[1]), default=(0, 0))
        return far, 2
    told = each.text.partition("replica_groups=")[2]
    if not told or told.startswith("{}"):
        return (), 0
    if found := re.match(r"\{\{([\d,]+)\}", told):
        first = tuple(map(int, found[1].split(",")))
    elif found := re.match(r"\[(\d+),(\d+)\]<=(\S+?),? ", told + " "):
        first = tuple(map(int, laid_out(found[3]).reshape(int(found[1]), int(found[2]))[0]))
    elif found := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))? ?\{([^}]*)\}", told):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
        devices = laid_out(found[2] or f"[{math.prod(sizes.values())}]").reshape(tuple(sizes.values()))
        part = {name: (before, n) for name, before, n in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3])}
        index = [along(n, *part[name]) if name in part else [0] for name, n in sizes.items()]
        first = tuple(map(int, devices[np.ix_(*index)].ravel()))
    else:
        raise ValueError(f"the devices of a collective cannot be read: {told[:120]}")
    return first, len(first)


def laid_out(text: str) -> np.ndarray:
    """The numbers of devices as `[2,4]T(1,0)` tells: counted in that shape, its axes then put into another order."""
    dims, order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    shape = [int(n) for n in dims.split(",")]
    counted = np.arange(math.prod(shape)).reshape(shape)
    return counted.transpose([int(n) for n in order.split(",")]) if order else counted


def along(size: int, before: str, n: str) -> list[int]:
    """The places that a group takes of an axis: all, or with `(before)n` a part of it, which is counted so."""
    if not n:
        return list(range(size))
    step = size // (int(before) * int(n))
    return [i * step for i in range(int(n))]


def plain(each: Computation) -> bool:
    """Whether nothing in it loops or asks other devices."""
    return not any(
        i.opcode == "while" or i.opcode.removesuffix("-start") in COLLECTIVES for i in each.instructions.values()
    )


def between_slices(each: Instruction) -> tuple[str, float]:
    """Of what the runtime carries between slices its kind and bytes; nothing for any other transfer.

    Each has two halves. The one that receives has the result; of what is scattered, the one that sends has the whole.
    """
    found = TRANSFER.search(each.text)
    kind = FAR.get(found[1], "collective-permute") if found else ""
    half = "send" if kind == "reduce-scatter" else "recv"
    return (kind, size(each.shapes[:1])) if kind and each.opcode == half else ("", 0.0)


class Around(NamedTuple):
    """What a computation is in."""

    times: float = 1  # it runs, all loops around it gone round
    depth: int = 0  # loops
    fused: bool = False  # in a loop that a kernel could be


@dataclasses.dataclass
class Tally:
    """What adds up on a walk through a program: every computation counts as often as it runs."""

    computations: dict[str, Computation]
    known: Mapping[Call, float]  # operations of kernels
    flops: float = 0.0
    moved: float = 0.0
    sealed: int = 0  # calls of kernels that are not known
    open_loops: int = 0
    sizes: Counter = dataclasses.field(default_factory=Counter)  # of collectives, by kind and group
    counts: Counter = dataclasses.field(default_factory=Counter)

    def visit(self, name: str, around: Around) -> None:
        inside = self.computations[name]
        by = users(inside)
        for each in inside.instructions.values():
            if each.opcode == "while":
                self.loop(each, inside, around)
            elif each.opcode == "conditional":
                self.choice(each, around)
            elif each.opcode in ("call", "fusion", "async-start", "call-start"):
                for inner in called(each, "to_apply") + called(each, "calls"):
                    self.visit(inner, around)
            elif each.opcode == "custom-call":
                self.kernel(each, inside, around.times)
            elif each.opcode in ("send", "recv"):
                self.transfer(each, around.times)
            elif each.opcode.removesuffix("-start") in COLLECTIVES:
                self.exchange(each, inside, by, around.times)
            else:
                self.product(each, inside, around)

    def loop(self, each: Instruction, inside: Computation, around: Around) -> None:
        n = rounds(each, inside, self.computations)
        self.open_loops += n is None
        body = called(each, "body")[0]
        kernel = around.depth > 0 and plain(self.computations[body])
        if kernel and not around.fused:  # as a kernel would: its operands are read once, its results written once
            self.moved += around.times * size(each.shapes)
        self.visit(body, Around(around.times * (1 if n is None else n), around.depth + 1, around.fused or kernel))

    def choice(self, each: Instruction, around: Around) -> None:
        branches = called(each, "branch_computations")
        branches += called(each, "true_computation") + called(each, "false_computation")
        for branch in branches:
            self.visit(branch, around._replace(times=around.times / len(branches)))

    def kernel(self, each: Instruction, inside: Computation, times: float) -> None:
        if not any(kernel in each.text for kernel in KERNELS):
            return
        name = each.name.partition(".")[0]
        known = self.known.get((name, tuple(dims for _, dims in each.shapes)), grouped(name, each, inside))
        self.flops += times * (known or 0.0)
        self.sealed += round(times) * (known is None)
        self.moved += times * (
            size(each.shapes) + sum(size(inside.instructions[name].shapes) for name in each.operands)
        )

    def transfer(self, each: Instruction, times: float) -> None:
        kind, brought = between_slices(each)
        if kind:
            self.sizes[kind, None] += times * brought
            self.counts[kind, None] += times

    def exchange(self, each: Instruction, inside: Computation, by: dict[str, list[Instruction]], times: float) -> None:
        kind = each.opcode.removesuffix("-start")
        taken = sum((inside.instructions[name].shapes for name in each.operands), ())
        made = each.shapes
        if each.opcode.endswith("-start") and kind != "all-reduce":
            made = made[len(taken) :] or made
        if kind == "all-reduce" and sliced(each, by):
            kind = "reduce-scatter"
        first, n = group_of(each)
        if n != 1:
            self.sizes[kind, first] += times * max(size(taken), size(made))
            self.counts[kind, first] += times

    def product(self, each: Instruction, inside: Computation, around: Around) -> None:
        operations = product(each, inside)
        self.flops += around.times * operations
        if operations and not around.fused:
            operands = (inside.instructions[name].shapes for name in each.operands[:2])
            self.moved += around.times * (size(each.shapes) + sum(map(size, operands)))

    def collectives(self) -> tuple[Collective, ...]:
        """The largest first."""
        found = (
            Collective(kind, group or (), self.sizes[kind, group], round(n), slices=group is None)
            for (kind, group), n in self.counts.items()
        )
        return tuple(sorted(found, key=lambda each: -each.size))


def work(text: str, kernels: Mapping[Call, float] = MappingProxyType({})) -> Work:
    """What the program of one device does, loops gone round; kernels: the operations of those that are known."""
    computations, entry = parse(text)
    tally = Tally(computations, kernels)
    tally.visit(entry, Around())
    return Work(tally.flops, tally.moved, tally.collectives(), tally.sealed, tally.open_loops)
