"""Position encodings, trained on short rows and tested on long ones."""

from functools import partial

from experiments.running.runs import RunSpec
from experiments.tables import published
from experiments.tables.table import Table
from model.errors import choose
from model.positions import POSITIONS

FLAT = [name for name, position in POSITIONS.items() if not position.on_grid]


def positions(task: str, scale: str) -> list[RunSpec]:
    """Attention with every position encoding there is, tested at many lengths."""
    seeds = choose("scale", scale, {"small": 3, "smoke": 2})
    return [
        RunSpec(
            f"configs/extrapolation.py:task={task},position={position},size={scale}",
            {"seed": seed},
            {"position": position},
        )
        for position in FLAT
        for seed in range(seeds)
    ]


TABLES = [
    Table(
        name="positions",
        description="attention with every position encoding, trained on short induction, tested on long",
        runs=partial(positions, "induction"),
        scales=("small", "smoke"),
        by=("position",),
        across="length",
        metric="test/accuracy",
        published=published.positions,
        unpublished="each encoding is published in a setting of its own",
    ),
    Table(
        name="positions_text",
        part_of="positions",
        description="attention with every position encoding, trained on short texts, tested on long, nats per byte",
        runs=partial(positions, "text"),
        scales=("small", "smoke"),
        by=("position",),
        across="length",
        metric="test/loss",
        note=published.ALIBI_TABLE,
        unpublished="each encoding is published in a setting of its own",
    ),
]
