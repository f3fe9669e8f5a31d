"""Ring attention (https://arxiv.org/abs/2310.01889): exact attention over a length that devices share.

Every device keeps its stretch of the queries, and the stretches of keys and values go round: what a device has seen of
them it adds up by the online softmax. Backward they go round again with their gradients, which so come home. A device
never holds more than two stretches, and sends one while it works on the other.

Where the mask is causal, late queries see more than early ones. Then every device takes a chunk from the front and the
one as far from the end (zigzag), and all have as much to do in every round. Where a window is all that a query sees,
only the stretches that it reaches come by.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.contract import wide
from model.ops import tiled_attention as tiles
from model.ops.dense_attention import LOW
from model.ops.mask import CAUSAL
from model.ops.scores import Form, Operands

Names = tuple[str, ...]  # the mesh axes that share the length
Tree = Any


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Which stretches come by, counted from a device's own: `ahead`, ahead - 1, ...; `count` of them."""

    names: Names
    ahead: int
    count: int


def ring(form: Form, o: Operands) -> tuple[jax.Array, jax.Array]:
    """Output `[B, L, G, R, V]` and log-sum-exp `[B, L, G, R]` of a device's queries, inside a shard_map."""
    names, l, m = form.ring, o.q.shape[1], o.k.shape[1]
    rounds = plan(form, m, lax.axis_size(names))
    form = dataclasses.replace(form, stretches=0, ring=())
    if form.mask != CAUSAL or l % 2 or m % 2:
        return shared(form, rounds, o)
    out, lse = shared(form, rounds, by_token(partial(dealt, names=names), o))
    return taken_back(out, names), taken_back(lse, names)


def plan(form: Form, stretch: int, n: int) -> Rounds:
    """All n stretches, or fewer where a window at positions 0, 1, 2, ... reaches no more."""
    back, ahead = form.mask.band() or (None, None)
    if form.stretches and back is not None and ahead is not None:
        back, ahead = -(-back // stretch), -(-ahead // stretch)
        if back + ahead + 1 < n:
            return Rounds(form.ring, ahead, back + ahead + 1)
    return Rounds(form.ring, 0, n)


def by_token(move: Any, o: Operands) -> Operands:
    """The operands that belong to tokens, moved."""
    names = [f"{whose}_{what}" for whose in "qk" for what in ("positions", "segments", "levels")]
    return o.replace(**{name: jax.tree.map(move, getattr(o, name)) for name in ("q", "k", "v", *names)})


def dealt(x: jax.Array, names: Names) -> jax.Array:
    """Of 2 n chunks `[B, l / 2, ...]` that lie in order, two on each of n devices: chunk d and chunk 2 n - 1 - d."""
    n, odd = lax.axis_size(names), lax.axis_index(names) % 2
    parts = jnp.split(x, 2, axis=1)
    # The even chunks go one to each device, and so do the odd ones: early ones where they are even themselves.
    even, uneven = (lax.ppermute(part, names, way(n, i)) for i, part in enumerate(parts))
    return jnp.concatenate([jnp.where(odd, uneven, even), jnp.where(odd, even, uneven)], axis=1)


def taken_back(x: jax.Array, names: Names) -> jax.Array:
    """Chunks that were dealt, in order again."""
    n, odd = lax.axis_size(names), lax.axis_index(names) % 2
    early, late = jnp.split(x, 2, axis=1)
    parts = jnp.where(odd, late, early), jnp.where(odd, early, late)
    home = [lax.ppermute(part, names, [(d, s) for s, d in way(n, i)]) for i, part in enumerate(parts)]
    return jnp.concatenate(home, axis=1)


def way(n: int, half: int) -> list[tuple[int, int]]:
    """From where to where chunks go that are the first (0) or the second (1) of a device."""
    return [(d, min(2 * d + half, 2 * n - 1 - 2 * d - half)) for d in range(n)]


def shared(form: Form, rounds: Rounds, o: Operands) -> tuple[jax.Array, jax.Array]:
    """The sum over all rounds, whatever the order of the tokens."""
    l, m = o.q.shape[1], o.k.shape[1]
    rows, columns = (min(size, n) for size, n in zip(tiles.tile_shape(o), (l, m), strict=True))
    padded = tiles.pad(o, -l % rows, -m % columns)
    out, lse = _ring(form, rounds, (rows, columns), padded)
    return out[:, :l].astype(o.v.dtype), lse[:, :l]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ring(form: Form, rounds: Rounds, tile: tuple[int, int], o: Operands) -> tuple[jax.Array, jax.Array]:
    return forward(form, rounds, tile, o)[0]


def forward(form: Form, rounds: Rounds, tile: tuple[int, int], o: Operands):
    pairs, rest = all_pairs(form, tile, o), o.replace(sinks=None)

    def go(carry, _):
        passing, out, lse = carry
        after = turned(passing, rounds.names, 1)  # needs nothing of what follows, so that it may go on meanwhile
        (seen, seen_lse), _ = tiles.forward(form, tile, pairs, rest.replace(**passing))
        higher = jnp.maximum(lse, seen_lse)
        old, new = jnp.exp(lse - higher), jnp.exp(seen_lse - higher)
        out = (out * old[..., None] + seen * new[..., None]) / (old + new)[..., None]
        return (after, out, higher + jnp.log(old + new)), None

    dtype = wide(o.q.dtype)
    out = jnp.zeros((*o.q.shape[:4], o.v.shape[-1]), dtype)
    start = turned(keys(o), rounds.names, -rounds.ahead), out, jnp.full(o.q.shape[:4], LOW, dtype)
    (_, out, lse), _ = lax.scan(go, start, length=rounds.count)
    if o.sinks is not None:
        with_sinks = jnp.logaddexp(lse, o.sinks.astype(dtype))
        out, lse = out * jnp.exp(lse - with_sinks)[..., None], with_sinks
    return (out, lse), (o, out, lse)


def backward(form: Form, rounds: Rounds, tile: tuple[int, int], kept, grads):
    o, out, lse = kept
    pairs, rest = all_pairs(form, tile, o), o.replace(sinks=None)
    dtype = wide(o.q.dtype)

    def go(carry, _):
        passing, d_keys, d_own = carry
        after = turned(passing, rounds.names, 1)
        grad = tiles.gradients(form, tile, pairs, (rest.replace(**passing), out, lse), grads)
        d_keys = turned(jax.tree.map(jnp.add, d_keys, (grad.k, grad.v, grad.k_levels)), rounds.names, 1)
        return (after, d_keys, jax.tree.map(jnp.add, d_own, (grad.q, grad.q_levels, grad.bias, grad.additive))), None

    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, dtype))
    d_own = zeros((o.q, o.q_levels, o.bias, o.additive))
    start = turned(keys(o), rounds.names, -rounds.ahead), zeros((o.k, o.v, o.k_levels)), d_own
    (_, d_keys, (d_q, q_levels, d_bias, d_additive)), _ = lax.scan(go, start, length=rounds.count)
    d_k, d_v, k_levels = turned(d_keys, rounds.names, rounds.ahead - rounds.count)
    learned, d_sinks = tiles.learned(o), tiles.pull_of_sinks(o, out, lse, grads)
    wide_ones = learned.replace(q=d_q, k=d_k, v=d_v, bias=d_bias, additive=d_additive, sinks=d_sinks)
    wide_ones = wide_ones.replace(q_levels=q_levels, k_levels=k_levels)
    return (jax.tree.map(lambda grad, x: grad.astype(x.dtype), wide_ones, learned),)


_ring.defvjp(forward, backward)


def all_pairs(form: Form, tile: tuple[int, int], o: Operands) -> tiles.Pairs:
    """Of a stretch of queries and one of keys: which of them see each other is found out when they meet."""
    counts = (o.q.shape[1] // tile[0], o.k.shape[1] // tile[1])
    return tiles.Pairs(tiles.candidates(form, *counts, *tile), sparse=True)


def keys(o: Operands) -> dict[str, Tree]:
    """What goes round."""
    return dict(k=o.k, v=o.v, k_positions=o.k_positions, k_segments=o.k_segments, k_levels=o.k_levels)


def turned(tree: Tree, names: Names, by: int) -> Tree:
    """What the device `by` places before has, on each."""
    n = lax.axis_size(names)
    if by % n == 0:
        return tree
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, names, [(i, (i + by) % n) for i in range(n)]), tree)
