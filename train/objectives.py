"""The objectives there are, by the names of `objective.kind`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from data import Task
from model.build import Model
from model.documents import document_positions, open_reading
from model.errors import UserError, choose
from model.settings import Fraction, Length, above, at_most
from train import corruption
from train.contrastive import Contrastive
from train.denoising import Infilling, SpanCorruption
from train.masked_values import MaskedValues
from train.objective import Batch, Objective, row_keys, row_weights

Share = Annotated[float, above(0), at_most(1)]


@dataclass(frozen=True)
class TaskTargets(Objective):
    """The task's own targets: the next token, a class, a label for each token, an answer where it asks."""

    name: ClassVar[str] = "task"
    likelihood: ClassVar[bool] = True

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        if self.task.next_token and model.sees_ahead:
            raise UserError(
                f"task {self.task.name!r} asks for the next token, and this model sees it; allowed: model.causal=True "
                "and no prefix"
            )


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
class Masked(Objective):
    """Tokens that were masked in running text, read bidirectionally (BERT, https://arxiv.org/abs/1810.04805)."""

    rate: Share = 0.15  # of the tokens, which are asked for
    mask: Fraction = 0.8  # of those, which a mask token hides
    random: Fraction = 0.1  # of those, which any token takes the place of; the rest stay as they are

    name: ClassVar[str] = "masked"
    needs_text: ClassVar[bool] = True

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
            **{name: taken(array) for name, array in batch.items() if name.startswith("attr_")},
            **({} if segments is None else {"segments": segments}),
            "inputs": inputs,
            "at": at,
            "targets": taken(tokens),
            "weights": counts * row_weights(batch)[:, None],
        }


OBJECTIVES: dict[str, type[Objective]] = {
    one.name: one for one in (TaskTargets, PrefixLM, Masked, SpanCorruption, Infilling, MaskedValues, Contrastive)
}


def build(section: Mapping[str, Any], task: Task) -> Objective:
    """The objective that a config's section names, of a task."""
    kind = section["kind"]
    return choose("objective", kind, OBJECTIVES)(task, section["label_smoothing"], **section.get(kind, {}))
