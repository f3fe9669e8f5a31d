"""Recall, copying and induction: what an architecture can keep, and find again."""

from collections.abc import Mapping, Sequence

from experiments.running.runs import RunSpec, Value
from experiments.tables import published
from experiments.tables.table import Table, over_arguments, over_grid
from model.errors import choose

RECURRENT = ("s4", "s4d", "s5", "lru", "rwkv", "rglru", "mamba", "mamba2")


def cross(archs: Sequence[str], tasks: Sequence[str], seeds: int, overrides: Mapping[str, Value]) -> list[RunSpec]:
    """Every architecture on every synthetic task."""
    return [
        RunSpec(
            f"configs/synthetic.py:task={task},arch={arch}",
            {**overrides, "seed": seed},
            {"arch": arch, "task": task},
        )
        for arch in archs
        for task in tasks
        for seed in range(seeds)
    ]


def quickstart(scale: str) -> list[RunSpec]:
    archs = ("attention", "mqa", "s4d", "mamba", "hybrid")
    tasks = ("mqar", "selective_copying", "induction")
    smoke = {"steps": 20, "log_every": 5, "eval_every": 0, "eval_batches": 1, "optim.warmup": 5}
    return cross(archs, tasks, seeds=2, overrides=choose("scale", scale, {"small": {}, "smoke": smoke}))


def selective_copying(scale: str) -> list[RunSpec]:
    seeds = choose("scale", scale, {"small": 3, "smoke": 1, "paper": 3})
    archs = ("attention", "alibi", "lstm", *RECURRENT, "b2s6", "hybrid")
    return over_arguments("selective_copying", scale, seeds, arch=archs)


def induction_heads(scale: str) -> list[RunSpec]:
    """At scale paper the better of two rates, as published."""
    seeds = choose("scale", scale, {"small": 3, "smoke": 1, "paper": 3})
    runs = over_arguments("induction_heads", scale, seeds, arch=("attention", "alibi", *RECURRENT, "hybrid"))
    return over_grid(runs, {"optim.lr": (2e-4, 1e-3)}) if scale == "paper" else runs


def recall(scale: str) -> list[RunSpec]:
    """Zoology's grid: architectures in several widths and at several rates, recalling several numbers of pairs."""
    widths, pairs, rates, seeds = choose(
        "scale",
        scale,
        {
            "small": ((32, 64, 128), (4, 8, 16), (2e-3, 1e-2), 2),
            "smoke": ((16, 32), (4,), (4e-3,), 1),
            "paper": ((64, 128, 256, 512), (4, 8, 16, 64), (1e-4, 4.6e-4, 2.2e-3, 1e-2), 1),
        },
    )
    runs = over_arguments("recall", scale, seeds, arch=("attention", *RECURRENT), width=widths, pairs=pairs)
    return over_grid(runs, {"optim.lr": rates})


TABLES = [
    Table(
        name="quickstart",
        description="recall, copying and induction in five architectures",
        runs=quickstart,
        scales=("small", "smoke"),
        by=("arch",),
        across="task",
        metric="test/accuracy",
        published=lambda scale: published.QUICKSTART,
        unpublished="its tasks have it in tables of their own: recall, selective_copying, induction_heads",
    ),
    Table(
        name="selective_copying",
        description="tokens scattered among noise, copied in order",
        runs=selective_copying,
        scales=("small", "smoke", "paper"),
        by=("arch",),
        across=None,
        metric="test/accuracy",
        published=lambda scale: published.SELECTIVE_COPYING,
    ),
    Table(
        name="induction_heads",
        description="what followed this token last time, trained on short rows, tested on long",
        runs=induction_heads,
        scales=("small", "smoke", "paper"),
        by=("arch",),
        across="length",
        metric="test/accuracy",
        tuned=("lr",),
        published=published.induction_heads,
    ),
    Table(
        name="recall",
        description="associative recall by width and number of pairs, set against bytes of state",
        runs=recall,
        scales=("small", "smoke", "paper"),
        by=("arch", "width"),
        across="pairs",
        metric="test/accuracy",
        tuned=("lr",),
        published=published.recall,
        against="state_bytes",
    ),
]
