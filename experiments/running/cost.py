"""What runs cost, before any of them starts: steps, tokens, and floating-point operations by a rule of thumb."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
from flax import linen as nn
from ml_collections import ConfigDict

import data
from data.pipeline import batch_at
from model.contract import RUNNING
from model.paths import by_path
from train.objective import Objective, arguments
from train.objectives import build
from train.run import model_for


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


def of(asked: Iterable[ConfigDict]) -> Cost:
    """What it takes to train these from the first step to the last; their data must be there."""
    jax.config.update("jax_platforms", "cpu")  # for shapes alone: accelerators are for the runs
    objectives: dict[str, Objective] = {}
    counted: dict[str, int] = {}
    total = Cost(0, 0, 0, 0)
    for c in asked:
        section = c.data[c.data.task].to_dict()
        key = str((c.data.task, section, c.objective.to_dict()))
        if key not in objectives:
            objectives[key] = build(c.objective.to_dict(), data.build(c.data.task, section))
        objective = objectives[key]
        shape = str((c.model.to_dict(), objective.asked))
        if shape not in counted:
            counted[shape] = parameters(c, objective)
        tokens = c.steps * c.batch_size * objective.task.length * (2 if objective.task.pair else 1)
        one = Cost(1, c.steps, tokens, 6 * counted[shape] * tokens)
        total = Cost(*map(sum, zip(total, one, strict=True)))
    return total


def parameters(config: ConfigDict, objective: Objective) -> int:
    """Numbers that a model has to train, by the shapes that its first call would give them."""
    batch = objective.view(batch_at(objective.task, config.data.seed, "train", 1, 0), None)
    model = model_for(objective, anywhere(config))

    def init():
        return model.init(jax.random.key(0), batch["inputs"], **arguments(batch))["params"]

    found = by_path(nn.unbox(jax.eval_shape(init))).items()
    return sum(math.prod(x.shape) for path, x in found if path.rpartition("/")[2] not in RUNNING)


def anywhere(config: ConfigDict) -> ConfigDict:
    """The same model without the implementations asked for: they have no weights, and may need other machines."""
    made = config.copy_and_resolve_references()
    for section in made.model.values():
        if isinstance(section, ConfigDict) and "implementation" in section:
            with section.unlocked(), section.ignore_type():
                section.implementation = None
    return made
