"""Sequence to sequence by recurrent networks: one reads, another writes and looks back (https://arxiv.org/abs/1409.0473).

Shape letters besides those of the contract: S tokens of the source, T of the target, G gates of the cell.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from model import placement
from model.contract import Context, State, wide
from model.documents import document_positions, open_reading
from model.heads import Answers, over_vocabulary
from model.layers import Embed, Unembed, dense
from model.mixers.recurrent import GRU, LSTM, Recurrent, orthogonal_gates
from model.ops.attention import attention, attention_weights
from model.ops.cross_entropy import Readout, Targets
from model.ops.embedding import at_places
from model.ops.mask import FULL
from model.ops.recurrence import Past, to_gates
from model.source_target import Pair, apart, only_asked

CELLS: dict[str, type[Recurrent]] = {"gru": GRU, "lstm": LSTM}


@dataclass(frozen=True)
class Settings:
    """The section of a config that the kind `seq2seq` brings."""

    cell: Literal[*CELLS] = "gru"  # of the encoder and of the decoder
    # Whether the decoder looks at every token of the source; False: it knows of it one vector, the encoder's last
    # states (https://arxiv.org/abs/1406.1078).
    attention: bool = True


@struct.dataclass
class Source:
    """All that the decoder knows of a source."""

    annotations: jax.Array  # [B, S, 2D], h: both directions of the encoder; or [B, 1, 2D], the last of each
    keys: jax.Array | None  # [B, S, D], U_a h: the same at every step, so made once; None: there is one annotation
    segments: jax.Array | None  # [B, S] int32, 0 is padding


@struct.dataclass
class Decoder:
    """The decoder's parameters that its loop over time needs."""

    W_a: jax.Array | None  # [D, D]; None: it does not attend
    v_a: jax.Array | None  # [D]
    C: jax.Array  # [2D, G, D], from the context to the gates
    U: jax.Array  # [D, G, D], from the past to the gates
    bias: jax.Array  # [G, D], of the past


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


def attending(cell: type[Recurrent], p: Decoder, past: Past, x: jax.Array, source: Source) -> tuple[Past, jax.Array]:
    """One step: the next state and the context `[B, 2D]`; x: [B, G, D], what the token says to the gates.

    The last state asks, before the token is read; what it finds joins the token.
    """
    s = past["h"]
    if source.keys is None:
        context = source.annotations[:, 0]
    else:
        context = attention(**scoring(p, s[:, None], source))[:, 0, 0]
    x = x.astype(s.dtype) + to_gates(context, p.C, context.dtype)
    return cell.cell(past, x, to_gates(s, p.U, context.dtype) + p.bias), context


def write(
    cell: type[Recurrent], p: Decoder, past: Past, x: jax.Array, source: Source, real: jax.Array
) -> tuple[Past, jax.Array, jax.Array]:
    """The last state, the outputs `[B, T, D]` and the contexts `[B, T, 2D]`; x: [B, T, G, D]; real: [B, T].

    Each device writes its own rows with all of the decoder: sharing it out would send something at every token.
    """

    def rows(p, past, x, source, real):
        def step(past, token):
            x, real = token
            new, context = attending(cell, p, past, x, source)
            past = {name: jnp.where(real[:, None], new[name], old) for name, old in past.items()}
            return past, (past["h"], context)

        # The backward pass scores anew: kept, the scores' hidden layer would take T S D numbers.
        step = jax.checkpoint(step, prevent_cse=False)
        last, kept = jax.lax.scan(step, past, (jnp.swapaxes(x, 0, 1), real.T))
        return last, *(jnp.swapaxes(y, 0, 1) for y in kept)

    by_row = placement.spec(("batch",), x.shape[:1])
    run = placement.on_each_device(rows, (PartitionSpec(), by_row, by_row, by_row, by_row), by_row)
    return run(p, past, x, source, real)


class Seq2Seq(nn.Module):
    """A bidirectional recurrent network reads a source, another writes a target and looks back at every step.

    It is called as an `EncoderDecoder` is. Where no source is given, a row of token ids is a source and behind it a
    target. Each token of the target is read and answered by the logits of the next: teacher forcing, where the tokens
    are the answers. In tasks that ask at the end of a row they are not: at the places asked the row holds markers or
    keys, the same for every model, in training and in tests. To generate, the first call with a state brings a source
    and one token to begin with; those after it go on with the target by any number of tokens.
    """

    vocab_size: int
    width: int  # of embeddings and of every state
    target: int = 0  # T, tokens of the target in rows that hold both
    dropout: float = 0.0  # of embeddings
    dtype: Any = jnp.float32
    source: int = 0  # S, tokens of a source that is given by name; 0: rows hold both
    cell: str = "gru"
    attention: bool = True

    n_classes: ClassVar[int] = 0  # it is no classifier
    cls: ClassVar[bool] = False
    sees_ahead: ClassVar[bool] = False
    causal: ClassVar[bool] = True  # no token of the target sees a later one

    @property
    def shortest_prompt(self) -> int:
        """A token to begin with, and where rows hold both one of the source before it."""
        return 1 if self.source else 2

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
        """Logits `[B, T, V]` of the target, or `[B, Q, V]` at the positions `at`; and the state.

        Where targets of that shape are given, their scores take the logits' place. A source in the row is not
        predicted: asked there, the model answers NaN. `right_padded` changes nothing: a recurrence passes padding by,
        wherever it stands.
        """
        pair = Pair(source, source_segments, tokens, segments, at)
        if not state:
            pair = apart(pair, self.source, self.target if state is None else 1)
        source, tokens = pair.source, pair.target
        S = 0 if source is None else source.shape[1]
        embed = Embed(self.vocab_size, self.width, scale=1.0, dtype=self.dtype, name="embed")
        y = embed(tokens if source is None else jnp.concatenate([source, tokens], axis=1))
        y = nn.Dropout(self.dropout, name="embed_dropout")(y, deterministic=not train)
        y = nn.with_logical_constraint(y, ("batch", None, None))  # whole rows: the loops go along them
        if source is None:
            known, past = state["source"], state["past"]
        else:
            known, past = self.encode(y[:, :S], real(source, pair.source_segments))
            y = y[:, S:]

        cell, p = CELLS[self.cell], self.decoder()
        x = dense((cell.gates, self.width), ("embed", None, "inner"), self.dtype, "W", bias=True)(y)
        last, states, contexts = write(cell, p, past, x, known, real(tokens, pair.target_segments) > 0)
        if self.attention and self.is_mutable_collection("maps") and not self.is_initializing():
            before = jnp.concatenate([past["h"][:, None], states[:, :-1]], axis=1)
            self.sow("maps", "weights", attention_weights(**scoring(p, before, known)))
        out = jnp.concatenate([states.astype(self.dtype), y, contexts], axis=-1)
        return self.answer(out, pair.at, targets), None if state is None else dict(source=known, past=last)

    def encode(self, x: jax.Array, segments: jax.Array) -> tuple[Source, Past]:
        """The source as the decoder sees it, and the decoder's first state; x: [B, S, D]."""
        D = self.width
        positions, _ = document_positions(segments, open_reading(len(segments)))
        encoder = CELLS[self.cell](2 * D, causal=False, dtype=self.dtype, hidden=D, name="encoder")
        h, _ = encoder(x, Context(positions, segments))
        # Going backwards, the encoder ends at the first token with all of the source behind it.
        end = h[:, 0, D:]
        if self.attention:
            known = Source(h, dense(D, ("embed", "inner"), self.dtype, "U_a")(h), segments)
        else:
            end = jnp.concatenate([h[:, -1, :D], end], axis=-1)
            known = Source(end[:, None], None, None)
        past = {"h": nn.tanh(dense(D, ("embed", "inner"), self.dtype, "W_s")(end))}
        if "c" in CELLS[self.cell].kept:
            past["c"] = dense(D, ("embed", "inner"), self.dtype, "W_c")(end)
        return known, {name: value.astype(wide(self.dtype)) for name, value in past.items()}

    def decoder(self) -> Decoder:
        cell, D, f = CELLS[self.cell], self.width, wide(self.dtype)
        fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))

        def param(name, init, shape, axes):
            return self.param(name, nn.with_logical_partitioning(init, axes), shape, f)

        def opened(key, shape, dtype):
            zeros = jnp.zeros(shape, dtype)
            return zeros if cell.open_gate is None else zeros.at[cell.open_gate].set(1)

        attends = self.attention
        return Decoder(
            W_a=param("W_a", nn.initializers.normal(D**-0.5), (D, D), (None, "inner")) if attends else None,
            v_a=param("v_a", nn.initializers.normal(D**-0.5), (D,), ("inner",)) if attends else None,
            C=param("C", fan_in, (2 * D, cell.gates, D), ("embed", None, "inner")),
            U=param("U", orthogonal_gates, (D, cell.gates, D), (None, None, "inner")),
            bias=param("bias", opened, (cell.gates, D), (None, "inner")),
        )

    def answer(self, x: jax.Array, at: jax.Array | None, targets: Targets | None) -> Answers:
        """From states, tokens and contexts, by a maxout layer as in the paper."""
        if at is not None:  # before the unembedding, which costs V per position
            x = at_places(x, jnp.maximum(at, 0))
        x = dense((self.width, 2), ("embed", "mlp", None), self.dtype, "readout")(x).max(-1)
        unembed = Unembed(self.vocab_size, self.width, self.dtype, name="unembed")
        return only_asked(over_vocabulary(x, unembed, None, Readout(), targets), at, targets)

    def limit(self) -> None:
        """None: its target goes on for ever."""
        return None

    def source_limit(self) -> None:
        """None: it reads whatever comes."""
        return None

    def init_state(self, batch: int, max_len: int) -> State:
        """Nothing read: a state takes its size from the source, which the first call brings."""
        return {}

    def state_bytes(self, length: int) -> int:
        """Bytes that the decoder keeps of one row of `length` tokens: the source's, whatever has been written."""
        D, item, S = self.width, jnp.dtype(self.dtype).itemsize, self.source or length - self.target
        known = S * (3 * D * item + 4) if self.attention else 2 * D * item
        return known + len(CELLS[self.cell].kept) * D * jnp.dtype(wide(self.dtype)).itemsize


def real(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
    """1 on tokens and 0 on padding, of the shape of the tokens."""
    return jnp.ones(tokens.shape, jnp.int32) if segments is None else (segments > 0).astype(jnp.int32)
