"""Every pod config on paper: does its step fit the machine it is for, and how long would it take there?

Each is compiled in a process of its own (`train.compile_only`), by the TPU's compiler where it is installed and else by
the CPU's for as many devices. Configs that differ in the target alone share a program.
"""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from configs import pods
from experiments.measurements.sheet import all_of, markdown_table, rows_like
from train import chips, compile_only
from train import config as configs
from train.revision import source_digest
from train.sharding import AXES

Row = dict[str, Any]
GIB = 2**30
LENGTHS = (8192, 2**20)
DAY, HOUR = 86_400, 3600
TOKENS = 20  # a parameter (https://arxiv.org/abs/2203.15556)


def cases() -> Iterator[Row]:
    """What is asked of each config; those at a million tokens last.

    Not the smallest models, and not the mixture: an expert's room is a part of a row's tokens, and of devices that
    share a row each makes room for all of its own with every expert.
    """
    sizes = [*product(pods.MATCHED, pods.SHAPES), ("moe", "8x1b3")]
    for length, (arch, size), target in product(LENGTHS, sizes, pods.TARGETS):
        if length >= pods.LONG and size not in ("1b3", "7b"):
            continue
        spec = f"configs/pods.py:arch={arch},size={size},target={target},length={length}"
        asked = dict(arch=arch, size=size, target=target, length=length)
        yield {"config": spec, "topology": pods.TARGETS[target], **asked}


def kept(file: Path, mixed: bool = False) -> list[Row]:
    """The rows in a file of this code (`mixed`: of any), but for those that failed."""
    alike = {} if mixed else {"source": source_digest()}
    return [row for row in rows_like(file, alike) if "error" not in row]


def measure(known: list[Row]) -> Iterator[Row]:
    """A row per config that is not known yet."""
    done = {row["config"] for row in known}
    alike: dict[tuple[str, int], list[Row]] = {}
    for case in cases():
        if case["config"] not in done:
            program = configs.digest(configs.load(case["config"])), chips.parse(case["topology"]).chips
            alike.setdefault(program, []).append(case)
    for some in sorted(alike.values(), key=lambda some: some[0]["arch"] == "hybrid"):  # which takes minutes: last
        for case, found in zip(some, elsewhere(some), strict=True):
            yield {"source": source_digest()} | case | found


def elsewhere(cases: list[Row]) -> list[Row]:
    """Their rows, from a process of their own: how many devices a CPU plays is decided once."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(compiled, cases[0]["config"], [case["topology"] for case in cases]).result()
        except BrokenProcessPool:
            error = "the compiler broke down"
        except Exception as failed:  # whatever a compiler says
            error = f"{type(failed).__name__}: {failed}".splitlines()[0][:200]
    return [{"error": error, "fits": False} for _ in cases]


def compiled(spec: str, topologies: list[str]) -> list[Row]:
    parsed = [chips.parse(topology) for topology in topologies]
    compile_only.play_devices(parsed[0])
    return json.loads(json.dumps(compile_only.measure(configs.load(spec), *parsed), default=float))


def sentence(row: Row) -> str:
    name = f"{row['arch']} {row['size']}, {row['length']:,} tokens, {row['target']}"
    if "error" in row:
        return f"{name}: {row['error']}"
    memory = f"{row['memory'] / GIB:.1f} of {row['hbm'] / GIB:.1f} GiB" + ("" if row["fits"] else ", does not fit")
    paper = f"{row['step_s']:.2f} s a step, {row['share']:.0%} of peak"
    return f"{name}: {memory}; {paper}; compiled in {row['compile_s']:.0f} s"


def table(rows: list[Row]) -> str:
    """Markdown: a part for each length, a line per config."""
    order = [case["config"] for case in cases()]
    rows = sorted((row for row in rows if row["config"] in order), key=lambda row: order.index(row["config"]))
    parts = [
        f"**Rows of {length:,} tokens**\n\n{part([row for row in rows if row['length'] == length])}"
        for length in LENGTHS
        if any(row["length"] == length for row in rows)
    ]
    return "\n".join([*parts, note(rows)]) + "\n"


TITLES = ("arch", "size", "target", "mesh", "tokens a step", "GiB", "of", "seconds a step", "share of peak", "bound by")
TITLES += ("tokens a day", "chip-hours")


def part(rows: list[Row]) -> str:
    return markdown_table(TITLES, map(cells, rows))


def cells(row: Row) -> list[str]:
    named = [row["arch"], row["size"], row["target"]]
    if "error" in row:
        return [*named, row["error"], *[""] * (len(TITLES) - 4)]
    seconds, tokens = row["step_s"], row["tokens"]
    return [
        *named,
        " ".join(f"{axis}={row['mesh'][axis]}" for axis in AXES if axis in row["mesh"]),
        f"{tokens:,}",
        f"{row['memory'] / GIB:.1f}" + ("" if row["fits"] else " (does not fit)"),
        f"{row['hbm'] / GIB:.1f}",
        f"{row['overlapped_s']:.3g} to {seconds:.3g}",
        f"{row['share_overlapped']:.0%} to {row['share']:.0%}",
        row["bound"],
        f"{tokens * DAY / seconds / 1e9:,.1f}e9",
        f"{TOKENS * row['params'] / tokens * seconds * row['chips'] / HOUR:,.0f}",
    ]


def note(rows: list[Row]) -> str:
    every = partial(all_of, rows)
    return (
        f"Nothing here was run: programs were compiled, by {every('compiler')} compiler, and what they do was divided "
        "by what chips can do as their makers tell (`train/chips.py`). Where that is the CPU's, memory and collectives "
        "are an estimate: it has plain XLA in the place of kernels, holds some of what is bfloat16 as float32, and has "
        "its partitioner in common with the others; every step was lowered for its chip besides. Products are counted "
        "with loops gone round, remat included; loops inside a layer's are taken for kernels that read and write "
        "memory once. Chips multiply at their peak, elementwise work costs nothing, rings of devices exchange at the "
        "full rate of one torus axis or of NVLink. Seconds a step: from all at once to no exchange during products. "
        "Share of peak: of 6 operations a token and active parameter, and visible scores, over that. Tokens a day and "
        f"chip-hours ({TOKENS} tokens a parameter) are of the slower end; a real run is slower than either. "
        f"Fits: at most {compile_only.ROOM:.0%} of the chip's memory. A v5p-128 is 64 chips. "
        f"jax {every('jax')}, revision {every('revision')}, {every('date')}."
    )
