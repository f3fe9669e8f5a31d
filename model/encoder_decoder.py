"""The model of two sequences: a bidirectional encoder reads the source, a decoder writes the target."""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.backbone import Backbone
from model.contract import State
from model.heads import Answers, HeadContext, TokenHead
from model.layers import Embed, norm
from model.ops.cross_entropy import Targets
from model.source_target import Pair, apart, only_asked


class EncoderDecoder(nn.Module):
    """Two backbones over one embedding (https://arxiv.org/abs/1706.03762), of any mixers.

    Each layer of the decoder attends to the encoder's vectors. Where the source is given, the tokens are the target's,
    each answered by the logits of the next: teacher forcing. Where it is not, rows hold both, the target at their end.
    To generate, the first call with a state brings the source, whose keys and values the state then holds, and the
    target's first token or more; those after it go on with the target. A row that holds both then ends in that token.
    """

    vocab_size: int
    width: int
    encoder: Callable[..., Backbone]
    decoder: Callable[..., Backbone]
    head: Callable[..., TokenHead]
    source: int = 0  # S, tokens of a source that is given by name; 0: rows hold both
    target: int = 0  # T, tokens of the target in rows that hold both
    embed_init: float = 0.02  # standard deviation of the embeddings at the start
    embed_scale: float = 1.0  # of the embeddings
    dtype: Any = jnp.float32

    n_classes: ClassVar[int] = 0  # it is no classifier
    cls: ClassVar[bool] = False

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        state: State = None,
        at: jax.Array | None = None,
        source: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        train: bool = False,
        right_padded: bool = False,
        targets: Targets | None = None,
    ) -> tuple[Answers, State]:
        """Logits `[B, T, V]`, or `[B, Q, V]` at the positions `at`; and the state after these tokens.

        Where targets of that shape are given, their scores take the logits' place. `right_padded`: all segments hold
        one document a row, and padding behind it.
        """
        embed = Embed(self.vocab_size, self.width, self.embed_init, self.dtype, name="embed")
        encoder, decoder, head = self.encoder(name="encoder"), self.decoder(name="decoder"), self.head(name="head")
        nn.share_scope(self, head)

        def embedded(tokens: jax.Array) -> jax.Array:
            x = embed(tokens)
            return x if self.embed_scale == 1 else x * jnp.asarray(self.embed_scale, x.dtype)

        has_read = state is not None and "decoder" in state
        pair = Pair(source, source_segments, tokens, segments, at)
        if not has_read:
            pair = apart(pair, self.source, self.target if state is None else 1)
        memory = None
        if pair.source is not None:
            memory, _ = encoder(embedded(pair.source), pair.source_segments, train=train, right_padded=right_padded)
            if head.norm != "none":
                memory = norm(head.norm, self.dtype, "encoder_norm", head.norm_eps)(memory)
        past = None if state is None else state["decoder" if has_read else "unread"]
        segments, at = pair.target_segments, pair.at
        x, past = decoder(embedded(pair.target), segments, past, memory, pair.source_segments, train, right_padded)
        found = head(x, HeadContext(segments, None if at is None else jnp.maximum(at, 0), embed), targets)
        return only_asked(found, at, targets), None if state is None else dict(decoder=past)

    def sides(self) -> tuple[Backbone, Backbone]:
        """Encoder and decoder, unbound: good for questions that need no parameters."""
        return self.encoder(parent=None), self.decoder(parent=None)

    @property
    def causal(self) -> bool:
        """Whether every layer of the decoder can go on from a state, so that the model can generate."""
        return self.sides()[1].causal

    @property
    def sees_ahead(self) -> bool:
        """Whether a layer sees what comes later in the target."""
        return self.sides()[1].sees_ahead

    @property
    def shortest_prompt(self) -> int:
        """Tokens from which it can go on: one to begin with, and where rows hold both one of the source before it."""
        return 1 if self.source else 2

    def limit(self) -> int | None:
        """The number of positions that the decoder can place; None: any."""
        return self.sides()[1].limit()

    def source_limit(self) -> int | None:
        """The number of positions that the encoder can place; None: any."""
        return self.sides()[0].limit()

    def init_state(self, batch: int, max_len: int) -> State:
        """An empty past of every layer of the decoder, and no source read."""
        return dict(unread=self.sides()[1].init_state(batch, max_len))

    def state_bytes(self, length: int) -> int:
        """Bytes that the decoder keeps of one row of `length` tokens, and of the source, in it or given by name."""
        source, target = (self.source, length) if self.source else (length - self.target, self.target)
        return self.sides()[1].state_bytes(target, source)
