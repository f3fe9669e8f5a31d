"""The model of one sequence: input -> backbone -> head."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax

from model.backbone import Backbone
from model.contract import State
from model.heads import Answers, Head, HeadContext
from model.inputs import Input
from model.ops.cross_entropy import Targets


class SequenceModel(nn.Module):
    """A language model or a classifier, as its head has it, over token ids `[B, L]` or what else its input takes."""

    input: Callable[..., Input]
    backbone: Callable[..., Backbone]
    head: Callable[..., Head]

    shortest_prompt: ClassVar[int] = 1  # tokens from which it can go on
    source: ClassVar[int] = 0  # it reads one sequence

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        segments: jax.Array | None = None,
        state: State = None,
        at: jax.Array | None = None,
        memory: jax.Array | None = None,
        memory_segments: jax.Array | None = None,
        train: bool = False,
        right_padded: bool = False,
        targets: Targets | None = None,
        **beside: jax.Array,
    ) -> tuple[Answers, State]:
        """Logits `[B, L, V]`, or `[B, Q, V]` at the positions `at`, or `[B, C]`; and the state after these tokens.

        Where targets of that shape are given, their scores take the logits' place, which then need never be all there.
        `right_padded`: all segments hold one document a row, and padding behind it, which costs less than padding
        anywhere. `beside` is what the input takes besides the task's rows.
        """
        source, backbone, head = self.input(name="input"), self.backbone(name="backbone"), self.head(name="head")
        for part in (source, backbone, head):  # of one of each, parameters need no names before their own
            nn.share_scope(self, part)
        row = source(inputs, segments, **beside)
        behind = right_padded and not source.pads_between
        x, state = backbone(row.x, row.segments, state, memory, memory_segments, train, behind)
        if row.front and not head.of_row:  # tokens are counted as the task does
            x, row = x[:, row.front :], row._replace(segments=segments)
        answer = partial(head, x, HeadContext(row.segments, at, source.unembedding))
        return answer() if targets is None else answer(targets), state

    def bare(self) -> Backbone:
        """The backbone, unbound: good for questions that need no parameters."""
        return self.backbone(parent=None)

    @property
    def vocab_size(self) -> int:
        """Token ids that it embeds."""
        return self.input(parent=None).vocab_size

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
        """Bytes that the layers keep of one row's past of `length` tokens, and what stands in front of them."""
        return self.bare().state_bytes(self.row_length(length))

    def row_length(self, length: int) -> int:
        """Vectors that a task's row of `length` becomes, less one in front for a class."""
        return self.input(parent=None).row_length(length)
