"""Objectives of two sequences: an encoder reads running text with parts of it hidden, a decoder writes what was there.

Shape letters: S tokens of the source, T of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from data import Task
from model.asked import Asked
from model.errors import UserError
from model.settings import Dim, above, at_least, at_most, below
from train import corruption
from train.objective import Batch, Objective, row_keys, row_weights

Mean = Annotated[float, at_least(1), at_most(1e4)]


@dataclass(frozen=True)
class Denoising(Objective):
    """Adds a token that ends the target, and with which the decoder begins."""

    needs_text: ClassVar[bool] = True
    model_kinds: ClassVar[tuple[str, ...]] = ("encoder_decoder",)

    def sizes(self) -> tuple[int, int]:
        """S and T."""
        raise NotImplementedError

    def corrupted(self, keys: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Of text `[B, L]`: sources `[B, S]`, their segments where they have padding, targets `[B, T - 1]`."""
        raise NotImplementedError

    def marks(self, n: int) -> list[int]:
        """What stands in a source for n hidden spans, one after another."""
        raise NotImplementedError

    def source(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """A source that shows these parts of a text, with something hidden between any two."""
        marks = self.marks(len(parts) - 1)
        return [
            token for part, mark in zip_longest(parts, ([m] for m in marks), fillvalue=[]) for token in (*part, *mark)
        ]

    @property
    def end(self) -> int:
        return self.task.vocab_size

    @property
    def asked(self) -> Asked:
        return replace(super().asked, source=self.sizes()[0])

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.task.length, *self.sizes())

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {}  # the task's are of its own targets

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.asked.vocab_size}

    def view(self, batch: Batch, rng: jax.Array | None) -> Batch:
        tokens = jnp.asarray(batch["inputs"])
        source, segments, target = self.corrupted(row_keys(rng, tokens), tokens)
        whole = ended(target, self.end)
        return {
            "inputs": jnp.concatenate([whole[:, -1:], target], axis=1),
            "targets": whole,
            "weights": jnp.broadcast_to(row_weights(batch)[:, None], whole.shape),
            "source": source,
            **({} if segments is None else {"source_segments": segments}),
        }


def ended(rows: jax.Array, end: int) -> jax.Array:
    """Rows `[B, L]` with one token more."""
    return jnp.pad(rows, ((0, 0), (0, 1)), constant_values=end)


@dataclass(frozen=True)
class SpanCorruption(Denoising):
    """Spans of running text, each hidden behind a sentinel of its own (T5, https://arxiv.org/abs/1910.10683)."""

    density: Annotated[float, above(0), below(1)] = 0.15  # of the tokens, which are hidden
    mean_span: Mean = 3.0  # tokens
    sentinels: Dim = 100  # that there are, which is the most spans that a row may have

    name: ClassVar[str] = "span_corruption"

    def check_task(self, task: Task) -> None:
        if task.length < 2:
            raise UserError(
                f"objective 'span_corruption' needs rows of at least 2 tokens; data.{task.name}.length is 1"
            )
        _, spans = self.counts()
        if spans > self.sentinels:
            raise UserError(
                f"objective.span_corruption.sentinels is {self.sentinels}, and rows of {task.length:,} tokens have "
                f"{spans:,} spans; allowed: at least as many; closest: {spans}"
            )

    def counts(self) -> tuple[int, int]:
        return corruption.span_counts(self.task.length, self.density, self.mean_span)

    @property
    def extra_tokens(self) -> int:
        return 1 + self.sentinels

    def sizes(self) -> tuple[int, int]:
        noise, spans = self.counts()
        return self.task.length - noise + spans + 1, noise + spans + 1

    def marks(self, n: int) -> list[int]:
        if n > self.sentinels:
            raise UserError(f"{n} spans are hidden; objective.span_corruption.sentinels allows {self.sentinels}")
        return [self.end + self.sentinels - i for i in range(n)]

    def source(self, parts: Sequence[Sequence[int]]) -> list[int]:
        return [*super().source(parts), self.end]

    def corrupted(self, keys: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        last = self.end + self.sentinels  # from which T5 counts down
        one = partial(corruption.spans, density=self.density, mean_span=self.mean_span, first_sentinel=last)
        source, target = jax.vmap(one)(keys, tokens)
        return ended(source, self.end), None, target


@dataclass(frozen=True)
class Infilling(Denoising):
    """All of a running text of which spans are hidden, each behind a mask (BART, https://arxiv.org/abs/1910.13461)."""

    rate: Annotated[float, above(0), at_most(1)] = 0.3  # of the tokens, which are hidden
    mean_span: Mean = 3.0  # tokens, of a Poisson law; a span of none is a mask too many

    name: ClassVar[str] = "infilling"

    @property
    def extra_tokens(self) -> int:
        return 2

    def sizes(self) -> tuple[int, int]:
        return self.task.length, self.task.length + 1

    def marks(self, n: int) -> list[int]:
        return [self.end + 1] * n

    def corrupted(self, keys: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        one = partial(corruption.infill, rate=self.rate, mean_span=self.mean_span, mask_token=self.end + 1)
        source, segments = jax.vmap(one)(keys, tokens)
        return source, segments, tokens
