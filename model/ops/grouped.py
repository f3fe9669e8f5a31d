"""Rows brought together by group, and their products with one matrix a group: experts, each with its tokens.

Shape letters besides those of the contract: R rows, X groups, S slots that rows are moved to, I and O a matrix's axes.
A row of group X or more belongs to none.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.lax import RaggedDotDimensionNumbers

from model import placement
from model.contract import wide
from model.ops.product import einsum


@struct.dataclass
class Layout:
    """Where rows stand once those of a group stand together."""

    slot: jax.Array  # [R] int32, the slot of each row; S: none
    row: jax.Array  # [S] int32, the row in each slot; R: none
    # What a product must know of the groups: their sizes [X] if they follow each other without gaps; of slots in
    # tiles, the group of each tile; None: one tile for each group, in order.
    groups: jax.Array | None
    product: Callable[..., jax.Array] = struct.field(pytree_node=False)


def sorted_layout(group: jax.Array, X: int) -> Layout:
    """One group after another, without gaps: what `lax.ragged_dot` wants."""
    rank, sizes = ranks(group, X)
    first = jnp.cumsum(sizes) - sizes
    slot = jnp.where(group < X, first[jnp.minimum(group, X - 1)] + rank, len(group))
    return Layout(slot, rows_of(slot, len(group)), sizes, ragged_product)


def tiled_layout(group: jax.Array, X: int) -> Layout:
    """Tiles that each hold rows of one group: one batched product does all of them, whatever the sizes.

    With tiles of an even share of the rows there are fewer than 2 X, however uneven the groups are.
    """
    rank, sizes = ranks(group, X)
    tile = -(-len(group) // X)
    first = jnp.cumsum(-(-sizes // tile))
    m = min(2 * X - 1, len(group))
    S = m * tile
    begin = jnp.pad(first[:-1], (1, 0)) * tile
    slot = jnp.where(group < X, begin[jnp.minimum(group, X - 1)] + rank, S)
    of_tile = jnp.searchsorted(first, jnp.arange(m), side="right")
    return Layout(slot, rows_of(slot, S), jnp.minimum(of_tile, X - 1), tiled_product)


def bounded_layout(group: jax.Array, X: int, room: int) -> Layout:
    """A tile of `room` slots for each group; rows past the room of their group have no slot."""
    rank, _ = ranks(group, X)
    slot = jnp.where((group < X) & (rank < room), group * room + rank, X * room)
    return Layout(slot, rows_of(slot, X * room), None, tiled_product)


def ranks(group: jax.Array, X: int) -> tuple[jax.Array, jax.Array]:
    """Of each row its place among those of its group, `[R]`; and the sizes of the groups, `[X]`."""
    group = jnp.minimum(group, X)
    order = jnp.argsort(group, stable=True)
    place = rows_of(order, len(group))  # the inverse of a permutation
    bounds = jnp.searchsorted(group[order], jnp.arange(X + 1), side="left").astype(jnp.int32)
    return place - bounds[group], bounds[1:] - bounds[:-1]


def rows_of(slot: jax.Array, S: int) -> jax.Array:
    """The row in each of S slots, `[S]`; in an empty one, the number of rows."""
    R = len(slot)
    apart = jnp.where(slot < S, slot, S + jnp.arange(R))  # what goes nowhere, each to a place of its own
    rows = jnp.arange(R, dtype=jnp.int32)
    return jnp.full(S, R, jnp.int32).at[apart].set(rows, mode="drop", unique_indices=True)


@jax.custom_vjp
def moved(x: jax.Array, source: jax.Array, place: jax.Array) -> jax.Array:
    """`x[source]`, zeros where there is no such row. `place` is the way back, so that no gradient needs a scatter."""
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def moved_forward(x, source, place):
    return moved(x, source, place), (source, place)


def moved_backward(saved, g):
    source, place = saved
    nothing = [np.zeros(index.shape, jax.dtypes.float0) for index in saved]
    return moved(g, place, source), *nothing


moved.defvjp(moved_forward, moved_backward)


def grouped(x: jax.Array, kernel: jax.Array, layout: Layout) -> jax.Array:
    """`x[s] @ kernel[group of s]`, `[S, O]`; x: [S, I], in slots; kernel: [X, I, O], wide. Nothing in empty slots."""
    return layout.product(x, kernel, layout.groups)


@jax.custom_vjp
def ragged_product(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows `[R, I]` in order of their groups, of these sizes."""
    return ragged_forward(x, kernel, sizes)[0]


def ragged_forward(x, kernel, sizes):
    narrow = kernel.astype(x.dtype)
    return lax.ragged_dot(x, narrow, sizes), (x, narrow, sizes)


def ragged_backward(saved, g):
    x, kernel, sizes = saved
    d_x = lax.ragged_dot(g.astype(x.dtype), jnp.swapaxes(kernel, 1, 2), sizes)
    over_rows = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    d_kernel = lax.ragged_dot_general(x, g.astype(x.dtype), sizes, over_rows, preferred_element_type=wide(x.dtype))
    return d_x, d_kernel, np.zeros(sizes.shape, jax.dtypes.float0)


ragged_product.defvjp(ragged_forward, ragged_backward)


@jax.custom_vjp
def tiled_product(x: jax.Array, kernel: jax.Array, group: jax.Array | None) -> jax.Array:
    """Rows `[m b, I]` in m tiles, each of one group `[m]`; None: tile i is of group i."""
    return tiled_forward(x, kernel, group)[0]


def tiled_forward(x, kernel, group):
    narrow = kernel.astype(x.dtype)
    chosen = narrow if group is None else narrow[group]
    y = einsum("mbi,mio->mbo", tiles(x, chosen), chosen, x.dtype)
    return y.reshape(len(x), -1), (x, narrow, group)


def tiled_backward(saved, g):
    x, kernel, group = saved
    chosen = kernel if group is None else kernel[group]
    of_x, of_y = tiles(x, chosen), tiles(g.astype(x.dtype), chosen)
    d_x = einsum("mbo,mio->mbi", of_y, chosen, x.dtype).reshape(x.shape)
    d_kernel = einsum("mbi,mbo->mio", of_x, of_y, wide(x.dtype))
    if group is None:
        return d_x, d_kernel, None
    # At most 2 X tiles: the sum over those of a group is a product with who belongs to whom.
    whose = jax.nn.one_hot(group, len(kernel), dtype=d_kernel.dtype)
    d_kernel = jnp.einsum("mx,mio->xio", whose, d_kernel, precision="highest")
    return d_x, d_kernel, np.zeros(group.shape, jax.dtypes.float0)


tiled_product.defvjp(tiled_forward, tiled_backward)


def tiles(x: jax.Array, kernels: jax.Array) -> jax.Array:
    return x.reshape(len(kernels), -1, x.shape[-1])


LAYOUTS = {"ragged": sorted_layout, "tiled": tiled_layout}


def layout(group: jax.Array, X: int, implementation: str | None = None) -> Layout:
    """`ragged` is a TPU's own operation; elsewhere XLA computes every row with every group, and `tiled` does not."""
    best = "ragged" if placement.platform() == "tpu" else "tiled"
    return LAYOUTS[implementation or best](group, X)
