"""Native sparse attention: compressed keys, the blocks they point to, and a window."""

from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State
from model.documents import looking_back
from model.errors import UserError
from model.layers import check_divides, dense
from model.mixers.attention import INTO_HEADS, Entries, MultiHead, begin, into_heads, out_of_heads, remember, whole_row
from model.ops.attention import attention, attention_weights
from model.ops.choice import Order, order_of, whole_blocks
from model.ops.chosen import attend, weights_of_all
from model.ops.compressed import Compressed, Sizes, attend_and_choose, spread, visible, weights_of, windows
from model.ops.mask import CAUSAL, window
from model.positions.position import Position
from model.settings import LONGEST, Length, within

BRANCHES = ("compressed", "chosen", "near")


class NSA(MultiHead):
    """Native sparse attention (NSA, https://arxiv.org/abs/2502.11089): three branches, each with keys of its own.

    One attends to compressed keys, which a small MLP makes of `length` tokens at every `stride`-th; one to the blocks
    of `block` tokens that this points to, chosen by a group of heads that share keys; one to the last tokens. A sigmoid
    of the input gates each, by head. Positions turn a compressed key by where its last token stands, which the paper
    leaves open, as it does the MLP's hidden layer: as wide as a head. Work grows with L (top block + sliding), and with
    L L / stride for the compressed branch; blocks that were not chosen are not read. In generation compressed keys are
    made anew from a cache of all tokens.
    """

    length: Length = 32  # tokens that a compressed key stands for
    stride: Length = 16  # tokens from one compressed key to the next
    block: Length = 64  # tokens of a block to choose
    top: Annotated[int, within(3, LONGEST)] = 8  # blocks a query sees: the first, its own, that before, and chosen ones
    sliding: Length = 128  # the near branch sees those less than this far back
    # Gathered blocks, kernels for NVIDIA GPUs, or all scores; None: kernels where they can serve, else gathered.
    implementation: Literal["gathered", "fused", "reference"] | None = None

    forward_only: ClassVar[bool] = True
    instead: ClassVar[str] = "attention"
    work: ClassVar[float] = 2
    groups: ClassVar[dict[str, str]] = {"k_embed": "no_decay", "v_embed": "no_decay"}

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.length, self.stride, self.block, self.top)

    def check(self, position: Position) -> None:
        super().check(position)
        check_divides("model.nsa.stride", self.stride, "model.nsa.length", self.length)
        check_divides("model.nsa.stride", self.stride, "model.nsa.block", self.block)
        if self.length > self.block:
            raise UserError(
                f"model.nsa.length {self.length} is more than model.nsa.block {self.block}; closest: {self.block}"
            )

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position, at, span = begin(self, x, ctx, state)
        ctx, (H, G, K) = looking_back(ctx), self.heads
        q = position.rotate_queries(into_heads(self, "q", (H, K))(x), at, span)
        keys = {f"k_{name}": into_heads(self, f"k_{name}", (G, K))(x) for name in BRANCHES}
        values = {f"v_{name}": into_heads(self, f"v_{name}", (G, K))(x) for name in BRANCHES}
        for name in BRANCHES[1:]:  # compressed ones are turned when they are made
            keys[f"k_{name}"] = position.rotate_keys(keys[f"k_{name}"], at, span)
        bias = ctx.bias if position.shares else position.bias(H, causal=True)
        near = dict(mask=CAUSAL & window(self.sliding), bias=bias)
        seen, k_at, segments, first = keys | values, at, ctx.segments, 0
        if state is None:
            near |= whole_row(ctx, near)
        else:
            first = state["written"]
            seen, places, state = remember(self.cache, ctx, state, **seen)
            near, k_at, segments = near | places, places["k_positions"], seen["segments"]

        order = order_of(seen["k_near"].shape[:2], segments, first, x.shape[1])
        grouped, where = q.reshape(*q.shape[:2], G, -1, K), dict(bias=bias, q_positions=at, k_positions=k_at)
        short = self.compress(seen["k_compressed"], seen["v_compressed"], k_at, order, position, span)
        compressed, chosen = attend_and_choose(grouped, short, order, self.sizes, bias, at, self.implementation)
        call = (grouped, seen["k_chosen"], chosen, order, self.block)
        if self.implementation == "reference":
            weights = weights_of_all(*call, **where).astype(self.dtype)
            picked = jnp.einsum("bgrlm,bmgv->blgrv", weights, seen["v_chosen"])
        else:
            picked = attend(*call[:2], seen["v_chosen"], *call[2:], **where, implementation=self.implementation)
        plain = "reference" if self.implementation == "reference" else None
        last = attention(q, seen["k_near"], seen["v_near"], **near, implementation=plain)
        gate = nn.sigmoid(dense((H, 3), INTO_HEADS, self.dtype, "gate", bias=True)(x))
        if self.looked_into():
            mass = weights_of(grouped, short, visible(short, order, self.sizes), bias, at)
            maps = spread(mass, short, order, self.sizes), weights_of_all(*call, **where)
            maps = [m.reshape(m.shape[0], H, *m.shape[3:]) for m in maps]
            maps += [attention_weights(q, seen["k_near"], seen["v_near"], **near)]
            self.sow("maps", "weights", mixed(maps, gate))
        branches = jnp.stack([compressed.reshape(q.shape), picked.reshape(q.shape), last], axis=-1)
        return out_of_heads(self, jnp.einsum("blhkn,blhn->blhk", branches, gate)), state

    def compress(
        self, k: jax.Array, v: jax.Array, positions: jax.Array, order: Order, position: Position, span: int
    ) -> Compressed:
        """Keys and values that stand for several, of those of all tokens `[B, M, G, K]`."""
        start, document = whole_blocks(order, self.length, self.stride)

        def made(name, x):
            """An MLP of the tokens side by side, each with what is added to its place; heads share it."""
            l, K = self.length, x.shape[-1]
            embed = self.weight(f"{name}_embed", nn.initializers.normal(0.02), (l, K), (None, None))
            x = jnp.moveaxis(windows(order.moved(x), order, start, self.sizes), 2, 3)  # [B, N, G, l, K]
            x = (x + embed).astype(self.dtype)
            hidden = nn.silu(dense(K, (None, None, None), self.dtype, f"{name}_hidden", inputs=2)(x))
            return dense(K, (None, None), self.dtype, f"{name}_made")(hidden)

        if order.there is not None:
            positions = jnp.take_along_axis(positions, jnp.maximum(order.there, 0), axis=1)
        end = jnp.minimum(start + self.length, order.document.shape[1]) - 1
        at = jnp.take_along_axis(jnp.broadcast_to(positions, order.document.shape), end, axis=1)
        return Compressed(position.rotate_keys(made("k", k), at, span), made("v", v), start, document, at)

    @property
    def entries(self) -> Entries:
        return tuple((f"{kind}_{name}", self.heads[1:]) for name in BRANCHES for kind in "kv")


def mixed(maps: list[jax.Array], gate: jax.Array) -> jax.Array:
    """What the branches look at, each by its share of the gates, `[B, H, L, M]`; gate: [B, L, H, 3].

    A branch that has nothing to look at yet has no share.
    """
    summed = sum(jnp.moveaxis(gate, 1, 2)[..., None, i] * weights for i, weights in enumerate(maps))
    return summed / jnp.sum(summed, axis=-1, keepdims=True)
