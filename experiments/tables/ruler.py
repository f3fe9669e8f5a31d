"""Needles in haystacks, and RULER's other questions to a long context."""

from itertools import product

from configs.ruler import SIZES
from experiments.running.runs import RunSpec
from experiments.tables.table import Table, over_arguments
from model.errors import choose

ARCHS = ("attention", "alibi", "window", "s4d", "mamba", "mamba2", "rglru", "rwkv6", "hybrid", "griffin")


def needle(scale: str) -> list[RunSpec]:
    """One needle, and one key of digits, looked for by every architecture, at lengths far past those of training."""
    tasks, seeds = choose("scale", scale, {"small": (("needle", "passkey"), 3), "smoke": (("needle",), 1)})
    return over_arguments("ruler", scale, seeds, task=tasks, arch=ARCHS)


def ruler(scale: str) -> list[RunSpec]:
    """Every task, at the length of training and at four times that."""
    archs, seeds = choose("scale", scale, {"small": (ARCHS, 1), "smoke": (("attention", "mamba2"), 1)})
    length, tasks = SIZES[scale]["length"], SIZES[scale]["tasks"]
    return [
        RunSpec(
            f"configs/ruler.py:task={task},arch={arch},size={scale}",
            {"test_lengths": (length, 4 * length), "seed": seed},
            {"arch": arch, "task": task},
        )
        for arch, task, seed in product(archs, tasks, range(seeds))
    ]


TABLES = [
    Table(
        name="needle",
        description="a needle in a haystack or a passkey, its whole value, trained on short rows, tested on long",
        runs=needle,
        scales=("small", "smoke"),
        by=("task", "arch"),
        across="length",
        metric="test/exact",
        unpublished="RULER asks language models as they are, and trains none",
    ),
    Table(
        name="ruler",
        description="RULER's tasks, made small: trained on each alone, tested there and at four times the length",
        runs=ruler,
        scales=("small", "smoke"),
        by=("arch", "length"),
        across="task",
        metric="test/accuracy",
        unpublished="RULER asks language models as they are, and trains none",
    ),
]
