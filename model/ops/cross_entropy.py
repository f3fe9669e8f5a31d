"""What an answer costs: -log p of its target, and whether it is right.

Over a vocabulary the logits of a batch are by far its largest array. Where they would be too many they are made a chunk
of tokens at a time, from the vectors and the table, and none is made twice: what is minimised is a sum of losses by
weights that are known, so a chunk's part of the gradients is found while its logits are at hand. Each device has its
own tokens and its own part of the vocabulary, and the parts of a sum meet once.

Shape letters besides those of the contract: T tokens of a chunk.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec as P

from model import placement
from model.contract import wide
from model.ops.product import einsum, linear

PART = 64  # answers of which the best is found at once
ROOM = 2**26  # logits that one device makes at a time; with no more of them in all, they are kept for the gradient


@struct.dataclass
class Targets:
    """The right answers, by number, the share of each that is spread over all answers, and how much each counts."""

    ids: jax.Array  # of the shape of what is asked: [B, L], [B, Q] or [B]
    smoothing: float = struct.field(pytree_node=False, default=0.0)  # https://arxiv.org/abs/1512.00567
    weights: jax.Array | None = None  # of that shape too; None: each counts 1

    def summed(self, loss: jax.Array) -> jax.Array:
        """Over all answers by their weights; the loss of one that does not count may be no number."""
        if self.weights is None:
            return loss.sum()
        weights = lax.stop_gradient(self.weights)
        return (jnp.where(weights > 0, loss, 0) * weights).sum()


class Scores(NamedTuple):
    """Of each answer, and of all of them."""

    loss: jax.Array  # -log p of its target, without gradient; of a smoothed one, in part the mean over all answers
    hits: jax.Array  # bool, whether the target is the likeliest
    total: jax.Array  # the losses by their weights, added up: what has a gradient


class Readout(NamedTuple):
    """From products to logits."""

    scale: float = 1.0
    soft_cap: float = 0.0  # keeps logits within this by a tanh; 0: off

    def __call__(self, products: jax.Array, bias: jax.Array | None) -> jax.Array:
        z = products if bias is None else products + bias
        z = z if self.scale == 1 else self.scale * z
        return self.soft_cap * jnp.tanh(z / self.soft_cap) if self.soft_cap else z


def scores(logits: jax.Array, targets: Targets) -> Scores:
    """Of answers whose logits `[..., V]` are there."""
    loss = cross_entropy(logits, targets.ids, targets.smoothing)
    return Scores(lax.stop_gradient(loss), likeliest(logits) == targets.ids, targets.summed(loss))


def likeliest(logits: jax.Array) -> jax.Array:
    """The first of the highest, along the last axis: `argmax`.

    On a CPU in two stages, the first of which is a plain maximum: XLA is eight times as quick at these as at one.
    """
    V = logits.shape[-1]
    part = max(size for size in range(1, PART + 1) if V % size == 0)
    if part == 1 or V < 4 * PART or not placement.one_cpu():
        return jnp.argmax(logits, -1)
    parts = lax.stop_gradient(logits).reshape(*logits.shape[:-1], -1, part)
    best = jnp.argmax(parts.max(-1), -1)
    within = jnp.take_along_axis(parts, best[..., None, None], axis=-2)[..., 0, :]
    return part * best + jnp.argmax(within, -1)


def cross_entropy(logits: jax.Array, targets: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """-log p of each target; of smoothed ones, a share of the mean of -log p over all answers in its place."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if not smoothing:
        return loss
    return (1 - smoothing) * loss - smoothing * jax.nn.log_softmax(logits).mean(-1)


def vocabulary_logits(x: jax.Array, table: jax.Array, bias: jax.Array | None, readout: Readout) -> jax.Array:
    """`[..., V]`, multiplied in x's dtype and added up wide; x: [..., D]; table: [V, D], wide; bias: [V]."""
    return readout(linear(x, table.T, out=wide(x.dtype)), bias)


def vocabulary_scores(
    x: jax.Array, table: jax.Array, bias: jax.Array | None, readout: Readout, targets: Targets, room: int = ROOM
) -> Scores:
    """The scores of those logits, of which a device makes at most `room` at a time."""
    names = ("batch", "length")[: x.ndim - 1]
    here = placement.held((*names, "vocab"), (*x.shape[:-1], len(table)))
    n = math.ceil(math.prod(here) / room)
    if n <= 1:
        return scores(vocabulary_logits(x, table, bias, readout), targets)
    weights = jnp.ones(targets.ids.shape, wide(x.dtype)) if targets.weights is None else targets.weights
    return Scores(*in_chunks(Chunks(n, readout, targets.smoothing), x, table, bias, targets.ids, weights))


class Chunks(NamedTuple):
    """How many there are on a device, and what is made of each."""

    n: int
    readout: Readout
    smoothing: float


class Places(NamedTuple):
    """The mesh axes over which arrays of the loss are shared out."""

    of_ids: P
    tokens: tuple[str, ...]
    vocab: tuple[str, ...]
    embed: tuple[str, ...]  # over which the table's gradient is shared out as it is added up

    @classmethod
    def of(cls, x: jax.Array, table: jax.Array) -> "Places":
        def axes(name: str, size: int) -> tuple[str, ...]:
            return placement.axes(name) if placement.shards(name, size) > 1 else ()

        split = [axes(name, size) for name, size in zip(("batch", "length"), x.shape[:-1], strict=False)]
        tokens = sum(split, ())
        vocab, embed = axes("vocab", table.shape[0]), axes("embed", table.shape[1])
        vocab = () if set(vocab) & set(tokens) else vocab
        return cls(P(*(each or None for each in split)), tokens, vocab, embed if set(embed) <= set(tokens) else ())

    @property
    def of_table(self) -> P:
        return P(self.vocab or None)

    @property
    def of_read(self) -> tuple[P, ...]:
        """Of vectors, table, bias and ids."""
        return self.of_ids, self.of_table, self.of_table, self.of_ids


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_chunks(
    how: Chunks, x: jax.Array, table: jax.Array, bias: jax.Array | None, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses, hits and the sum of losses by their weights; gradients are of this sum alone."""
    at = Places.of(x, table)
    run = placement.on_each_device(partial(read, how, at, len(table)), at.of_read, at.of_ids)
    loss, hits = run(x, table.astype(x.dtype), bias, ids)
    return loss, hits, Targets(ids, weights=weights).summed(loss)


def forward(how, x, table, bias, ids, weights):
    at = Places.of(x, table)
    run = placement.on_each_device(
        partial(learn, how, at, len(table)),
        (*at.of_read, at.of_ids),
        (at.of_ids, at.of_ids, at.of_ids, P(at.vocab or None, at.embed or None), at.of_table),
    )
    loss, hits, *gradients = run(x, table.astype(x.dtype), bias, ids, weights)
    return (loss, hits, Targets(ids, weights=weights).summed(loss)), gradients


def backward(how, gradients, g):
    *_, of_total = g
    return *jax.tree.map(lambda leaf: (of_total * leaf).astype(leaf.dtype), gradients), None, None


in_chunks.defvjp(forward, backward)


def read(how: Chunks, at: Places, V: int, x, table, bias, ids):
    """Loss and hit of a device's tokens; the table is that of its part of the vocabulary."""

    def chunk(_, tokens):
        x, ids = tokens
        z = how.readout(einsum("td,vd->tv", x, table, wide(x.dtype)), bias)
        return None, judged(how, at, V, z, ids)[:2]

    _, found = lax.scan(chunk, None, (cut(x, how.n, 1), cut(ids, how.n)))
    return jax.tree.map(lambda array: joined(array, ids.shape), found)


def learn(how: Chunks, at: Places, V: int, x, table, bias, ids, weights):
    """As `read`, and gradients of the weighed sum of losses; those of table and bias are added up wide."""

    def chunk(sums, tokens):
        x, ids, weights = tokens
        z, pull = jax.vjp(how.readout, einsum("td,vd->tv", x, table, wide(x.dtype)), bias)
        loss, hits, lse = judged(how, at, V, z, ids)
        here = jnp.arange(len(table)) + offset(at, len(table))
        wanted = jnp.where(here == ids[:, None], 1 - how.smoothing, 0) + how.smoothing / V
        d_products, d_bias = pull((weights[:, None] * (jnp.exp(z - lse[:, None]) - wanted)).astype(z.dtype))
        d_products = d_products.astype(x.dtype)
        d_x = lax.psum(einsum("tv,vd->td", d_products, table, wide(x.dtype)), at.vocab).astype(x.dtype)
        d_table = einsum("tv,td->vd", d_products, x, wide(x.dtype))
        return jax.tree.map(jnp.add, sums, (d_table, d_bias)), (loss, hits, d_x)

    zeros = jnp.zeros(table.shape, wide(x.dtype)), jax.tree.map(jnp.zeros_like, bias)
    # What fills the last chunk up has weight 0.
    (d_table, d_bias), found = lax.scan(chunk, zeros, (cut(x, how.n, 1), cut(ids, how.n), cut(weights, how.n)))
    d_table = lax.psum(d_table, tuple(axis for axis in at.tokens if axis not in at.embed))
    if at.embed:
        d_table = lax.psum_scatter(d_table, at.embed, scatter_dimension=1, tiled=True)
    found = (joined(array, shape) for array, shape in zip(found, (ids.shape, ids.shape, x.shape), strict=True))
    return *found, d_table, lax.psum(d_bias, at.tokens)


def judged(how: Chunks, at: Places, V: int, z: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss, hit and log-sum-exp `[T]` of a device's part of the logits `[T, V]`."""
    size = z.shape[-1]
    own = z.max(-1)
    top = lax.pmax(own, at.vocab)
    lse = top + jnp.log(lax.psum(jnp.exp(z - top[:, None]).sum(-1), at.vocab))
    here = ids - offset(at, size)
    found = jnp.take_along_axis(z, jnp.clip(here, 0, size - 1)[:, None], axis=-1)[:, 0]
    of_target = lax.psum(jnp.where((here >= 0) & (here < size), found, 0), at.vocab)
    loss = lse - (1 - how.smoothing) * of_target
    if how.smoothing:
        loss -= how.smoothing * lax.psum(z.sum(-1), at.vocab) / V
    first = lax.pmin(jnp.where(own == top, likeliest(z) + offset(at, size), V), at.vocab)
    return loss, first == ids, lse


def offset(at: Places, size: int) -> jax.Array | int:
    """The number of the first of this device's answers, of which there are `size`."""
    return lax.axis_index(at.vocab) * size if at.vocab else 0


def cut(array: jax.Array, n: int, features: int = 0) -> jax.Array:
    """`[n, T, ...]` of an array of tokens, whose last axes are features; what is over is filled up."""
    flat = array.reshape(-1, *array.shape[array.ndim - features :])
    T = math.ceil(len(flat) / n)
    padding = ((0, n * T - len(flat)), *((0, 0),) * features)
    return jnp.pad(flat, padding).reshape(n, T, *flat.shape[1:])


def joined(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The tokens of chunks `[n, T, ...]` as they were before they were cut."""
    flat = chunks.reshape(-1, *chunks.shape[2:])
    return flat[: math.prod(shape) // math.prod(flat.shape[1:])].reshape(shape)
