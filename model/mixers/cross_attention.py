"""Attention to another sequence."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State
from model.errors import UserError
from model.layers import dense
from model.mixers.attention import check_heads, look
from model.ops.attention import IMPLEMENTATIONS
from model.ops.mask import FULL
from model.settings import Dim


class CrossAttention(Mixer):
    """Multi-head attention from every token to a memory, another sequence with its own padding.

    It takes no position encoding: the two sequences share no origin. Rows that pack documents see the memory of their
    own document. The memory comes with every call, so there is no past to keep.
    """

    n_heads: Dim = 4
    n_kv_heads: Literal[0] | Dim = 0  # 0: as many as n_heads
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    reads_memory: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        H, G, K = self.n_heads, self.n_kv_heads or self.n_heads, self.width // self.n_heads
        check_heads("cross_attention", H, G, self.width)
        if ctx.memory is None:
            raise UserError("mixer 'cross_attention' reads a memory, and this model is given none; pass memory=")
        q = dense((H, K), ("embed", "heads", None), self.dtype, "q")(x)
        k = dense((G, K), ("embed", "heads", None), self.dtype, "k")(ctx.memory)
        v = dense((G, K), ("embed", "heads", None), self.dtype, "v")(ctx.memory)
        call = {}
        if ctx.memory_segments is not None:
            whose = ctx.segments
            if whose is None:
                whose = jnp.ones(x.shape[:2], jnp.int32)
            mine = ctx.memory_segments if ctx.segments is not None else (ctx.memory_segments > 0).astype(jnp.int32)
            call = dict(q_segments=whose, k_segments=mine)
        y = look(self, q, k, v, mask=FULL, **call)
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), state

    def init_state(self, batch: int, max_len: int) -> State:
        return {}

    def state_bytes(self, length: int) -> int:
        return 0
