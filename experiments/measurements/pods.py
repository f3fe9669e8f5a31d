"""Every pod config on paper: does its step fit the machine it is for, and how long would it take there?

Each is compiled in a process of its own (`train.compile_only`), by the TPU's compiler where it is installed and else by
the CPU's for as many devices. What two targets share, such as the meshes of v5e-256 and v6e-256, is compiled once.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import product
from typing import Any

from configs import pods
from train import chips, compile_only
from train import config as configs

Row = dict[str, Any]
GIB = 2**30
ARCHS = (*pods.MATCHED, "moe")
LONG = 2**20
DAY = 86_400
CHINCHILLA = 20  # tokens a parameter (https://arxiv.org/abs/2203.15556)


def specs() -> Iterator[tuple[str, str]]:
    """Config and topology of each; those at a million tokens last."""
    sizes = [(arch, size) for arch, size in product(pods.MATCHED, pods.SHAPES)] + [("moe", "8x1b3")]
    for length in (8192, LONG):
        for (arch, size), target in product(sizes, pods.TARGETS):
            text = f"configs/pods.py:arch={arch},size={size},target={target},length={length}"
            yield text, pods.TARGETS[target]


def measure(known: list[Row]) -> Iterator[Row]:
    """A row per config that is not known yet."""
    done = {row["config"] for row in known}
    for spec, topology in specs():
        if spec not in done:
            yield {"config": spec, "topology": topology} | elsewhere(spec, topology)


def elsewhere(spec: str, topology: str) -> Row:
    """The row of one, from a process of its own: how many devices a CPU plays is decided once."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(row, spec, topology).result()
        except BrokenProcessPool:
            return {"error": "the compiler broke down", "fits": False}
        except Exception as error:  # whatever a compiler says
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200], "fits": False}


def row(spec: str, topology: str) -> Row:
    parsed = chips.parse(topology)
    compile_only.play_devices(parsed)
    return compile_only.measure(configs.load(spec), parsed)
