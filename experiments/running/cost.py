"""What runs cost, before any of them starts: steps, tokens, and floating-point operations by a rule of thumb.

And whether their models can be made at all: counting parameters goes through a model's first call, by shapes alone.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from ml_collections import ConfigDict

import data
from data.pipeline import batch_at
from model.build import Model
from model.contract import RUNNING
from model.errors import UserError
from model.paths import by_path
from train.objective import Objective, arguments
from train.objectives import build
from train.run import model_for

MOST = 64  # models whose first call is gone through only to see whether it can be, which takes up to a second each


class Cost(NamedTuple):
    runs: int
    steps: int
    tokens: int  # rows x length x steps; a pair is of two rows
    flops: int  # of training: 6 x parameters x tokens, which leaves out what attention adds as rows grow

    def __str__(self) -> str:
        return (
            f"{self.runs:,} run{'s' * (self.runs != 1)}, {self.steps:,} steps, {self.tokens:.2g} tokens, "
            f"{self.flops:.2g} FLOPs (6 x parameters x tokens)"
        )


def of(asked: Mapping[str, ConfigDict]) -> Cost:
    """What it takes to train these, by name, from the first step to the last; their data must be there."""
    counted: dict[str, int] = {}
    total = Cost(0, 0, 0, 0)
    for name, objective, shape in objectives(asked):
        c = asked[name]
        if shape not in counted:
            with told_of(name):
                counted[shape] = parameters(c, objective)
        tokens = c.steps * c.batch_size * objective.task.length * (2 if objective.task.pair else 1)
        one = Cost(1, c.steps, tokens, 6 * counted[shape] * tokens)
        total = Cost(*map(sum, zip(total, one, strict=True)))
    return total


def check(asked: Mapping[str, ConfigDict], elsewhere: bool = False) -> None:
    """Refuses a run, by name, whose objective or model cannot be made; each different model is looked at once.

    Of very many the later ones are built, and their first call is left to the run; so is all that depends on data which
    are not here, where runs may be `elsewhere`.
    """
    seen: set[str] = set()
    for name, objective, shape in objectives(asked, elsewhere):
        if shape not in seen:
            seen.add(shape)
            with told_of(name):
                (parameters if len(seen) <= MOST else made)(asked[name], objective)


def objectives(asked: Mapping[str, ConfigDict], elsewhere: bool = False) -> Iterator[tuple[str, Objective, str]]:
    """The runs by name, each with its objective, and what their models have in common that are of one shape."""
    jax.config.update("jax_platforms", "cpu")  # for shapes alone: accelerators are for the runs
    found: dict[str, Objective | None] = {}
    for name, c in asked.items():
        section = c.data[c.data.task].to_dict()
        key = str((c.data.task, section, c.objective.to_dict()))
        if key not in found:
            with told_of(name):
                task = task_of(c.data.task, section, elsewhere)
                found[key] = None if task is None else build(c.objective.to_dict(), task)
        if (objective := found[key]) is not None:
            yield name, objective, str((c.model.to_dict(), objective.asked))


def task_of(name: str, section: Mapping[str, Any], elsewhere: bool) -> data.Task | None:
    """The task of a run; None where its data are elsewhere."""
    try:
        return data.build(name, section)
    except UserError:
        if elsewhere and section.keys() & {"root", "path"}:
            return None
        raise


@contextmanager
def told_of(run: str) -> Iterator[None]:
    """Mistakes are told with the run that they are in."""
    try:
        yield
    except UserError as error:
        raise UserError(f"run {run}: {error}") from error


def parameters(config: ConfigDict, objective: Objective) -> int:
    """Numbers that a model has to train, by the shapes that its first call would give them."""
    batch = objective.view(batch_at(objective.task, config.data.seed, "train", 1, 0), None)
    model = made(config, objective)

    def init():
        return model.init(jax.random.key(0), batch["inputs"], **arguments(batch))["params"]

    found = by_path(nn.unbox(jax.eval_shape(init))).items()
    return sum(math.prod(x.shape) for path, x in found if path.rpartition("/")[2] not in RUNNING)


def made(config: ConfigDict, objective: Objective) -> Model:
    """The model without the implementations asked for: they have no weights, and may need other machines."""
    c = config.copy_and_resolve_references()
    for section in c.model.values():
        if isinstance(section, ConfigDict) and "implementation" in section:
            with section.unlocked(), section.ignore_type():
                section.implementation = None
    return model_for(objective, c)
