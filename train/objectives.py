"""The objectives there are, by the names of `objective.kind`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from data import Task
from model.asked import Asked
from model.build import Model
from model.documents import document_positions, open_reading
from model.errors import UserError, choose
from model.settings import Fraction, Length, above, at_most
from train import corruption
from train.contrastive import Contrastive
from train.denoising import Infilling, SpanCorruption
from train.masked_values import MaskedValues
from train.objective import Batch, Objective, Sums, row_keys, row_weights
from train.reach import FLOOR, sensitivity

Share = Annotated[float, above(0), at_most(1)]


@dataclass(frozen=True)
class TaskTargets(Objective):
    """The task's own targets: the next token, a class, a label for each token, an answer where it asks."""

    name: ClassVar[str] = "task"
    likelihood: ClassVar[bool] = True

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        if self.task.shows_answers and model.sees_ahead:
            raise UserError(
                f"task {self.task.name!r} asks for the next token, and this model sees it; allowed: model.causal=True "
                "and no prefix"
            )


@dataclass(frozen=True)
class Reach(TaskTargets):
    """The task's own targets; tests also tell how much the last answer of a row depends on its first token.

    `reach` is the mean of the decimal logarithm of the norm of a gradient (see train/reach.py), so that runs tested at
    many lengths show how it vanishes with distance.
    """

    name: ClassVar[str] = "reach"
    model_kinds: ClassVar[tuple[str, ...]] = ("stack",)

    def check_task(self, task: Task) -> None:
        if task.inputs or task.image or task.pair:
            raise UserError(
                f"objective 'reach' asks about the tokens of one row, and task {task.name!r} brings more or others; "
                "closest: objective.kind=task"
            )

    def __call__(self, model: Model, params: Any, batch: Batch, rng: jax.Array | None) -> Sums:
        sums = super().__call__(model, params, batch, rng)
        if rng is None:
            first = jnp.log10(jnp.maximum(sensitivity(model, params, batch)[:, 0], FLOOR))
            rows = (batch["weights"].reshape(first.shape[0], -1) > 0).any(axis=1).astype(first.dtype)
            sums["reach"] = (first * rows).sum(), rows.sum()
        return sums


@dataclass(frozen=True)
class PrefixLM(Objective):
    """The next token of running text whose first tokens see each other bidirectionally, and are not asked for.

    (https://arxiv.org/abs/1910.10683, section 3.2.)
    """

    prefix: Length = 32  # tokens

    name: ClassVar[str] = "prefix_lm"
    needs_text: ClassVar[bool] = True
    likelihood: ClassVar[bool] = True

    def check_task(self, task: Task) -> None:
        if self.prefix > task.length:
            raise UserError(
                f"objective.prefix_lm.prefix is {self.prefix}, and rows of task {task.name!r} have {task.length} "
                f"tokens; closest: {task.length}"
            )

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        if not section["causal"]:
            raise UserError(
                "objective 'prefix_lm' asks for the next token, and this model sees it; closest: model.causal=True"
            )
        given = {name: section[name]["prefix"] for name in section["mixers"] if "prefix" in section.get(name, {})}
        if not given:
            raise UserError(
                f"objective 'prefix_lm' needs a layer with a prefix, and mixers {tuple(section['mixers'])} have none; "
                f"closest: model.mixers=attention and model.attention.prefix={self.prefix}"
            )
        for name, prefix in given.items():
            if prefix != self.prefix:
                sees = "sees its answers" if prefix > self.prefix else "sees no such prefix"
                raise UserError(
                    f"model.{name}.prefix is {prefix}, and a model so made {sees}: objective.prefix_lm.prefix is "
                    f"{self.prefix}; allowed: the same in both; closest: model.{name}.prefix={self.prefix}"
                )

    def view(self, batch: Batch, rng: jax.Array | None) -> Batch:
        tokens, segments = batch["inputs"], batch.get("segments")
        place = jnp.arange(tokens.shape[1])
        if segments is not None:
            place, _ = document_positions(segments, open_reading(tokens.shape[0]))
        # Position i asks for token i + 1, which the prefix may hold.
        return {**batch, "weights": batch["weights"] * (place + 1 >= self.prefix)}


@dataclass(frozen=True)
class OwnTargets(Objective):
    """Targets made of the tokens of a row, which may be running text or be there to be classified."""

    needs_text: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = True

    @property
    def asked(self) -> Asked:
        return replace(super().asked, n_classes=0)

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return self.task.attributes if self.task.running_text else {}  # else they are of classes

    def baselines(self) -> dict[str, float]:
        return self.task.baselines() if self.task.running_text else {"chance": 1 / self.task.vocab_size}


@dataclass(frozen=True)
class NextToken(OwnTargets):
    """The next token of rows that are there to be classified: pre-training on a task's own inputs, read forward.

    (Amos et al. 2023, https://arxiv.org/abs/2310.02980.)
    """

    name: ClassVar[str] = "next_token"
    likelihood: ClassVar[bool] = True

    def check_task(self, task: Task) -> None:
        if task.next_token:
            raise UserError(f"task {task.name!r} asks for the next token itself; closest: objective.kind=task")
        if task.length < 2:
            raise UserError(
                f"objective 'next_token' asks for the next token, and rows of task {task.name!r} have {task.length}; "
                f"closest: data.{task.name}.length=2"
            )

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        if model.sees_ahead:
            raise UserError(
                "objective 'next_token' asks for the next token, and this model sees it; closest: model.causal=True"
            )

    def view(self, batch: Batch, rng: jax.Array | None) -> Batch:
        tokens, segments = batch["inputs"], batch.get("segments")
        real = jnp.ones(tokens.shape, bool) if segments is None else segments > 0
        asked = jnp.pad(real[:, :-1] & real[:, 1:], ((0, 0), (0, 1)))  # the last token has none after it
        return {
            **({} if segments is None else {"segments": segments}),
            "inputs": tokens,
            "targets": jnp.roll(tokens, -1, axis=1),
            "weights": asked * row_weights(batch)[:, None],
        }


@dataclass(frozen=True)
class Masked(OwnTargets):
    """Tokens that were masked, read bidirectionally (BERT, https://arxiv.org/abs/1810.04805)."""

    rate: Share = 0.15  # of the tokens, which are asked for
    mask: Fraction = 0.8  # of those, which a mask token hides
    random: Fraction = 0.1  # of those, which any token takes the place of; the rest stay as they are

    name: ClassVar[str] = "masked"

    def check_task(self, task: Task) -> None:
        if self.mask + self.random > 1 + 1e-6:
            raise UserError(
                f"objective.masked.mask {self.mask} and objective.masked.random {self.random} are shares of the same "
                f"tokens; allowed: up to 1 together; closest: random {max(1 - self.mask, 0.0):.4g}"
            )

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        if section["causal"]:
            raise UserError(
                "objective 'masked' asks for tokens by those on both sides, and a causal model sees one; closest: "
                "model.causal=False"
            )

    @property
    def extra_tokens(self) -> int:
        return 1

    def view(self, batch: Batch, rng: jax.Array | None) -> Batch:
        """The corrupted text, asked at the chosen tokens alone."""
        tokens, segments = batch["inputs"], batch.get("segments")
        one = partial(
            corruption.mask,
            rate=self.rate,
            mask_token=self.task.vocab_size,
            mask_share=self.mask,
            random_share=self.random,
        )
        real = None if segments is None else segments > 0
        inputs, at, counts = jax.vmap(one)(row_keys(rng, tokens), tokens, real)

        def taken(array: jax.Array) -> jax.Array:
            return jnp.take_along_axis(array, at, axis=1)

        return {
            **{f"attr_{name}": taken(batch[f"attr_{name}"]) for name in self.attributes},
            **({} if segments is None else {"segments": segments}),
            "inputs": inputs,
            "at": at,
            "targets": taken(tokens),
            "weights": counts * row_weights(batch)[:, None],
        }


_ALL = (TaskTargets, Reach, PrefixLM, NextToken, Masked, SpanCorruption, Infilling, MaskedValues, Contrastive)
OBJECTIVES: dict[str, type[Objective]] = {one.name: one for one in _ALL}


def build(section: Mapping[str, Any], task: Task) -> Objective:
    """The objective that a config's section names, of a task."""
    kind = section["kind"]
    return choose("objective", kind, OBJECTIVES)(task, section["label_smoothing"], **section.get(kind, {}))
