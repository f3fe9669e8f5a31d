"""What stands between the inputs and the heads: positions and a stack of layers, vectors `[B, L, D]` in and out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.block import ACTIVATION
from model.contract import Context, State, wide
from model.documents import Reading, document_positions, open_reading
from model.layers import stream_norm
from model.positions import Position
from model.stack import Stack


class Backbone(nn.Module):
    """A stack of layers over embedded tokens; with `cls` over one vector more, a learned one in front of each row."""

    width: int
    stack: Callable[..., Stack]
    position: Callable[..., Position] = Position
    bias_heads: int = 0  # heads of every layer with scores, where they share the position's bias
    cls: bool = False
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_momentum: float = 0.9  # of running statistics, where it has some
    final_norm: bool = False  # behind the last layer, of all tokens; else it is for the head to do
    embed_norm: str = "none"  # of the embeddings: before or after the position adds to them
    dropout: float = 0.0  # of the embeddings
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segments: jax.Array | None = None,
        state: State = None,
        memory: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        train: bool = False,
        right_padded: bool = False,
    ) -> tuple[jax.Array, State]:
        """The vectors after the last layer, and the state after these tokens.

        `memory` `[B, M, D]` is what cross-attention reads; of `memory_segments` 0 is padding. `right_padded`: all
        segments hold one document a row, and padding behind it.
        """
        if self.cls:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("embed",))
            cls = self.param("cls", zeros, (self.width,), wide(self.dtype)).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(cls, (*x.shape[:1], 1, self.width)), x], axis=1)
            segments = None if segments is None else jnp.concatenate([segments[:, :1], segments], axis=1)
        positions, reading = place(x, segments, state)
        position = self.position(name="position", dtype=self.dtype)
        bias = position.bias(self.bias_heads, self.causal) if position.shares else None
        # A state must be that after the last token, and so is kept from padding by those who see nothing of it too.
        ctx = Context(positions, segments, memory, memory_segments, bias, train, right_padded and state is None)
        at_all = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if positions is None else positions
        normed = partial(stream_norm, self.norm, self.dtype, eps=self.norm_eps, momentum=self.norm_momentum)
        embed_norm = normed("embed_norm") if self.embed_norm != "none" else None
        x = embed_norm(x, ctx) if self.embed_norm == "before" else x
        x = position.embed(x, at_all)
        x = embed_norm(x, ctx) if self.embed_norm == "after" else x
        x = nn.Dropout(self.dropout, name="embed_dropout")(x, deterministic=not train)
        x = nn.with_logical_constraint(x, ACTIVATION)
        x, inner = self.stack(name="stack")(x, ctx, None if state is None else state["stack"])
        x = normed("norm")(x, ctx) if self.final_norm else x
        return x, None if state is None else dict(reading=reading, stack=inner)

    @property
    def causal(self) -> bool:
        """Whether every layer can go on from a state."""
        return self.stack(parent=None).causal

    @property
    def sees_ahead(self) -> bool:
        """Whether a layer sees what comes later."""
        return self.stack(parent=None).sees_ahead

    def limit(self) -> int | None:
        """The number of positions that it can place; None: any."""
        return self.position(parent=None).limit()

    def init_state(self, batch: int, max_len: int) -> State:
        """An empty past of every layer, for generation."""
        return dict(reading=open_reading(batch), stack=self.stack(parent=None).init_state(batch, max_len))

    def state_bytes(self, length: int, memory: int = 0) -> int:
        """Bytes that the layers keep of one row's past of `length` tokens, and of a memory of so many."""
        return self.stack(parent=None).state_bytes(length, memory)


def place(x: jax.Array, segments: jax.Array | None, state: State) -> tuple[jax.Array | None, Reading | None]:
    """Positions within documents, `[B, L]` or None for 0, 1, 2, ..., and with a state the reading to go on from."""
    B, L = x.shape[:2]
    if segments is None and state is None:
        return None, None
    if segments is None:  # one document a row, going on where the last call stopped
        reading = state["reading"]
        positions = reading.count[:, None] + jnp.arange(L, dtype=jnp.int32)
        return positions, Reading(segment=jnp.ones(B, jnp.int32), count=reading.count + L)
    return document_positions(segments, open_reading(B) if state is None else state["reading"])
