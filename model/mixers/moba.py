"""Mixture of block attention: each query chooses, by their mean keys, the blocks it attends to."""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State
from model.documents import looking_back
from model.mixers.attention import MultiHead, begin, out_of_heads, queries_keys_values, remember
from model.ops.choice import nearest_means, order_of
from model.ops.chosen import attend, weights_of_all
from model.settings import Length, Whole


class MoBA(MultiHead):
    """MoBA (https://arxiv.org/abs/2502.13189): attention to a query's own block and a few earlier ones, by mean keys.

    Blocks are of `block` tokens of a document, counted from its first. A head takes those earlier ones whose mean key,
    as positions have turned it, has the highest product with its query; the paper's k counts the query's own block
    too, `top` does not. The choice itself is not learned. Work grows with L (top + 1) block, and with L L / block for
    the choice; blocks that were not chosen are not read.
    """

    block: Length = 64  # tokens of a block
    top: Whole = 3  # earlier blocks that a query chooses, besides its own
    # Gathered blocks, kernels for NVIDIA GPUs, or all scores; None: kernels where they can serve, else gathered.
    implementation: Literal["gathered", "fused", "reference"] | None = None

    forward_only: ClassVar[bool] = True
    instead: ClassVar[str] = "attention"
    work: ClassVar[float] = 2

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position, at, span = begin(self, x, ctx, state)
        ctx, (H, G, K) = looking_back(ctx), self.heads
        q, k, v = queries_keys_values(self, self.heads, x, x)
        q, k = position.rotate_queries(q, at, span), position.rotate_keys(k, at, span)
        k_at, segments, first = at, ctx.segments, 0
        if state is not None:
            first = state["written"]
            seen, places, state = remember(self.cache, ctx, state, k=k, v=v)
            k, v, k_at, segments = seen["k"], seen["v"], places["k_positions"], seen["segments"]

        order = order_of(k.shape[:2], segments, first, x.shape[1])
        grouped, choice = q.reshape(*q.shape[:2], G, -1, K), (order, self.block, self.top, self.implementation)
        chosen = nearest_means(grouped, order.moved(k), *choice)
        # Every head has chosen by itself, so that each reads its keys alone.
        q, k, v = q[:, :, :, None], jnp.repeat(k, H // G, axis=2), jnp.repeat(v, H // G, axis=2)
        bias = ctx.bias if position.shares else position.bias(H, causal=True)
        call = dict(bias=bias, q_positions=at, k_positions=k_at)
        if self.looked_into() or self.implementation == "reference":
            weights = weights_of_all(q, k, chosen, order, self.block, **call)
        if self.looked_into():
            self.sow("maps", "weights", weights[:, :, 0])
        if self.implementation == "reference":
            y = jnp.einsum("bhrlm,bmhv->blhrv", weights.astype(v.dtype), v)
        else:
            y = attend(q, k, v, chosen, order, self.block, **call, implementation=self.implementation)
        return out_of_heads(self, y[:, :, :, 0]), state
