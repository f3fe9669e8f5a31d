"""The whole model: tokens -> embedding -> stack -> logits over the vocabulary or over classes."""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.block import ACTIVATION
from model.contract import Context, State, wide
from model.documents import Reading, document_positions, open_reading
from model.layers import Embed, dense, norm
from model.positions import Position
from model.stack import Stack, mixer_of


class SequenceModel(nn.Module):
    """A language model, or with `n_classes` a classifier, over token ids `[B, L]`."""

    vocab_size: int
    width: int
    stack: Callable[..., Stack]
    position: Callable[..., Position] = Position
    n_classes: int = 0  # 0: a language model
    pool: str = "mean"
    norm: str = "rmsnorm"
    tied: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32

    shortest_prompt: ClassVar[int] = 1  # tokens from which it can go on

    @property
    def causal(self) -> bool:
        """Whether no layer sees what comes later, so that the model can generate."""
        return all(mixer_of(block).causal for block in self.stack(parent=None).blocks)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        state: State = None,
        at: jax.Array | None = None,
        memory: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, State]:
        """Logits `[B, L, V]`, or `[B, Q, V]` at the positions `at`, or `[B, C]`; and the state after these tokens.

        `memory` `[B, M, D]` is what cross-attention reads; of `memory_segments` 0 is padding.
        """
        f = wide(self.dtype)
        embed = Embed(self.vocab_size, self.width, dtype=self.dtype, name="embed")
        x = embed(tokens)
        if self.n_classes and self.pool == "cls":
            cls = self.param(
                "cls",
                nn.with_logical_partitioning(nn.initializers.zeros_init(), ("embed",)),
                (self.width,),
                f,
            )
            x = jnp.concatenate([jnp.broadcast_to(cls.astype(x.dtype), (*x.shape[:1], 1, self.width)), x], axis=1)
            segments = None if segments is None else jnp.concatenate([segments[:, :1], segments], axis=1)

        positions, reading = self.place(x, segments, state)
        ctx = Context(positions, segments, memory, memory_segments, train)
        at_all = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
        x = self.position(name="position", dtype=self.dtype).embed(x, at_all)
        x = nn.Dropout(self.dropout, name="embed_dropout")(x, deterministic=not train)
        x = nn.with_logical_constraint(x, ACTIVATION)
        x, inner = self.stack(name="stack")(x, ctx, None if state is None else state["stack"])
        state = None if state is None else dict(reading=reading, stack=inner)

        if self.n_classes:
            x = norm(self.norm, self.dtype, "norm")(pooled(x, segments, self.pool))
            return dense(self.n_classes, ("embed", None), self.dtype, "classes", bias=True, out=f)(x), state
        if at is not None:  # before the unembedding, which costs V per position
            x = jnp.take_along_axis(x, at[..., None], axis=1)
        x = norm(self.norm, self.dtype, "norm")(x)
        if self.tied:
            logits = embed.attend(x)
        else:
            logits = dense(self.vocab_size, ("embed", "vocab"), self.dtype, "unembed", out=f)(x)
        return logits, state

    def place(self, x: jax.Array, segments: jax.Array | None, state: State) -> tuple[jax.Array | None, Reading | None]:
        """Positions within documents, `[B, L]` or None for 0, 1, 2, ..., and with a state the reading to go on from."""
        B, L = x.shape[:2]
        if segments is None and state is None:
            return None, None
        if segments is None:  # one document a row, going on where the last call stopped
            reading = state["reading"]
            positions = reading.count[:, None] + jnp.arange(L, dtype=jnp.int32)
            return positions, Reading(segment=jnp.ones(B, jnp.int32), count=reading.count + L)
        return document_positions(segments, open_reading(B) if state is None else state["reading"])

    def limit(self) -> int | None:
        """The number of positions that it can place; None: any."""
        return self.position(parent=None).limit()

    def init_state(self, batch: int, max_len: int) -> State:
        """An empty past of every layer, for generation."""
        return dict(reading=open_reading(batch), stack=self.stack(parent=None).init_state(batch, max_len))

    def state_bytes(self, length: int) -> int:
        """Bytes that the layers keep of one row's past of `length` tokens."""
        return self.stack(parent=None).state_bytes(length)


def pooled(x: jax.Array, segments: jax.Array | None, pool: str) -> jax.Array:
    """One vector a row, `[B, D]`: the first, or the mean or last of those that are not padding."""
    B, L, _ = x.shape
    if pool == "cls":
        return x[:, 0]
    real = jnp.ones((B, L), bool) if segments is None else segments > 0
    if pool == "last":
        last = jnp.max(jnp.where(real, jnp.arange(L), 0), axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    weight = real.astype(wide(x.dtype))
    total = jnp.einsum("bl,bld->bd", weight, x, preferred_element_type=weight.dtype)
    return (total / jnp.maximum(weight.sum(1, keepdims=True), 1)).astype(x.dtype)
