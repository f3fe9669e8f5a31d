"""A length that devices share. Each holds a stretch of the tokens, and there are two ways to go on from there.

A recurrence that is associative is run by each device on its own stretch, once devices have told each other what their
stretches come to (`on_stretches`, `of_earlier`). Channels that do not meet are dealt out instead: an all-to-all gives a
device the whole length of some of them (`by_channels`). Either way no device holds the whole array.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec

from model import placement

Array = jax.Array
Tree = Any
Axes = tuple[str | None, ...]  # the logical axes of an array


class Share(NamedTuple):
    """The mesh axes that split a length, and which of the stretches a device has.

    Devices are told by an array that lies on them as the length does: `lax.axis_index` asks for a number that the
    compiler cannot give inside of what it calls several times, where other axes are its own to divide.
    """

    names: tuple[str, ...]
    place: Array


def stretches(length: int) -> int:
    """How many devices share a length, each an equal part; 1: every device has it whole."""
    return placement.shards("length", length)


def on_stretches(run: Callable[..., tuple[Tree, Tree]], tokens: Tree, others: Tree, axis: int = 1) -> tuple[Tree, Tree]:
    """`run(tokens, others, share)` on each device, with its own stretch of the tokens along an axis.

    It returns two trees: what is a token's, split as the tokens are, and what is the same on every device. `share` is
    the device's, None where the length is whole. Batch and channels stay as the compiler has them. What is
    differentiated must come to `run` as an argument, not by closure.
    """
    n = stretches(jax.tree.leaves(tokens)[0].shape[axis])
    if n == 1:
        return run(tokens, others, None)
    names = placement.axes("length")
    split, everywhere = PartitionSpec(*[None] * axis, names), PartitionSpec()
    parts, together = apart(others)
    return jax.shard_map(
        lambda tokens, parts, places: run(tokens, together(parts), Share(names, places[0])),
        in_specs=(split, everywhere, PartitionSpec(names)),
        out_specs=(split, everywhere),
        axis_names=set(names),
        check_vma=False,
    )(tokens, parts, jnp.arange(n, dtype=jnp.int32))


def apart(tree: Tree) -> tuple[list[tuple[Array, ...]], Callable]:
    """The arrays of a tree, complex ones as two real ones, and what makes the tree of them again.

    What all devices have gets its gradient by a sum over them, and a TPU cannot sum complex numbers over devices.
    """
    leaves, structure = jax.tree.flatten(tree)

    def together(parts):
        return structure.unflatten([lax.complex(*x) if len(x) == 2 else x[0] for x in parts])

    return [(x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in leaves], together


def of_earlier(combine: Callable[[Tree, Tree], Tree], mine: Tree, empty: Tree, share: Share | None) -> Tree:
    """What the stretches before this device's come to, by an associative `combine(earlier, later)`.

    `mine` is what this device's own comes to, `empty` what none does. In log(n) rounds devices ever farther apart
    exchange what they know, so that none holds more than two of them at a time.
    """
    if share is None:
        return empty
    n = lax.axis_size(share.names)

    def from_before(tree, distance, otherwise):
        sent = [(i, i + distance) for i in range(n - distance)]
        moved = jax.tree.map(lambda leaf: lax.ppermute(leaf, share.names, sent), tree)
        return jax.tree.map(lambda new, old: jnp.where(share.place >= distance, new, old), moved, otherwise)

    known, distance = from_before(mine, 1, empty), 1
    while distance < n - 1:
        known = combine(from_before(known, distance, empty), known)
        distance *= 2
    return known


def of_last(tree: Tree, share: Share | None) -> Tree:
    """What the last device has, on all of them."""
    if share is None:
        return tree
    last = share.place == lax.axis_size(share.names) - 1
    parts, together = apart(tree)
    return together(jax.tree.map(lambda leaf: lax.psum(jnp.where(last, leaf, 0), share.names), parts))


def handed_on(products: Array, ends: Array, h0: Array, share: Share | None) -> tuple[Array, Array]:
    """The state that this device's stretch begins with and that the last one ends with.

    A stretch does `h -> products h + ends` to any state; h0 is that before the first.
    """

    def combine(first, second):
        (a1, b1), (a2, b2) = first, second
        return a2 * a1, a2 * b1 + b2

    empty = jnp.ones_like(products), jnp.zeros_like(ends)
    before, added = of_earlier(combine, (products, ends), empty, share)
    start = before * h0 + added
    return start, of_last(products * start + ends, share)


def by_channels(run: Callable[..., Tree], arrays: tuple[Array, ...], axes: tuple[Axes, ...], out: tuple[Axes, ...]):
    """`run(*arrays)`, a tuple, for an op that keeps channels apart; on devices that share the length, of some channels.

    `axes` and `out` name the logical axes of what goes in and comes out. Of an array with `length` and `inner` a device
    gets the whole length of its channels, of one with `inner` alone those channels, of one with `length` alone all.
    Rows and channels that are shared out stay so: of a Fourier transform the compiler would gather both.
    """
    named = zip(arrays, axes, strict=True)
    sizes = {name: size for leaf, names in named for name, size in zip(names, leaf.shape, strict=True)}
    n, shared = stretches(sizes["length"]), {axis for name in sizes if name for axis in placement.axes(name)}
    if not shared:
        return run(*arrays)
    (width,) = placement.held(("inner",), (sizes["inner"],))
    mesh_axes, own = placement.axes("length"), -(-width // n)  # channels of a device; those of the last are filled up

    def fill(leaf, axis, mode):
        return jnp.pad(leaf, [(0, (n * own - width) * (i == axis)) for i in range(leaf.ndim)], mode=mode)

    def take(place, leaf, names):
        if "inner" not in names:
            return leaf
        axis = names.index("inner")
        if "length" in names:
            leaf = fill(leaf, axis, "constant")
            return lax.all_to_all(leaf, mesh_axes, axis, names.index("length"), tiled=True)
        # With copies: what zeros would make of a weight need not be a number.
        return lax.dynamic_slice_in_dim(fill(leaf, axis, "edge"), place * own, own, axis)

    def give(leaf, names):
        axis = names.index("inner")
        if "length" in names:
            leaf = lax.all_to_all(leaf, mesh_axes, names.index("length"), axis, tiled=True)
        else:
            leaf = lax.all_gather(leaf, mesh_axes, axis=axis, tiled=True)
        return lax.slice_in_dim(leaf, 0, width, axis=axis)

    def mine(places, *parts):
        if n == 1:
            return run(*together(parts))
        made = run(*map(partial(take, places[0]), together(parts), axes))
        return tuple(map(give, made, out))

    def lying(names, shape):
        whole = None if "inner" not in names else "length"
        return placement.spec([whole if name == "length" else name for name in names], shape)

    shapes = jax.eval_shape(run, *arrays)
    parts, together = apart(arrays)
    return jax.shard_map(
        mine,
        in_specs=(
            PartitionSpec(mesh_axes if n > 1 else None),
            *(lying(names, leaf.shape) for names, leaf in zip(axes, arrays, strict=True)),
        ),
        out_specs=tuple(lying(names, leaf.shape) for names, leaf in zip(out, shapes, strict=True)),
        axis_names=shared,
        check_vma=False,
    )(jnp.arange(n, dtype=jnp.int32), *parts)


@cache
def gathers(what: str) -> None:
    """Says, once, that something needs the whole length on every device."""
    names = " and ".join(f"mesh.{axis}" for axis in placement.axes("length"))
    logging.warning("%s needs all tokens on every device: %s shares out neither its work nor its memory", what, names)
