"""What trains at all: depths, orders of the norms, and fewer bits."""

from importlib.util import find_spec
from itertools import product

from experiments.running.runs import RunSpec
from experiments.tables.table import Table
from model.errors import choose


def depth(scale: str) -> list[RunSpec]:
    """The same Transformer at many depths, its norms before or after the residual sum, with and without warm-up."""
    layers, seeds = choose("scale", scale, {"small": ((2, 6, 12, 24, 48), 2), "smoke": ((2, 6), 1)})
    return [
        RunSpec(
            f"configs/depth.py:norm={norm},layers={n},warmup={warmup},size={scale}",
            {"seed": seed},
            {"norm": norm, "warmup": warmup, "layers": n},
        )
        for norm, warmup, n, seed in product(("pre", "post"), ("yes", "no"), layers, range(seeds))
    ]


def precision(scale: str) -> list[RunSpec]:
    """Every selective model in half the bits, on long rows of Python's own help texts."""
    length, seeds = choose("scale", scale, {"small": (4096, 2), "smoke": (256, 1)})
    shared = {
        "data.text.path": find_spec("pydoc_data.topics").origin,
        "data.text.length": length,
        "batch_size": 4,
        "steps": 200,
        "eval_every": 0,
        "checkpoint_every": 0,
        "eval_batches": 0,
        "model.width": 64,
        "model.layers": 2,
    }
    return [
        RunSpec(
            f"configs/text.py:arch={arch}",
            {**shared, "model.dtype": dtype, "seed": seed},
            {"arch": arch, "dtype": dtype},
        )
        for arch in ("mamba", "mamba2", "b2s6", "rglru", "rwkv6")
        for dtype in ("float32", "bfloat16")
        for seed in range(seeds)
    ]


TABLES = [
    Table(
        name="depth",
        description="recall by Transformers of 2 to 48 layers, norms before or after the residual sum: which train",
        runs=depth,
        scales=("small", "smoke"),
        by=("norm", "warmup"),
        across="layers",
        metric="test/accuracy",
        unpublished="published of translation",
    ),
    Table(
        name="precision",
        description="selective models in bfloat16 beside float32 after 200 steps on long rows, nats per byte",
        runs=precision,
        scales=("small", "smoke"),
        by=("arch",),
        across="dtype",
        metric="test/loss",
        unpublished="a check of these models, not of a paper",
    ),
]
