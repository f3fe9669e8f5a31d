"""Rows of a table by number, and vectors by their place, with gradients that have the same bits every time.

The gradient adds up what all tokens of one kind say of their row, or all that ask at one place. A GPU's scatter-add
does so by atomics, in whatever order threads arrive; there the tokens are sorted instead, and each run of equal ones is
added up in order.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from model import placement


@jax.custom_vjp
def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """`table[tokens]`, `[..., D]`; table: [V, D]; tokens: [B, L], from 0 to V - 1."""
    return jnp.take(table, tokens, axis=0)


def rows_forward(table, tokens):
    return rows(table, tokens), (tokens, table)  # of the table only its shape is needed; it is kept anyway


def rows_backward(saved, g):
    tokens, table = saved
    total = sorted_sums if placement.platform() == "gpu" else scattered_sums
    return total(tokens, g.astype(table.dtype), table.shape[0]), np.zeros(tokens.shape, jax.dtypes.float0)


rows.defvjp(rows_forward, rows_backward)


def scattered_sums(tokens: jax.Array, g: jax.Array, V: int) -> jax.Array:
    """For each of V numbers the sum of `g` `[B, L, D]` where `tokens` `[B, L]` has it: `[V, D]`."""
    return jnp.zeros((V, g.shape[-1]), g.dtype).at[tokens].add(g)


def sorted_sums(tokens: jax.Array, g: jax.Array, V: int) -> jax.Array:
    """The same in an order that depends on the tokens alone; each device sorts its own."""
    one = partial(runs, V=V)
    axes = (*placement.axes("batch"), *placement.axes("length"))
    if not axes:
        return one(tokens, g)
    split = P(*(placement.spec(("batch", "length"), tokens.shape)))
    each = jax.shard_map(
        lambda tokens, g: lax.psum(one(tokens, g), axes),
        in_specs=(split, split),
        out_specs=P(),
        axis_names=set(axes),
        check_vma=False,
    )
    return each(tokens, g)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def picked(L: int, x: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, at[..., None], axis=1)


def picked_backward(L, at, g):
    if placement.platform() != "gpu":
        return jax.vmap(partial(scattered_sums, V=L))(at, g), np.zeros(at.shape, jax.dtypes.float0)
    own = placement.spec(("batch", None), at.shape)
    each = placement.on_each_device(jax.vmap(partial(runs, V=L)), (own, own), own)
    return each(at, g), np.zeros(at.shape, jax.dtypes.float0)


picked.defvjp(lambda L, x, at: (picked(L, x, at), at), picked_backward)


def at_places(x: jax.Array, at: jax.Array) -> jax.Array:
    """Of each row the vectors at these places, `[B, Q, D]`; x: [B, L, D]; at: [B, Q]."""
    return picked(x.shape[1], x, at)


def runs(tokens: jax.Array, g: jax.Array, V: int) -> jax.Array:
    tokens, g = tokens.reshape(-1), g.reshape(-1, g.shape[-1])
    order = jnp.argsort(tokens, stable=True)
    tokens, g = tokens[order], g[order]
    first = jnp.pad(tokens[1:] != tokens[:-1], (1, 0), constant_values=True)
    last = jnp.roll(first, -1)

    def combine(one, two):  # a sum starts anew where a run does
        (first1, sum1), (first2, sum2) = one, two
        return first1 | first2, jnp.where(first2[:, None], sum2, sum1 + sum2)

    _, sums = lax.associative_scan(combine, (first, g))
    # The last of a run has the run's sum; the others go nowhere, each to a place of its own.
    place = jnp.where(last, tokens, V + jnp.arange(len(tokens)))
    return jnp.zeros((V, g.shape[-1]), g.dtype).at[place].set(sums, mode="drop", unique_indices=True)
