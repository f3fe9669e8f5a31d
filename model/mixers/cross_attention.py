"""Attention to another sequence."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State
from model.errors import UserError
from model.mixers.attention import Biases, check_heads, into_heads, look, out_of_heads, queries_keys_values
from model.ops.attention import IMPLEMENTATIONS
from model.ops.mask import FULL
from model.settings import Dim, Positive


class CrossAttention(Mixer):
    """Multi-head attention from every token to a memory, another sequence with its own padding.

    It takes no position encoding: the two sequences share no origin. Rows that pack documents see the memory of their
    own document. A state holds the memory's keys and values from the call that brings it, which those after it read.
    """

    n_heads: Dim = 4
    n_kv_heads: Literal[0] | Dim = 0  # 0: as many as n_heads
    head_dim: Literal[0] | Dim = 0  # 0: width / n_heads
    bias: Biases = "none"  # projections that have one
    scale: Positive | None = None  # factor on the scores; None: 1 / sqrt(head_dim)
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    label: ClassVar[str] = "cross_attention"
    reads_memory: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        H, G, K = self.n_heads, self.n_kv_heads or self.n_heads, self.head_dim or self.width // self.n_heads
        check_heads(self.label, H, G, self.width, self.head_dim)
        if ctx.memory is not None:
            (q, k, v), theirs = queries_keys_values(self, (H, G, K), x, ctx.memory), ctx.memory_segments
        elif state:
            q, k, v, theirs = into_heads(self, "q", (H, K))(x), state["k"], state["v"], state["segments"]
        else:
            raise UserError(f"mixer {self.label!r} reads a memory, and this model is given none; pass memory=")
        call = {}
        if theirs is not None:
            whose = ctx.segments
            if whose is None:
                whose = jnp.ones(x.shape[:2], jnp.int32)
            mine = theirs if ctx.segments is not None else (theirs > 0).astype(jnp.int32)
            call = dict(q_segments=whose, k_segments=mine, right_padded=ctx.right_padded)
        y = look(self, q, k, v, mask=FULL, scale=self.scale, **call)
        if state is not None:
            state = dict(k=k, v=v, segments=jnp.ones(k.shape[:2], jnp.int32) if theirs is None else theirs)
        return out_of_heads(self, y), state

    def init_state(self, batch: int, max_len: int) -> State:
        """No memory yet: a state takes its size from that, which the first call brings."""
        return {}

    def state_bytes(self, length: int) -> int:
        """Bytes that it keeps of a memory of `length` tokens, its segments among them."""
        G, K = self.n_kv_heads or self.n_heads, self.head_dim or self.width // self.n_heads
        return length * (2 * G * K * jnp.dtype(self.dtype).itemsize + 4)
