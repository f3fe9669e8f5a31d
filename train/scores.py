"""What a state scores: on validation while it is trained, and in the tests that a result is made of."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax

from data import pipeline
from model.errors import UserError, out_of_memory
from train import hosts
from train.evaluate import bits_per_byte, counts, means, scalars, slices, tally
from train.run import Run
from train.step import RunState


def validate(run: Run, state: RunState, split: str) -> dict[str, float]:
    """Scores on a split, named `SPLIT/METRIC`."""
    return measure(run, state, split).scores


class Measured(NamedTuple):
    """Of a split."""

    scores: dict[str, float]  # named `SPLIT/METRIC`, or with another prefix
    targets: dict[str, int]  # that each of them rests on
    slices: dict[str, dict[str, float | None]]  # `SPLIT/METRIC/ATTRIBUTE` -> label of a bin -> score


def measure(run: Run, state: RunState, split: str, prefix: str = "") -> Measured:
    batches = batches_of(run, split)
    totals, name = tally(run.eval_step, state.params, batches, run.batch_sharding), prefix or split
    found, targets = means(totals), counts(totals, name)
    in_bits = bits_per_byte(run.objective, found["loss"])
    targets |= {f"{name}/{unit}": targets[f"{name}/loss"] for unit in in_bits}
    return Measured(scalars(found | in_bits, name), targets, slices(found, run.objective.attributes, name))


def batches_of(run: Run, split: str) -> Iterator[pipeline.Batch]:
    """The first `eval_batches` times `batch_size` rows of a split, or all, in pieces for which training has room.

    Where rows are compared with each other the batch is the question, and stays whole.
    """
    c = run.config
    pieces = 1 if run.objective.compares_rows else c.optim.accumulate
    return pipeline.eval_batches(run.task, c.data.seed, split, c.batch_size // pieces, c.eval_batches * pieces)


def at_lengths(
    lengths: Mapping[int, Run], state: RunState, begin: Callable[[], None] = lambda: None
) -> tuple[Measured, dict[str, str]]:
    """Test scores at every length asked for, named `test/length_512/METRIC`; none where the model cannot go.

    Second, the lengths that this machine has no room for, with the reason: they count as failed, not as impossible.
    `begin` is called before each.
    """
    tested = Measured({}, {}, {})
    untested: dict[str, str] = {}
    for length, run in lengths.items():
        begin()
        lacking, found = None, Measured({}, {}, {})
        try:
            found = measure(run, state, "test", f"test/length_{length}")
        except UserError as error:
            print(f"not tested at length {length}: {error}")
            continue
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            lacking = out_of_memory(error)
            if lacking is None:
                raise
        lacking = next(filter(None, hosts.gather(f"test at length {length}", lacking)), None)
        if lacking is None:
            tested = Measured(*(old | new for old, new in zip(tested, found, strict=True)))
        else:
            print(f"not tested at length {length}: {lacking}")
            untested[str(length)] = "out of memory"
    return tested, untested


def baselines_at(run: Run, lengths: Mapping[int, Run]) -> dict[str, dict[str, float]]:
    """Trivial scores at the lengths where they are not those of the run's own: more may be shown in longer rows."""
    found = {str(length): other.objective.baselines() for length, other in lengths.items()}
    return {length: scores for length, scores in found.items() if scores != run.objective.baselines()}
