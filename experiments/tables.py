"""The named tables: which runs fill them, how they are laid out, and what others have published.

A table is a value. A new one is a function from a scale to runs and an entry in TABLES.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from configs import extrapolation
from experiments.layout import Layout, Published
from experiments.runs import Run, Value
from model.errors import UserError, choose, closest
from model.positions import POSITIONS

SCALES = {
    "smoke": "minutes on a CPU; shows that everything runs, not who wins",
    "small": "a small version of the question, on a laptop or one accelerator",
    "paper": "the published setting",
}


Quotes = Mapping[tuple[str, ...], Published]  # (*by, across) values -> number


@dataclass(frozen=True)
class Table:
    name: str
    description: str  # one line
    runs: Callable[[str], list[Run]]  # scale -> runs
    scales: tuple[str, ...]  # those it can be run at; the first is the default
    by: tuple[str, ...]  # labels that name its lines
    across: str | None  # label that names its columns
    metric: str
    published: Callable[[str], Quotes] = lambda scale: {}  # scale -> numbers
    note: str = ""  # what others have published that is no number of this table's


def choose_scale(table: Table, given: str | None) -> str:
    """The scale asked for, or the table's first."""
    if given is None or given in table.scales:
        return given or table.scales[0]
    allowed = f"{', '.join(table.scales)}{closest(given, table.scales)}"
    raise UserError(f"table {table.name} has no scale {given!r}; choose from {allowed}")


def layout(table: Table, scale: str) -> Layout:
    """Lines and columns stand in the order of the table's runs."""
    runs = table.runs(scale)
    keys = dict.fromkeys(key for run in runs for key in run.labels)
    order = {key: list(dict.fromkeys(run.labels[key] for run in runs if key in run.labels)) for key in keys}
    title = f"{table.name}: {table.description}" + (f" (scale {scale})" if scale != table.scales[0] else "")
    return Layout(
        table.metric,
        table.by,
        table.across,
        order=order,
        published=table.published(scale),
        title=title,
        note=table.note,
    )


def cross(archs: Sequence[str], tasks: Sequence[str], seeds: int, overrides: Mapping[str, Value]) -> list[Run]:
    """Every architecture on every synthetic task."""
    return [
        Run(
            f"configs/synthetic.py:task={task},arch={arch}",
            {**overrides, "seed": seed},
            {"arch": arch, "task": task},
        )
        for arch in archs
        for task in tasks
        for seed in range(seeds)
    ]


def quickstart(scale: str) -> list[Run]:
    archs = ("attention", "mqa", "s4d", "mamba", "hybrid")
    tasks = ("mqar", "selective_copying", "induction")
    smoke = {"steps": 20, "log_every": 5, "eval_every": 0, "eval_batches": 1, "optim.warmup": 5}
    return cross(archs, tasks, seeds=2, overrides=choose("scale", scale, {"small": {}, "smoke": smoke}))


def positions(task: str, scale: str) -> list[Run]:
    """Attention with every position encoding there is, tested at many lengths."""
    seeds = choose("scale", scale, {"small": 3, "smoke": 2})
    return [
        Run(
            f"configs/extrapolation.py:task={task},position={position},size={scale}",
            {"seed": seed},
            {"position": position},
        )
        for position in POSITIONS
        for seed in range(seeds)
    ]


MAMBA = "Gu and Dao 2023, Mamba (arXiv:2312.00752)"
QUICKSTART_PUBLISHED = {
    ("attention", "mqar"): Published(
        1.0,
        "Arora et al. 2023, Zoology (arXiv:2312.04927), figure 2, read off: length 64, 4 pairs,"
        " vocabulary 8192, learned positions",
    ),
    ("mamba", "selective_copying"): Published(
        0.998, f"{MAMBA}: length 4096, 16 tokens to copy, 2 layers of width 64, 400,000 steps"
    ),
    ("attention", "induction"): Published(
        1.0, f"{MAMBA}: trained and tested at length 256, rotary positions, 2 layers of width 128"
    ),
    ("mamba", "induction"): Published(1.0, f"{MAMBA}: trained and tested at length 256, 2 layers of width 64"),
    ("s4d", "induction"): Published(0.356, "Fu et al. 2022, H3 (arXiv:2212.14052): length 30, vocabulary 20, width 32"),
}


def induction_published(scale: str) -> Quotes:
    """Mamba's attention rows at the same multiples of the training length, which is 256 there."""
    accuracies = {
        "rope": (1.0, 0.836, 0.313, 0.184, 0.086, 0.09, 0.055),
        "xpos": (1.0, 0.996, 0.676, 0.254, 0.07, 0.09, 0.078),
    }
    setting = (
        "trained at length 256, tested at the same multiple of it, 2 layers of width 128, 409,600 steps of 8 examples"
    )
    length, _ = extrapolation.LENGTHS[scale]["induction"]
    return {
        (position, str(length * 2**i)): Published(value, f"{MAMBA}: {setting}")
        for position, values in accuracies.items()
        for i, value in enumerate(values)
    }


# Perplexities of words have no place among nats per byte, so they stand below the table.
ALIBI_TABLE = (
    "Published, in another unit: Press et al. 2021, ALiBi (arXiv:2108.12409), Table 5, perplexity of WikiText-103's"
    " words, 247M parameters, tested without overlap. ALiBi trained at 64: 28.46 at 64, 24.70 at 128, 22.88 at 256,"
    " 22.09 at 512, 21.73 at 1024, 21.59 at 2048; trained at 512: 19.73 at 512, 18.81 at 1024, 18.40 at 3072."
    " Trained at the length tested, 512: sinusoidal 20.05, rotary 20.07, T5 19.65; 3072: 18.67, 18.57, 18.01."
)

TABLES = {
    table.name: table
    for table in [
        Table(
            name="quickstart",
            description="recall, copying and induction in five architectures",
            runs=quickstart,
            scales=("small", "smoke"),
            by=("arch",),
            across="task",
            metric="test/accuracy",
            published=lambda scale: QUICKSTART_PUBLISHED,
        ),
        Table(
            name="positions",
            description="attention with every position encoding, trained on short induction, tested on long",
            runs=partial(positions, "induction"),
            scales=("small", "smoke"),
            by=("position",),
            across="length",
            metric="test/accuracy",
            published=induction_published,
        ),
        Table(
            name="positions_text",
            description="attention with every position encoding, trained on short texts, tested on long, nats per byte",
            runs=partial(positions, "text"),
            scales=("small", "smoke"),
            by=("position",),
            across="length",
            metric="test/loss",
            note=ALIBI_TABLE,
        ),
    ]
}
