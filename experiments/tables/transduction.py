"""A source read and its answer written."""

from functools import partial

from experiments.running.runs import RunSpec
from experiments.tables.table import Table
from model.errors import choose

PAIRS = ("seq2seq_vector", "seq2seq", "transformer")


def seq2seq(task: str, scale: str) -> list[RunSpec]:
    """One vector, attention to every token, and a Transformer."""
    return [
        RunSpec(f"configs/seq2seq.py:task={task},arch={arch},size={scale}", {"seed": seed}, {"arch": arch})
        for arch in PAIRS
        for seed in range(choose("scale", scale, {"small": 3, "smoke": 1}))
    ]


TABLES = [
    Table(
        name="seq2seq",
        description="strings written backwards from one vector, with attention, by a Transformer: whole answers",
        runs=partial(seq2seq, "reverse"),
        scales=("small", "smoke"),
        by=("arch",),
        across="length",
        metric="test/exact",
        unpublished="published of translation; size=base of configs/seq2seq.py has the model and the schedule",
    ),
    Table(
        name="seq2seq_translate",
        part_of="seq2seq",
        description="a made-up language translated by the same three: whole sentences",
        runs=partial(seq2seq, "translate"),
        scales=("small", "smoke"),
        by=("arch",),
        across="length",
        metric="test/exact",
        unpublished="published of translation; size=base of configs/seq2seq.py has the model and the schedule",
    ),
    Table(
        name="seq2seq_dates",
        part_of="seq2seq",
        description="dates of days never seen, brought into one form by the same three: whole dates",
        runs=partial(seq2seq, "dates"),
        scales=("small", "smoke"),
        by=("arch",),
        across=None,
        metric="test/exact",
        unpublished="published of translation; size=base of configs/seq2seq.py has the model and the schedule",
    ),
]
