"""The value of what was masked: pixels, audio, series (SimMIM, https://arxiv.org/abs/2111.09886)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from data import TASKS, Task
from model.asked import Asked, Image
from model.build import Model
from model.errors import UserError
from model.inputs import patches
from model.layers import check_divides
from model.settings import Dim, Positive, above, below
from train.corruption import row_keys
from train.objective import Batch, Objective

TESTED = 0  # the seed of what a test masks, so that it asks the same each time


def chosen(key: jax.Array, n: int, rate: float) -> jax.Array:
    """Which of n places are masked, `[n]`: a share of them, and at least one."""
    clocks = jax.random.uniform(key, (n,))
    return clocks <= jnp.sort(clocks)[max(round(rate * n), 1) - 1]


@dataclass(frozen=True)
class MaskedValues(Objective):
    """The numbers of vectors or patches that were masked, by the mean of the absolute error (SimMIM).

    In their place the model reads one vector that it learns. Accuracy is the share of numbers missed by less than the
    tolerance.
    """

    rate: Annotated[float, above(0), below(1)] = 0.6  # of the vectors, or of an image's squares, that are masked
    square: Dim = 16  # pixels in a side of what is masked together, one patch or several
    tolerance: Positive = 0.1  # of the accuracy

    name: ClassVar[str] = "masked_values"

    def check_task(self, task: Task) -> None:
        if task.inputs is None or task.image:
            able = ", ".join(name for name, one in TASKS.items() if one.inputs is not Task.inputs)
            raise UserError(
                f"objective 'masked_values' needs rows of real numbers, and task {task.name!r} has none; allowed: "
                f"data.task={able}; closest: objective.kind=task"
            )
        if isinstance(task.inputs, Image):
            for side in ("height", "width"):
                what = f"the image's {side}"
                check_divides("objective.masked_values.square", self.square, what, getattr(task.inputs, side))
        if self.label_smoothing:
            raise UserError(
                f"objective.label_smoothing is {self.label_smoothing}, and objective 'masked_values' has no labels; "
                "closest: 0.0"
            )

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        if section["causal"]:
            raise UserError(
                "objective 'masked_values' asks for numbers by those on both sides, and a causal model sees one; "
                "closest: model.causal=False"
            )
        if isinstance(self.task.inputs, Image):
            check_divides("model.patch", section["patch"], "objective.masked_values.square", self.square)

    @property
    def asked(self) -> Asked:
        return replace(super().asked, n_classes=0, values=True)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {}

    def baselines(self) -> dict[str, float]:
        return {}

    def view(self, batch: Batch, rng: jax.Array | None) -> Batch:
        """What is `masked`, `[B, L]` or by the pixel `[B, height, width]`."""
        bits = jax.lax.bitcast_convert_type(jnp.asarray(batch["inputs"], jnp.float32), jnp.uint32)
        B, *shape = bits.shape[:-1]
        keys = row_keys(jax.random.key(TESTED) if rng is None else rng, bits.reshape(B, -1))
        sides = [n // self.square for n in shape] if isinstance(self.task.inputs, Image) else shape
        masked = jax.vmap(lambda key: chosen(key, math.prod(sides), self.rate))(keys).reshape(B, *sides)
        for axis in range(1, masked.ndim) if masked.ndim > 2 else ():
            masked = jnp.repeat(masked, self.square, axis=axis)
        return {**batch, "masked": masked}

    def targets(self, batch: Batch, smoothing: float) -> None:
        """The model is asked for its answers themselves."""
        return None

    def judge(self, found: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        values, masked = batch["inputs"], batch["masked"]
        if values.ndim > 3:
            side = math.isqrt(found.shape[-1] // values.shape[-1])
            values, masked = patches(values, side), patches(masked[..., None], side)[..., 0]
        off = jnp.abs(found - values)
        weights = batch["weights"].reshape(len(values), -1).max(1, keepdims=True) * masked
        if "segments" in batch:
            weights = weights * (batch["segments"] > 0)
        return off.mean(-1), (off < self.tolerance).mean(-1), weights
