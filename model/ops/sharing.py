"""Attention on a mesh: every device computes its own rows, heads and queries.

Where devices share the length, three ways lead queries to their keys. If there are heads enough, tokens are exchanged
for heads (all-to-all, https://arxiv.org/abs/2309.14509): a device then has the whole length of a few heads, which any
implementation serves and which leaves equal work to all. Else a device keeps its own stretch of the queries, and keys
and values go round in a ring, or are all gathered where another implementation is asked for or lengths do not divide.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec

from model import placement
from model.ops.scores import Form, Operands


@dataclasses.dataclass(frozen=True)
class Shared:
    """A call as it is shared out."""

    form: Form
    o: Operands  # the whole arrays, with as many groups of heads as can be shared out
    lying: Operands  # the logical axes by which they lie on the mesh
    seen: Operands  # what an implementation sees of them on one device, in shapes
    exchanged: bool  # tokens for heads
    length: tuple[str, ...]  # the mesh axes that share the length of the keys
    asked: tuple[str, ...]  # the implementations asked for, of which one serves; (): any

    @property
    def gathered(self) -> bool:
        """Whether every device gets all keys and values."""
        return bool(self.length) and not self.exchanged and not self.form.ring


def share(form: Form, o: Operands, bias: Any, implementation: str | tuple[str, ...] | None = None) -> Shared:
    """How the mesh in force shares out a call, and what it leaves to one device; bias: the axes of its parameters."""
    (B, L, G, R, K), M = o.q.shape, o.k.shape[1]
    H, stretches, parts = G * R, placement.shards("length", L), placement.shards("length", M)
    exchanged = stretches == parts > 1 and H % placement.shards(("heads", "length")) == 0 and implementation != "ring"
    ring = stretches == parts > 1 and not exchanged and implementation in (None, "ring")
    heads, stretch = (("heads", "length"), None) if exchanged else ("heads", "length")
    passing = "length" if ring else None
    # Heads that read one key-value head are parted until every device has some.
    groups, sources = (math.lcm(G, placement.shards(axis, H)) for axis in (heads, "heads"))
    o = o.replace(
        q=o.q.reshape(B, L, groups, -1, K),
        k=repeated(o.k, sources),
        v=repeated(o.v, sources),
        sinks=None if o.sinks is None else o.sinks.reshape(groups, -1),
        additive=None if o.additive is None else o.additive.reshape(groups, -1, K),
        q_levels=None if o.q_levels is None else o.q_levels.reshape(B, L, groups, -1),
        k_levels=None if o.k_levels is None else o.k_levels.reshape(B, M, groups, -1),
    )
    axes = Operands(
        q=("batch", stretch, heads, None, None),
        k=("batch", passing, heads, None),
        v=("batch", passing, heads, None),
        q_positions=("batch", stretch),
        k_positions=("batch", passing),
        q_segments=None if o.q_segments is None else ("batch", stretch),
        k_segments=None if o.k_segments is None else ("batch", passing),
        bias=jax.tree.map(lambda _, names: tuple(heads if name == "heads" else name for name in names), o.bias, bias),
        sinks=None if o.sinks is None else (heads, None),
        additive=None if o.additive is None else (heads, None, None),
        q_levels=None if o.q_levels is None else ("batch", stretch, heads, None),
        k_levels=None if o.k_levels is None else ("batch", passing, heads, None),
        k_filled=None if o.k_filled is None else (),
    )

    def part(leaf, names):
        return jax.ShapeDtypeStruct(placement.held(names, leaf.shape), leaf.dtype)

    k, v = (jax.ShapeDtypeStruct((*x.shape[:2], groups, x.shape[3]), x.dtype) for x in (o.k, o.v))
    tokens, names = ("batch", "length", "heads", None), placement.axes("length")
    if not exchanged and stretches > 1:  # a query's place among those of a device is not that among the keys
        form = dataclasses.replace(form, stretches=form.stretches and stretches, gapless=False)
    return Shared(
        form=dataclasses.replace(form, ring=names) if ring else form,
        o=o,
        lying=axes.replace(
            q=(*tokens, None),
            k=tokens,
            v=tokens,
            q_levels=None if o.q_levels is None else tokens,
            k_levels=None if o.k_levels is None else tokens,
        ),
        seen=jax.tree.map(part, o.replace(k=k, v=v), axes),
        exchanged=exchanged,
        length=names if parts > 1 else (),
        asked=(implementation,) if isinstance(implementation, str) else implementation or (),
    )


def repeated(x: jax.Array, heads: int) -> jax.Array:
    """Key-value heads `[B, M, G, K]`, each as often as makes so many."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def on_each_device(run: Callable, call: Shared, outputs: int) -> tuple[jax.Array, ...]:
    """The first outputs, `[B, L, G, R, V]` and `[B, L, G, R]`, of `run` on what each device sees of a call."""

    def mine(o: Operands) -> tuple[jax.Array, ...]:
        if call.exchanged:
            to_heads = partial(lax.all_to_all, axis_name=call.length, split_axis=2, concat_axis=1, tiled=True)
            to_tokens = partial(lax.all_to_all, axis_name=call.length, split_axis=1, concat_axis=2, tiled=True)
            k, v = (to_heads(repeated(x, o.q.shape[2])) for x in (o.k, o.v))
            q, q_levels, k_levels = jax.tree.map(to_heads, (o.q, o.q_levels, o.k_levels))
            whole = o.replace(q=q, k=k, v=v, q_levels=q_levels, k_levels=k_levels)
            return tuple(map(to_tokens, run(call.form, whole)[:outputs]))
        if call.gathered:  # once, before any loop over tiles; the gradient is scattered back as it is summed
            gather = partial(lax.all_gather, axis_name=call.length, axis=1, tiled=True)
            k, v, k_levels = jax.tree.map(gather, (o.k, o.v, o.k_levels))
            o = o.replace(k=k, v=v, k_levels=k_levels)
        return run(call.form, o)[:outputs]

    if call.gathered and call.seen.q.shape[1] < call.o.q.shape[1]:
        tell(call)
    specs = jax.tree.map(lambda leaf, names: placement.spec(names, leaf.shape), call.o, call.lying)
    by_query = (specs.q, PartitionSpec(*specs.q[:4]))[:outputs]
    return placement.on_each_device(mine, (specs,), by_query)(call.o)


def tell(call: Shared) -> None:
    """Says what is gathered, of a row: the same of the one that a model is initialised with and of a batch."""
    size = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in (call.seen.k, call.seen.v))
    heads, devices = math.prod(call.o.q.shape[2:4]), placement.shards(("heads", "length"))
    several = "serves its pattern"
    alone = "is asked for, where they would go round in a ring if none were"
    say(
        f"attention gathers all keys and values along the length, {size / 2**20:.3g} MiB a row and layer on every "
        f"device: {' or '.join(call.asked)} {alone if len(call.asked) == 1 else several}, and its {heads} heads do not "
        f"divide over {devices} devices, to be exchanged for tokens"
    )


@cache
def say(line: str) -> None:
    """Once, however many layers and programs there are."""
    logging.warning(line)
