"""Attention to compressed keys, and the blocks of whole ones that it points to: two branches of native sparse attention
(https://arxiv.org/abs/2502.11089).

A compressed key stands for `length` tokens of a document, at every `stride`-th of them; blocks to choose from are of
`block` tokens. Shapes and the order of tokens are those of `model/ops/choice.py`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model.contract import wide
from model.ops.attention import attention
from model.ops.choice import Order, choice_fused, choosing, highest, tiles, untiled, whole_blocks, with_own
from model.ops.dense_attention import softmax
from model.ops.scores import Bias

Array = jax.Array
KINDS = 4  # of scores that a tile holds at once, with gradient


@dataclasses.dataclass(frozen=True)
class Sizes:
    length: int  # tokens that a compressed key stands for
    stride: int  # tokens from one to the next
    block: int  # tokens of a block to choose
    top: int  # blocks that a query chooses, its own and those that it always has among them


@struct.dataclass
class Compressed:
    """Keys and values that stand for several, with where they begin and whose they are."""

    k: Array  # [B, N, G, K]
    v: Array  # [B, N, G, V]
    start: Array  # [B, N]
    document: Array  # [B, N], 0: there is none
    positions: Array  # [B, N], of the last token


def windows(x: Array, order: Order, start: Array, sizes: Sizes) -> Array:
    """The tokens of each compressed key, `[B, N, length, G, K]`, of x `[B, M, G, K]` in order."""
    (B, M, *rest), N, l, d = x.shape, start.shape[1], sizes.length, sizes.stride
    if order.there is None:  # they begin at every d-th token: slices, which need no scatter for their gradient
        units = jnp.pad(x, [(0, 0), (0, max(0, (N - 1) * d + l - M)), (0, 0), (0, 0)])[:, : (N - 1) * d + l]
        units = units.reshape(B, -1, d, *rest)
        return jnp.concatenate([units[:, i : i + N] for i in range(l // d)], axis=2)
    at = jnp.minimum(start[..., None] + jnp.arange(l, dtype=jnp.int32), M - 1).reshape(B, N * l)
    return jnp.take_along_axis(x.reshape(B, M, -1), at[..., None], axis=1).reshape(B, N, l, *rest)


def importance(weights: Array, first: Array, sizes: Sizes) -> Array:
    """What blocks get of the weights on compressed keys, `[..., n]`; weights: [B, ..., N].

    A key counts once for every stretch of `stride` tokens that it shares with the block (the paper's equation 9).
    first: [B, n], the compressed keys that begin where the blocks do.
    """
    before, ahead = sizes.length // sizes.stride, sizes.block // sizes.stride
    N = weights.shape[-1]
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(before - 1, ahead)])
    of_stretch = sum(padded[..., before - 1 - n : before - 1 - n + N + ahead] for n in range(before))
    of_block = sum(of_stretch[..., m : m + N] for m in range(ahead))
    at = jnp.minimum(first, N - 1).reshape(first.shape[0], *[1] * (weights.ndim - 2), -1)
    return jnp.take_along_axis(of_block, jnp.broadcast_to(at, (*weights.shape[:-1], at.shape[-1])), axis=-1)


def weights_of(q: Array, c: Compressed, seen: Array, bias: Bias | None, q_positions: Array) -> Array:
    """Weights on compressed keys, `[B, G, R, t, N]`; seen: [B, t, N]."""
    scores = jnp.einsum("btgrk,bngk->bgrtn", q, c.k, preferred_element_type=wide(q.dtype)) * q.shape[-1] ** -0.5
    if bias is not None:
        added = bias.fn(bias.params, q_positions, c.positions)
        scores = scores + added.reshape(added.shape[0], *scores.shape[1:3], *added.shape[2:])
    return softmax(scores, seen[:, None, None], None)[0]


def visible(c: Compressed, order: Order, sizes: Sizes) -> Array:
    """Whether all tokens of a compressed key are at or before the query, in its document, `[B, L, N]`."""
    same = c.document[:, None] == order.of_queries(order.document)[..., None]
    return same & (c.start[:, None] + sizes.length - 1 <= order.index[..., None])


def attend_and_choose(
    q: Array,
    c: Compressed,
    order: Order,
    sizes: Sizes,
    bias: Bias | None,
    q_positions: Array,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Attention to compressed keys, `[B, L, G, R, V]`, and the blocks that a group of heads chose by it.

    Those are the query's own, that before it and the first of the document, and others up to `top` by importance: the
    first token of each, `[B, L, G, top]`, -1 where there are fewer. Nothing is learned by the choice. implementation:
    as of `model.ops.chosen.attend`.
    """
    start, document = whole_blocks(order, sizes.block, sizes.block)
    first = jax.vmap(partial(jnp.searchsorted, side="left"))(c.start, start)
    place, mine = order.of_queries(order.position), order.of_queries(order.document)

    def choose(shares: Array, index: Array, place: Array, mine: Array) -> Array:
        """By the weights of a group's heads together, `[B, G, t, N]`."""
        scores = importance(lax.stop_gradient(shares), first, sizes)
        own = (index - place % sizes.block)[..., None]
        always = (start[:, None] == (index - place)[..., None]) | (start[:, None] == own - sizes.block)
        allowed = (document[:, None] == mine[..., None]) & (start[:, None] < own)
        scores = jnp.where(always[:, None], jnp.inf, scores)
        return with_own(own[..., 0], highest(scores, allowed[:, None], start, sizes.top - 1))

    if bias is None and choice_fused(q, sizes.top - 1, implementation):
        return by_kernels(q, c, order, sizes, start, document)

    @partial(jax.checkpoint, prevent_cse=False)
    def tile(c, bias, q, index, place, mine, q_positions):
        seen = (c.document[:, None] == mine[..., None]) & (c.start[:, None] + sizes.length - 1 <= index[..., None])
        weights = weights_of(q, c, seen, bias, q_positions)
        y = jnp.einsum("bgrtn,bngv->btgrv", weights.astype(c.v.dtype), c.v, preferred_element_type=weights.dtype)
        return y.astype(c.v.dtype), choose(jnp.sum(weights, axis=2), index, place, mine)

    parts = q, order.index, place, mine, jnp.broadcast_to(q_positions, order.index.shape)
    L, size = q.shape[1], choosing(q, KINDS * c.k.shape[1])
    parts = tuple(tiles(x, size) for x in parts)
    _, (y, chosen) = lax.scan(lambda _, part: (None, tile(c, bias, *part)), None, parts)
    return untiled(y, L), untiled(chosen, L)


def by_kernels(q: Array, c: Compressed, order: Order, sizes: Sizes, start: Array, document: Array):
    """The same where there are kernels; start, document: of the blocks to choose from.

    Compressed keys stand where their last tokens do, among tokens in order.
    """
    from model.ops import fused_choice as by  # here: Pallas takes a second to load, and only GPUs need it

    B, L, G, R, K = q.shape
    place, mine = order.of_queries(order.position), order.of_queries(order.document)
    call = dict(q_positions=order.index, k_positions=c.start + sizes.length - 1)
    if order.there is not None:  # else there is one document, and keys that are none stand behind all queries
        call |= dict(q_segments=mine, k_segments=c.document)
    y, lse = attention(q.reshape(B, L, G * R, K), c.k, c.v, with_lse=True, **call)
    own = order.index - place % sizes.block
    found = by.weightiest(
        *lax.stop_gradient((q, lse.reshape(B, L, G, R), c.k)),
        by.Blocks(c.start, c.document),
        by.Queries(order.index, order.index - place, own, mine),
        by.Blocks(start, document),
        sizes.top - 1,
        by.Compressed(sizes.length, sizes.stride, sizes.block),
    )
    return y.reshape(*q.shape[:4], -1), with_own(own, jnp.moveaxis(found, 2, 1))


def spread(weights: Array, c: Compressed, order: Order, sizes: Sizes) -> Array:
    """Weights on compressed keys given to the tokens they stand for in equal parts, `[..., M]` in the row's order."""
    M = order.document.shape[1]
    m = jnp.arange(M) if order.back is None else order.back[..., None, :]
    there = (c.document[..., None] > 0) & (c.start[..., None] <= m) & (m < c.start[..., None] + sizes.length)
    return jnp.einsum("bgrln,bnm->bgrlm", weights, there / sizes.length)
