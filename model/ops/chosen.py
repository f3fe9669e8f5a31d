"""Softmax attention to blocks of keys that each query has chosen: work and memory grow with what is chosen.

Queries are handled a tile at a time; the blocks that they chose are gathered, and nothing else is looked at. q:
[B, L, G, R, K], where the R heads of a group choose together; k, v: [B, M, G, K]. A block is `size` tokens of one
document that follow each other, padding left out, and is known by its first token. Queries are among the keys, and see
nothing behind themselves.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from model import placement
from model.contract import wide
from model.errors import choose
from model.ops.choice import TILE, Order, tiles, untiled
from model.ops.dense_attention import softmax
from model.ops.fused import SIDES, needs_unmet, picked, refuse
from model.ops.named import running
from model.ops.scores import Bias
from model.ops.stretches import gathers

Array = jax.Array
# Numbers that a tile gathers on a device; with gradient it holds four times as many.
GATHERED, GATHERED_ON_CPU = 2**26, 2**21


@dataclasses.dataclass(frozen=True)
class Form:
    """What is known of a call when it is traced."""

    size: int  # of a block
    scale: float
    bias: Callable | None


@struct.dataclass
class Learned:
    """What has a gradient."""

    q: Array  # [B, L, G, R, K]
    k: Array  # [B, M, G, K], in order
    v: Array  # [B, M, G, V]
    bias: Any  # parameters of the form's bias, each with an axis of G in front


@struct.dataclass
class Places:
    chosen: Array  # [B, L, G, n], first tokens of blocks, -1: none
    index: Array  # [B, L]
    q_positions: Array  # [B, L]
    k_positions: Array  # [B, M], in order


def attend(
    q: Array,
    k: Array,
    v: Array,
    chosen: Array,
    order: Order,
    size: int,
    *,
    bias: Bias | None,
    q_positions: Array,
    k_positions: Array,
    implementation: str | None = None,
) -> Array:
    """Attention of each query to the tokens up to itself of the blocks it chose, `[B, L, G, R, V]`.

    k, v: in the row's order, as are `k_positions`, [B or 1, M], by which `bias` is. On a mesh a device has its own
    rows and groups of heads, and of those the whole length. implementation: `gathered`, plain XLA, or `fused`, kernels
    for NVIDIA GPUs; None takes those where they can serve.
    """
    form, learned, where = prepare(q, k, v, chosen, order, size, bias, q_positions, k_positions)
    heads = shared_heads("attention to chosen blocks", q.shape[2], k.shape[1])

    def lying(x, *names):
        return placement.spec(names + (None,) * (x.ndim - len(names)), x.shape)

    of_learned = Learned(
        *(lying(x, "batch", None, heads) for x in (learned.q, learned.k, learned.v)),
        bias=jax.tree.map(lambda leaf: lying(leaf, heads), learned.bias),
    )
    others = (lying(x, "batch") for x in (where.index, where.q_positions, where.k_positions))
    of_where = Places(lying(where.chosen, "batch", None, heads), *others)
    run = partial(on_device, form, implementation)
    return placement.on_each_device(run, (of_learned, of_where), of_learned.q)(learned, where)


def on_device(form: Form, implementation: str | None, o: Learned, where: Places) -> Array:
    name = implementation or best(form, o)
    run = choose("implementation of attention to chosen blocks", name, IMPLEMENTATIONS)
    with running("chosen", name):
        return run(form, o, where)


def fused(form: Form, o: Learned, where: Places) -> Array:
    """The same in kernels for NVIDIA GPUs."""
    refuse("attention to chosen blocks", needs_unmet(o.q) + misfits(form, o), "gathered")
    from model.ops import fused_chosen  # here: Pallas takes a second to load, and only GPUs need it

    return fused_chosen.attend(form, o, where)


def best(form: Form, o: Learned) -> str:
    """The implementation for a call that names none."""
    if o.q.shape[1] <= TILE:  # few queries are gathered for at once
        return "gathered"
    return picked("attention to chosen blocks", o.q, misfits(form, o), KNOBS, "gathered")


KNOBS = "model.position, block, head_dim or n_heads"  # that set what kernels may lack


def misfits(form: Form, o: Learned) -> list[str]:
    """What of a call the kernels are not made for; empty if they can serve it."""
    reasons = []
    if form.bias is not None:
        reasons.append("a position that adds to scores (it takes none that does)")
    if form.size < SIDES[0] or form.size.bit_count() > 1:
        fits = max(SIDES[0], 2 ** round(math.log2(form.size)))
        reasons.append(f"blocks of {form.size} tokens (it takes powers of two from {SIDES[0]} on; closest: {fits})")
    if o.k.shape[-1] not in SIDES or o.v.shape[-1] not in SIDES:
        allowed = ", ".join(map(str, SIDES))
        reasons.append(f"heads of {o.k.shape[-1]} channels (it takes {allowed}; set by head_dim or n_heads)")
    return reasons


def shared_heads(what: str, G: int, M: int) -> placement.Name:
    """By which logical axes devices share G heads, of which each is to have the whole length M.

    Devices that share the length take heads in the place of tokens, where there are enough.
    """
    heads = next((name for name in (("heads", "length"), "heads") if placement.shards(name, G) > 1), None)
    if placement.shards("length", M) > 1 and not isinstance(heads, tuple):
        gathers(what)
    return heads


def weights_of_all(
    q: Array, k: Array, chosen: Array, order: Order, size: int, *, bias: Bias | None, q_positions, k_positions
) -> Array:
    """The same by its definition, all weights `[B, G, R, L, M]` in the row's order: zero where nothing was chosen."""
    form, o, where = prepare(q, k, k, chosen, order, size, bias, q_positions, k_positions)
    m = jnp.arange(k.shape[1])
    first = where.chosen[..., None]  # [B, L, G, n, 1]
    seen = jnp.any((first >= 0) & (first <= m) & (m < first + size), axis=3) & (m <= where.index[:, :, None, None])
    f = wide(q.dtype)
    scores = jnp.einsum("blgrk,bmgk->bgrlm", o.q.astype(f), o.k.astype(f)) * form.scale
    if bias is not None:
        added = bias.fn(bias.params, where.q_positions, where.k_positions)
        scores = scores + added.reshape(added.shape[0], *scores.shape[1:])
    weights, _ = softmax(scores, jnp.moveaxis(seen, 1, 2)[:, :, None], None)
    if order.back is None:
        return weights
    back = order.back[:, None, None, None]
    return jnp.where(back >= 0, jnp.take_along_axis(weights, jnp.maximum(back, 0), axis=-1), 0)


def prepare(q, k, v, chosen, order, size, bias, q_positions, k_positions) -> tuple[Form, Learned, Places]:
    """A call with tokens in order and the parameters of its bias by groups of heads."""
    (B, L, G, R, K), M = q.shape, k.shape[1]

    params = None if bias is None else by_group(bias, G, R)
    form = Form(size, K**-0.5, None if bias is None else bias.fn)
    learned = Learned(q, order.moved(k), order.moved(v), params)
    q_positions, k_positions = jnp.broadcast_to(q_positions, (B, L)), jnp.broadcast_to(k_positions, (B, M))
    if order.there is not None:
        k_positions = jnp.take_along_axis(k_positions, jnp.maximum(order.there, 0), axis=1)
    return form, learned, Places(chosen, order.index, q_positions, k_positions)


def by_group(bias: Bias, G: int, R: int) -> Any:
    """The parameters of a bias for each of G groups of R heads, in front."""

    def grouped(leaf, names):
        if "heads" not in names:
            return jnp.broadcast_to(leaf, (G, *leaf.shape))
        axis = names.index("heads")
        return jnp.moveaxis(leaf.reshape(*leaf.shape[:axis], G, R, *leaf.shape[axis + 1 :]), axis, 0)

    return jax.tree.map(grouped, bias.params, bias.axes)


def see(form: Form, q: Array, k: Array, v: Array, bias: Any, seen: Array, q_positions: Array, k_positions: Array):
    """A tile of queries q `[B, t, G, R, K]`, each with keys and values of its own, `[B, G, t, m, K]`."""
    (B, t, G, R, _), m, f = q.shape, k.shape[3], wide(q.dtype)
    scores = jnp.einsum("btgrk,bgtmk->bgtrm", q, k, preferred_element_type=f) * form.scale
    if form.bias is not None:

        def of_group(params, k_positions):  # every query as a row of its own
            return form.bias(params, q_positions.reshape(-1, 1), k_positions.reshape(-1, m))

        added = jax.vmap(of_group, in_axes=(0, 1))(bias, k_positions)  # [G, B t, R, 1, m]
        scores = scores + jnp.moveaxis(added.reshape(G, B, t, R, m), 0, 1)
    weights, _ = softmax(scores, seen[:, :, :, None], None)
    out = jnp.einsum("bgtrm,bgtmv->btgrv", weights.astype(v.dtype), v, preferred_element_type=f)
    return out.astype(v.dtype)


SLICES = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
SUMS = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
)


def blocks_at(x: Array, start: Array, size: int) -> Array:
    """Blocks `[B, G, T, size, K]` of x `[B, G, M, K]`, from their first tokens `[B, G, T]` on."""

    def take(x, start):
        return lax.gather(x, start[:, None], SLICES, (size, x.shape[-1]), mode="clip")

    return jax.vmap(jax.vmap(take))(x, start)


@jax.vmap
@jax.vmap
def added_at(x: Array, start: Array, blocks: Array) -> Array:
    """x with blocks added where they were taken from."""
    return lax.scatter_add(x, start[:, None], blocks.astype(x.dtype), SUMS, mode="clip")


class Gather:
    """Takes the blocks of a tile's queries."""

    def __init__(self, form: Form, o: Learned, where: Places):
        self.form = form
        self.k, self.v = self.heads_first(o.k), self.heads_first(o.v)
        self.positions = self.heads_first(where.k_positions[:, :, None, None])

    def heads_first(self, x: Array) -> Array:
        """`[B, M, G, K]` to `[B, G, M + size, K]`: the last block may not be whole."""
        return jnp.moveaxis(jnp.pad(x, [(0, 0), (0, self.form.size), (0, 0), (0, 0)]), 1, 2)

    def starts(self, chosen: Array) -> Array:
        """`[B, G, t n]`, of any tokens where nothing was chosen."""
        first = jnp.maximum(jnp.moveaxis(chosen, 2, 1), 0)
        return first.reshape(*first.shape[:2], -1)

    def __call__(self, chosen: Array, index: Array) -> tuple[Array, Array, Array, Array | None]:
        """Keys and values `[B, G, t, m, K]` of the blocks, whether they are seen, and where they stand."""
        B, t, G, n = chosen.shape
        size, start = self.form.size, self.starts(chosen)
        k, v = (blocks_at(x, start, size).reshape(B, G, t, n * size, -1) for x in (self.k, self.v))
        first = jnp.moveaxis(chosen, 2, 1)[..., None]  # [B, G, t, n, 1]
        at = first + jnp.arange(size, dtype=jnp.int32)
        seen = ((first >= 0) & (at <= index[:, None, :, None, None])).reshape(B, G, t, n * size)
        if self.form.bias is None:
            return k, v, seen, None
        positions = blocks_at(self.positions, start.reshape(B, 1, -1), size)
        return k, v, seen, positions.reshape(B, G, t, n * size)


def cut(form: Form, o: Learned, where: Places) -> tuple[Array, Array, Array, Array]:
    """Queries, what they chose, which tokens they are and where, in tiles `[tiles, B, t, ...]`.

    Queries that fill the last tile choose nothing.
    """
    (B, L, G, _, K), n = o.q.shape, where.chosen.shape[-1]
    room = GATHERED_ON_CPU if placement.platform() == "cpu" else GATHERED
    size = max(1, min(L, TILE, room // (B * G * n * form.size * (K + o.v.shape[-1]))))
    chosen = tiles(where.chosen + 1, size) - 1
    return tiles(o.q, size), chosen, tiles(where.index, size), tiles(where.q_positions, size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, o: Learned, where: Places) -> Array:
    gather = Gather(form, o, where)

    def step(_, tile):
        q, chosen, index, at = tile
        k, v, seen, k_at = gather(chosen, index)
        return None, see(form, q, k, v, o.bias, seen, at, k_at)

    _, y = lax.scan(step, None, cut(form, o, where))
    return untiled(y, o.q.shape[1])


def forward(form: Form, o: Learned, where: Places):
    return _attend(form, o, where), (o, where)


def backward(form: Form, kept, d_y: Array):
    """Each tile again, and the gradients of what it gathered added in place to those of all keys and values."""
    o, where = kept
    (L, M), f, gather = (o.q.shape[1], o.k.shape[1]), wide(o.q.dtype), Gather(form, o, where)
    parts = cut(form, o, where)

    def step(carry, tile):
        d_k, d_v, d_bias = carry
        (q, chosen, index, at), d_out = tile
        k, v, seen, k_at = gather(chosen, index)
        _, pull = jax.vjp(lambda q, k, v, bias: see(form, q, k, v, bias, seen, at, k_at), q, k, v, o.bias)
        d_q, more_k, more_v, more_bias = pull(d_out)
        start = gather.starts(chosen)

        def added(total, more):
            return added_at(total, start, more.reshape(*start.shape, form.size, -1))

        return (added(d_k, more_k), added(d_v, more_v), jax.tree.map(jnp.add, d_bias, more_bias)), d_q

    zeros = jnp.zeros(gather.k.shape, f), jnp.zeros(gather.v.shape, f), jax.tree.map(jnp.zeros_like, o.bias)
    (d_k, d_v, d_bias), d_q = lax.scan(step, zeros, (parts, tiles(d_y, parts[0].shape[2])))
    d_k, d_v = (jnp.moveaxis(x[:, :, :M], 2, 1) for x in (d_k, d_v))
    return Learned(untiled(d_q, L), d_k.astype(o.k.dtype), d_v.astype(o.v.dtype), d_bias), None


_attend.defvjp(forward, backward)

IMPLEMENTATIONS = {"gathered": _attend, "fused": fused}
