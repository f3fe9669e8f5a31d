"""How fast architectures train and in how much memory, as their rows grow."""

from itertools import product

from experiments.running.runs import RunSpec
from experiments.tables.layout import Published
from experiments.tables.published import Quotes
from experiments.tables.table import Table
from model.errors import choose

ARCHS = ("attention", "window", "s4", "s4d", "s5", "lru", "b2s6", "rglru", "rwkv6", "mamba", "mamba2", "hybrid")
BASELINES = (
    "local",
    "bigbird",
    "linformer",
    "reformer",
    "sinkhorn",
    "synthesizer",
    "linear",
    "performer",
    "luna",
    "mega",
    "mega_chunk",
)
LENGTHS = {"small": (1024, 2048, 3072, 4096, 8192, 16384), "smoke": (256, 512)}

LRA = (
    "Tay et al. 2020, Long Range Arena (arXiv:2011.04006), table 2: Text, 32 rows a step over 16 TPU v3 chips,"
    " memory of one of them"
)
# Its rows of 1,000 to 4,000 bytes, by the name that the architecture has here.
LRA_TABLE = {
    "steps_per_s": {
        "attention": ((8.1, 4.9, 2.3, 1.4), "Transformer"),
        "local": ((9.2, 8.4, 7.4, 7.4), "Local Attention"),
        "bigbird": ((7.4, 3.9, 2.7, 1.5), "BigBird"),
        "linformer": ((9.3, 9.1, 8.5, 7.7), "Linformer"),
        "reformer": ((4.4, 2.2, 1.5, 1.1), "Reformer"),
        "sinkhorn": ((9.1, 7.9, 6.6, 5.3), "Sinkhorn Transformer"),
        "synthesizer": ((8.7, 5.7, 6.6, 1.9), "Synthesizer"),
        "linear": ((9.1, 9.3, 8.6, 7.8), "Linear Transformer"),
        "performer": ((9.5, 9.4, 8.7, 8.0), "Performer"),
    },
    "memory_gb": {
        "attention": ((0.85, 2.65, 5.51, 9.48), "Transformer"),
        "local": ((0.42, 0.76, 1.06, 1.37), "Local Attention"),
        "bigbird": ((0.77, 1.49, 2.18, 2.88), "BigBird"),
        "linformer": ((0.37, 0.55, 0.99, 0.99), "Linformer"),
        "reformer": ((0.48, 0.99, 1.53, 2.28), "Reformer"),
        "sinkhorn": ((0.47, 0.83, 1.13, 1.48), "Sinkhorn Transformer"),
        "synthesizer": ((0.65, 1.98, 4.09, 6.99), "Synthesizer"),
        "linear": ((0.37, 0.57, 0.80, 1.03), "Linear Transformer"),
        "performer": ((0.37, 0.59, 0.82, 1.06), "Performer"),
    },
}
MEGA = (
    "Published beside the Transformer's at rows of 4,000 bytes: Ma et al. 2022, Mega (arXiv:2209.10655), table 2: S4"
    " 4.8 times as fast in 0.14 of the memory, Luna 4.9 in 0.16, Mega 2.9 in 0.31, Mega in chunks 5.5 in 0.13."
)


def lra_speed(scale: str) -> list[RunSpec]:
    """Every architecture at every length, each in a process of its own."""
    return [
        RunSpec(
            f"configs/lra_speed.py:arch={arch},length={length},size={scale}",
            {},
            {"arch": arch, "length": length},
            program="experiments.measurements.steps",
        )
        for arch, length in product(ARCHS if scale == "smoke" else ARCHS + BASELINES, choose("scale", scale, LENGTHS))
    ]


def quotes(metric: str, scale: str) -> Quotes:
    if scale == "smoke":
        return {}
    return {
        (arch, str(length)): Published(value, f"{LRA}; {name}")
        for arch, (values, name) in LRA_TABLE[metric].items()
        for length, value in zip(LENGTHS[scale], values, strict=False)
    }


TABLES = [
    Table(
        name="lra_speed",
        description="steps a second, and gigabytes, of models in the size of Long Range Arena's Text, by length",
        runs=lra_speed,
        scales=("small", "smoke"),
        by=("arch",),
        across="length",
        metric="steps_per_s",
        published=lambda scale: quotes("steps_per_s", scale),
        also={"memory_gb": lambda scale: quotes("memory_gb", scale)},
        note=MEGA,
        unpublished="small has the published model and lengths; the numbers beside ours are of 16 TPU v3 chips",
    ),
]
