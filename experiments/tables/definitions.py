"""The named tables: which runs fill them, how they are laid out, and what others have published.

A table is a value. A new one is a function from a scale to runs and an entry in TABLES.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product

from experiments.running.runs import RunSpec, Value
from experiments.tables import published
from experiments.tables.layout import Layout
from experiments.tables.published import Quotes
from model.errors import UserError, choose, closest
from model.positions import POSITIONS

SCALES = {
    "smoke": "minutes on a CPU; shows that everything runs, not who wins",
    "small": "a small version of the question, on a laptop or one accelerator",
    "paper": "the published setting",
}


@dataclass(frozen=True)
class Table:
    name: str
    description: str  # one line
    runs: Callable[[str], list[RunSpec]]  # scale -> runs
    scales: tuple[str, ...]  # those it can be run at; the first is the default
    by: tuple[str, ...]  # labels that name its lines
    across: str | None  # label that names its columns
    metric: str
    tuned: tuple[str, ...] = ()  # labels of which each cell takes the best
    published: Callable[[str], Quotes] = lambda scale: {}  # scale -> numbers
    note: str = ""  # what others have published that is no number of this table's
    against: str = ""  # a cost that the plot sets the metric against


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
        tuned=tuple(key for key in table.tuned if len(order[key]) > 1),
        order=order,
        published=table.published(scale),
        title=title,
        note=table.note,
        against=table.against,
    )


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


RECURRENT = ("s4", "s4d", "s5", "lru", "rwkv", "rglru", "mamba", "mamba2")


def over_archs(config: str, archs: Sequence[str], seeds: Mapping[str, int], scale: str) -> list[RunSpec]:
    """Every architecture in a config that takes `arch` and `size`."""
    return [
        RunSpec(f"configs/{config}.py:arch={arch},size={scale}", {"seed": seed}, {"arch": arch})
        for arch in archs
        for seed in range(choose("scale", scale, seeds))
    ]


def recall(scale: str) -> list[RunSpec]:
    """Zoology's grid: architectures in several widths and at several rates, recalling several numbers of pairs."""
    archs = ("attention", "s4d", "rwkv", "rglru", "mamba", "mamba2")
    widths, pairs, rates, seeds = choose(
        "scale",
        scale,
        {
            "small": ((32, 64, 128), (4, 8, 16), (2e-3, 1e-2), 2),
            "smoke": ((16, 32), (4,), (4e-3,), 1),
            "paper": ((64, 128, 256, 512), (4, 8, 16, 64), (1e-4, 4.6e-4, 2.2e-3, 1e-2), 1),
        },
    )
    return [
        RunSpec(
            f"configs/recall.py:arch={arch},width={width},pairs={k},size={scale}",
            {"optim.lr": lr, "seed": seed},
            {"arch": arch, "width": width, "pairs": k, "lr": lr},
        )
        for arch, width, k, lr, seed in product(archs, widths, pairs, rates, range(seeds))
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


PAIRS = ("seq2seq_vector", "seq2seq", "transformer")


def seq2seq(task: str, scale: str) -> list[RunSpec]:
    """One vector, attention to every token, and a Transformer."""
    return [
        RunSpec(f"configs/seq2seq.py:task={task},arch={arch},size={scale}", {"seed": seed}, {"arch": arch})
        for arch in PAIRS
        for seed in range(choose("scale", scale, {"small": 3, "smoke": 1}))
    ]


def depth(scale: str) -> list[RunSpec]:
    """The same Transformer at many depths, its norms before or after the sum, with and without warm-up."""
    layers, seeds = choose("scale", scale, {"small": ((2, 6, 12, 24, 48), 2), "smoke": ((2, 6), 1)})
    return [
        RunSpec(
            f"configs/depth.py:norm={norm},layers={n},warmup={warmup},size={scale}",
            {"seed": seed},
            {"norm": norm, "warmup": warmup, "layers": n},
        )
        for norm, warmup, n, seed in product(("pre", "post"), ("yes", "no"), layers, range(seeds))
    ]


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
            published=lambda scale: published.QUICKSTART,
        ),
        Table(
            name="positions",
            description="attention with every position encoding, trained on short induction, tested on long",
            runs=partial(positions, "induction"),
            scales=("small", "smoke"),
            by=("position",),
            across="length",
            metric="test/accuracy",
            published=published.positions,
        ),
        Table(
            name="positions_text",
            description="attention with every position encoding, trained on short texts, tested on long, nats per byte",
            runs=partial(positions, "text"),
            scales=("small", "smoke"),
            by=("position",),
            across="length",
            metric="test/loss",
            note=published.ALIBI_TABLE,
        ),
        Table(
            name="selective_copying",
            description="tokens scattered among noise, copied in order",
            runs=partial(
                over_archs, "selective_copying", ("attention", "lstm", *RECURRENT), {"small": 3, "smoke": 1, "paper": 3}
            ),
            scales=("small", "smoke", "paper"),
            by=("arch",),
            across=None,
            metric="test/accuracy",
            published=lambda scale: published.SELECTIVE_COPYING,
        ),
        Table(
            name="induction_heads",
            description="what followed this token last time, trained on short rows, tested on long",
            runs=partial(
                over_archs,
                "induction_heads",
                ("attention", "alibi", *RECURRENT, "hybrid"),
                {"small": 3, "smoke": 1, "paper": 3},
            ),
            scales=("small", "smoke", "paper"),
            by=("arch",),
            across="length",
            metric="test/accuracy",
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
        Table(
            name="seq2seq",
            description="strings written backwards from one vector, with attention, by a Transformer: whole answers",
            runs=partial(seq2seq, "reverse"),
            scales=("small", "smoke"),
            by=("arch",),
            across="length",
            metric="test/exact",
        ),
        Table(
            name="seq2seq_translate",
            description="a made-up language translated by the same three: whole sentences",
            runs=partial(seq2seq, "translate"),
            scales=("small", "smoke"),
            by=("arch",),
            across="length",
            metric="test/exact",
        ),
        Table(
            name="seq2seq_dates",
            description="dates of days never seen, brought into one form by the same three: whole dates",
            runs=partial(seq2seq, "dates"),
            scales=("small", "smoke"),
            by=("arch",),
            across=None,
            metric="test/exact",
        ),
        Table(
            name="depth",
            description="recall by Transformers of 2 to 48 layers, norms before or after the sum: which train",
            runs=depth,
            scales=("small", "smoke"),
            by=("norm", "warmup"),
            across="layers",
            metric="test/accuracy",
        ),
        Table(
            name="precision",
            description="selective models in bfloat16 beside float32 after 200 steps on long rows, nats per byte",
            runs=precision,
            scales=("small", "smoke"),
            by=("arch",),
            across="dtype",
            metric="test/loss",
        ),
    ]
}
