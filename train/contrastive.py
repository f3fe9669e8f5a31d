"""Contrastive training of two towers: of all rows in the batch, which is the partner."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from data import TASKS, Task
from model.asked import Asked
from model.errors import UserError
from model.settings import Positive
from train.objective import Batch, Objective


def info_nce(logits: jax.Array, here: jax.Array) -> jax.Array:
    """The loss of each pair, `[B]`: -log p of its partner among those here, the mean of both directions.

    InfoNCE (https://arxiv.org/abs/1807.03748), symmetric as in CLIP (https://arxiv.org/abs/2103.00020).
    logits: [B, B], of the first of a pair with the second of another; here: [B], whether a pair is one at all.
    """
    least = -0.5 * jnp.finfo(logits.dtype).max  # half, so that rows of nothing else stay finite
    seconds = jax.nn.log_softmax(jnp.where(here[None, :], logits, least), axis=1)
    firsts = jax.nn.log_softmax(jnp.where(here[:, None], logits, least), axis=0)
    return -(jnp.diagonal(seconds) + jnp.diagonal(firsts)) / 2


@dataclass(frozen=True)
class Contrastive(Objective):
    """Whose partner each row is, among all rows of the batch, by the cosine of their vectors (InfoNCE, symmetric).

    A pair of the task that does not match is asked of nobody, and its rows are two that others could be taken for.
    Where a step accumulates, the others are those of the micro-batch.
    """

    temperature: Positive = 0.07  # cosines are divided by it

    name: ClassVar[str] = "contrastive"
    compares_rows: ClassVar[bool] = True

    def check_task(self, task: Task) -> None:
        if not task.pair:
            able = ", ".join(name for name, one in TASKS.items() if one.pair)
            raise UserError(
                f"objective 'contrastive' needs pairs, and task {task.name!r} has none; allowed: data.task={able}; "
                "closest: objective.kind=task"
            )
        if self.label_smoothing:
            raise UserError(
                f"objective.label_smoothing is {self.label_smoothing}, and objective 'contrastive' has no labels; "
                "closest: 0.0"
            )

    @property
    def asked(self) -> Asked:
        return replace(super().asked, n_classes=0)

    def baselines(self) -> dict[str, float]:
        return {}  # chance is one over the batch

    def targets(self, batch: Batch, smoothing: float) -> None:
        """The model is asked for its answers themselves."""
        return None

    def judge(self, found: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of each pair; it is hit if no other second is nearer to its first."""
        here = batch["weights"] > 0
        weights = batch["weights"] * (batch["targets"] > 0)
        nearest = jnp.argmax(jnp.where(here[None, :], found, -2), axis=1)
        return info_nce(found / self.temperature, here), nearest == jnp.arange(len(nearest)), weights
