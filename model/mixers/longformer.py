"""Longformer: a window, and first tokens that see all and that all see."""

import jax
import jax.numpy as jnp

from model.cache import Cache, Full, Ring
from model.mixers.attention import Entries, into_heads
from model.mixers.sparse import Arrays, Call, Sparse, Turn
from model.ops.attention import attention
from model.ops.mask import CAUSAL, FULL, Mask, Prefix, window
from model.ops.patterns import FirstQueries
from model.settings import Length, Whole


class Longformer(Sparse):
    """Sliding windows and global tokens (https://arxiv.org/abs/2004.05150), which have projections of their own.

    Global tokens are the first of a document. They look at all others, or causally at those before them, by queries,
    keys and values of a second set of projections; others see them by the first. Of packed documents it is found out
    at run time which tiles are seen.
    """

    near: Length = 64  # a token sees those less than this far away
    global_tokens: Whole = 8  # of each document, the first

    @property
    def seen(self) -> Mask:
        return CAUSAL if self.causal else FULL

    @property
    def masks(self) -> tuple[Mask, ...]:
        seen = window(self.near)
        return ((seen | Prefix(self.global_tokens) if self.global_tokens else seen) & self.seen,)

    def projected(self, x: jax.Array, turn: Turn, alone: bool) -> tuple[Arrays, Arrays]:
        queries, kept = super().projected(x, turn, alone)
        if self.global_tokens:
            H, G, K = self.heads
            # How many tokens of a row may be global, and how many these may see.
            n = min(self.global_tokens, x.shape[1]) if alone else x.shape[1]
            m = n if self.causal else x.shape[1]
            queries["global_q"] = turn.first(n).queries(into_heads(self, "global_q", (H, K))(x[:, :n]))
            kept["global_k"] = turn.first(m).keys(into_heads(self, "global_k", (G, K))(x[:, :m]))
            kept["global_v"] = into_heads(self, "global_v", (G, K))(x[:, :m])
        return queries, kept

    def attend(self, queries: Arrays, kept: Arrays, call: Call, skips: bool) -> tuple[jax.Array, jax.Array | None]:
        y, weights = super().attend(queries, kept, call, skips)
        if not self.global_tokens:
            return y, weights
        q, k, v = queries["global_q"], kept["global_k"], kept["global_v"]
        if skips and call["q_positions"] is None:
            ends = dict(q_segments=q.shape[1], k_segments=k.shape[1])
            cut = call | {name: None if call[name] is None else call[name][:, :end] for name, end in ends.items()}
            whole = attention(q, k, v, **cut, mask=self.seen, implementation=self.implementation)
            return jnp.concatenate([whole, y[:, q.shape[1] :]], axis=1), None
        whole, of_whole = self.in_turns((FirstQueries(self.global_tokens) & self.seen,), q, k, v, call, skips)
        at = jnp.arange(q.shape[1])[None] if call["q_positions"] is None else call["q_positions"]
        first = at < self.global_tokens
        y = jnp.where(first[..., None, None], whole, y)
        return y, None if weights is None else jnp.where(first[:, None, :, None], of_whole, weights)

    @property
    def entries(self) -> Entries:
        more = ("global_k", "global_v") if self.global_tokens else ()
        return *super().entries, *((name, self.heads[1:]) for name in more)

    @property
    def cache(self) -> Cache:
        if not self.causal:
            return Full(self.entries, self.dtype)
        return Ring(self.entries, self.dtype, self.near, self.global_tokens)
