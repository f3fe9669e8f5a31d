"""The model of one sequence: token ids -> embedding -> backbone -> head."""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.backbone import Backbone
from model.contract import State
from model.heads import Head
from model.layers import Embed


class SequenceModel(nn.Module):
    """A language model or a classifier, as its head has it, over token ids `[B, L]`."""

    vocab_size: int
    width: int
    backbone: Callable[..., Backbone]
    head: Callable[..., Head]
    embed_scale: float = 1.0  # of the embeddings
    dtype: Any = jnp.float32

    shortest_prompt: ClassVar[int] = 1  # tokens from which it can go on
    source: ClassVar[int] = 0  # it reads one sequence

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
        """Logits `[B, L, V]`, or `[B, Q, V]` at the positions `at`, or `[B, C]`; and the state after these tokens."""
        embed = Embed(self.vocab_size, self.width, dtype=self.dtype, name="embed")
        backbone, head = self.backbone(name="backbone"), self.head(name="head")
        for part in (backbone, head):  # of one backbone and one head, parameters need no names before their own
            nn.share_scope(self, part)
        x = embed(tokens)
        if self.embed_scale != 1:
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        x, state = backbone(x, segments, state, memory, memory_segments, train)
        return head(x, segments, at, embed), state

    def bare(self) -> Backbone:
        """The backbone, unbound: good for questions that need no parameters."""
        return self.backbone(parent=None)

    @property
    def causal(self) -> bool:
        """Whether every layer can go on from a state, so that the model can generate."""
        return self.bare().causal

    @property
    def sees_ahead(self) -> bool:
        """Whether a layer sees what comes later."""
        return self.bare().sees_ahead

    @property
    def cls(self) -> bool:
        """Whether a vector stands in front of each row."""
        return self.bare().cls

    @property
    def n_classes(self) -> int:
        """0: a language model."""
        return self.head(parent=None).n_classes

    def limit(self) -> int | None:
        """The number of positions that it can place; None: any."""
        return self.bare().limit()

    def source_limit(self) -> None:
        """None: it reads no source."""
        return None

    def init_state(self, batch: int, max_len: int) -> State:
        """An empty past of every layer, for generation."""
        return self.bare().init_state(batch, max_len)

    def state_bytes(self, length: int) -> int:
        """Bytes that the layers keep of one row's past of `length` tokens."""
        return self.bare().state_bytes(length)
