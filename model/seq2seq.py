"""Sequence to sequence with attention (https://arxiv.org/abs/1409.0473): a GRU reads, another writes and looks back.

Shape letters besides those of the contract: S tokens of the source, T of the target.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from model.contract import Context, State, wide
from model.documents import document_positions, open_reading
from model.errors import UserError
from model.layers import Embed, dense
from model.mixers.recurrent import GRU, gru, orthogonal_gates, to_gates
from model.ops.attention import attention, attention_weights
from model.ops.mask import FULL


@struct.dataclass
class Source:
    """All that the decoder knows of a source."""

    annotations: jax.Array  # [B, S, 2D], h: both directions of the encoder
    keys: jax.Array  # [B, S, D], U_a h: the same at every step, so made once
    segments: jax.Array  # [B, S] int32, 0 is padding


@struct.dataclass
class Decoder:
    """The decoder's parameters that its loop over time needs."""

    W_a: jax.Array  # [D, D]
    v_a: jax.Array  # [D]
    C: jax.Array  # [2D, 3, D], from the context to the gates
    U: jax.Array  # [D, 3, D], from the past to the gates
    bias: jax.Array  # [3, D], of the past


def scoring(p: Decoder, s: jax.Array, source: Source) -> dict[str, Any]:
    """The attention op's arguments for scores `v_a . tanh(W_a s + U_a h)`; s: [B, T, D]."""
    dtype = source.keys.dtype
    return dict(
        q=(s.astype(dtype) @ p.W_a.astype(dtype))[:, :, None],
        k=source.keys[:, :, None],
        v=source.annotations[:, :, None],
        q_segments=jnp.ones(s.shape[:2], jnp.int32),
        k_segments=(source.segments > 0).astype(jnp.int32),
        additive=p.v_a[None],
        mask=FULL,
    )


def attending_gru(p: Decoder, s: jax.Array, x: jax.Array, source: Source) -> tuple[jax.Array, jax.Array]:
    """One step: the next state `[B, D]` and the context `[B, 2D]`; x: [B, 3, D], what the token says to the gates.

    The last state asks, before the token is read; what it finds joins the token.
    """
    context = attention(**scoring(p, s[:, None], source))[:, 0, 0]
    x = x.astype(s.dtype) + to_gates(context, p.C, context.dtype)
    return gru(dict(h=s), x, to_gates(s, p.U, context.dtype) + p.bias)["h"], context


def write(
    p: Decoder, s: jax.Array, x: jax.Array, source: Source, real: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last state, the states `[B, T, D]` and the contexts `[B, T, 2D]`; x: [B, T, 3, D]; real: [B, T]."""

    def step(s, token):
        x, real = token
        new, context = attending_gru(p, s, x, source)
        s = jnp.where(real[:, None], new, s)
        return s, (s, context)

    # The backward pass scores anew: kept, the scores' hidden layer would take T S D numbers.
    step = jax.checkpoint(step, prevent_cse=False)
    last, kept = jax.lax.scan(step, s, (jnp.swapaxes(x, 0, 1), real.T))
    return last, *(jnp.swapaxes(y, 0, 1) for y in kept)


def cut(segments: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """Of rows that end in a target of T tokens: the source's segments `[B, S]`, and where the target begins, `[B]`.

    Padding may lie behind the target, and anywhere in the source.
    """
    L = segments.shape[1]
    if not 0 < T < L:
        raise UserError(
            f"rows of {L} tokens cannot end in a target of {T}; allowed: at least 1, and 1 of source before it; "
            f"closest: {min(max(T, 1), max(L - 1, 1))}"
        )
    index = jnp.arange(L, dtype=jnp.int32)
    begin = jnp.max(jnp.where(segments > 0, index + 1, T), axis=1) - T
    return jnp.where(index < begin[:, None], segments, 0)[:, : L - T], begin


class Seq2Seq(nn.Module):
    """A GRU that reads a source both ways, and one that writes a target and looks back at every step.

    It is called as a `SequenceModel` is. A row of token ids is a source and behind it a target, each of whose tokens
    is read and answered by the logits of the next: teacher forcing, where the row holds the answers. In our tasks it
    does not: at the places asked it holds markers or keys, the same for every model, in training and in tests. To
    generate, the first call with a state brings a source and one token to begin with; those after it go on with the
    target by any number of tokens.
    """

    vocab_size: int
    width: int  # of embeddings and of every state
    target: int  # T, tokens at the end of each row
    dropout: float = 0.0  # of embeddings
    dtype: Any = jnp.float32

    n_classes: ClassVar[int] = 0  # it is no classifier
    cls: ClassVar[bool] = False
    sees_ahead: ClassVar[bool] = False
    causal: ClassVar[bool] = True  # no token of the target sees a later one
    shortest_prompt: ClassVar[int] = 2  # a source and a token to begin with

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        state: State = None,
        at: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, State]:
        """Logits `[B, T, V]` of the target, or `[B, Q, V]` at the row's positions `at`; and the state.

        The source is not predicted: asked there, the model answers NaN.
        """
        real = jnp.ones(tokens.shape, jnp.int32) if segments is None else (segments > 0).astype(jnp.int32)
        embed = Embed(self.vocab_size, self.width, scale=1.0, dtype=self.dtype, name="embed")
        y = nn.Dropout(self.dropout, name="embed_dropout")(embed(tokens), deterministic=not train)
        y = nn.with_logical_constraint(y, ("batch", None, None))  # whole rows: the loops go along them
        if state:
            source, s = state["source"], state["s"]
        else:
            T = self.target if state is None else 1
            read, begin = cut(real, T)
            source, s = self.encode(y[:, : read.shape[1]], read)
            target_of = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, T))
            y, real = target_of(y, begin), target_of(real, begin)
            at = None if at is None else at - begin[:, None]

        p = self.decoder()
        x = dense((3, self.width), ("embed", None, "inner"), self.dtype, "W", bias=True)(y)
        last, states, contexts = write(p, s, x, source, real > 0)
        if self.is_mutable_collection("maps") and not self.is_initializing():
            before = jnp.concatenate([s[:, None], states[:, :-1]], axis=1)
            self.sow("maps", "weights", attention_weights(**scoring(p, before, source)))
        out = jnp.concatenate([states.astype(self.dtype), y, contexts], axis=-1)
        return self.answer(out, at), None if state is None else dict(source=source, s=last)

    def encode(self, x: jax.Array, segments: jax.Array) -> tuple[Source, jax.Array]:
        """The source as the decoder sees it, and the decoder's first state; x: [B, S, D]."""
        positions, _ = document_positions(segments, open_reading(len(segments)))
        encoder = GRU(2 * self.width, causal=False, dtype=self.dtype, hidden=self.width, name="encoder")
        h, _ = encoder(x, Context(positions, segments))
        keys = dense(self.width, ("embed", "inner"), self.dtype, "U_a")(h)
        # Going backwards, the encoder ends at the first token with all of the source behind it.
        s = nn.tanh(dense(self.width, ("embed", "inner"), self.dtype, "W_s")(h[:, 0, self.width :]))
        return Source(h, keys, segments), s.astype(wide(self.dtype))

    def decoder(self) -> Decoder:
        D, f = self.width, wide(self.dtype)
        fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))

        def param(name, init, shape, axes):
            return self.param(name, nn.with_logical_partitioning(init, axes), shape, f)

        return Decoder(
            W_a=param("W_a", nn.initializers.normal(D**-0.5), (D, D), (None, "inner")),
            v_a=param("v_a", nn.initializers.normal(D**-0.5), (D,), ("inner",)),
            C=param("C", fan_in, (2 * D, 3, D), ("embed", None, "inner")),
            U=param("U", orthogonal_gates, (D, 3, D), (None, None, "inner")),
            bias=param("bias", nn.initializers.zeros_init(), (3, D), (None, "inner")),
        )

    def answer(self, x: jax.Array, at: jax.Array | None) -> jax.Array:
        """Logits from states, tokens and contexts, by a maxout layer as in the paper."""
        if at is not None:  # before the unembedding, which costs V per position
            x = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None], axis=1)
        x = dense((self.width, 2), ("embed", "mlp", None), self.dtype, "readout")(x).max(-1)
        logits = dense(self.vocab_size, ("embed", "vocab"), self.dtype, "unembed", out=wide(self.dtype))(x)
        return logits if at is None else jnp.where(at[..., None] >= 0, logits, jnp.nan)

    def limit(self) -> None:
        """None: its target goes on for ever."""
        return None

    def init_state(self, batch: int, max_len: int) -> State:
        """Nothing read: a state takes its size from the source, which the first call brings."""
        return {}

    def state_bytes(self, length: int) -> int:
        """Bytes that the decoder keeps of one row of `length` tokens: the source's, whatever has been written."""
        per_token = 3 * self.width * jnp.dtype(self.dtype).itemsize + 4
        return (length - self.target) * per_token + self.width * jnp.dtype(wide(self.dtype)).itemsize
