"""Which blocks queries choose, in kernels for NVIDIA GPUs: scores live and die on the chip, and later blocks have none.

A program has a tile of queries and goes through the blocks before them, some at a time, with the best that each query
has met so far. `choice_by_means` scores a block by its mean key, as MoBA does; `choice_by_weights` by a group's weights
on compressed keys, as NSA does. Letters beside the project's own: l queries of a tile, c blocks and m compressed keys
at a time, n blocks to find. Nothing here has a gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import dot

from model import placement
from model.ops.flash_kernels import LOG2_E
from model.ops.fused_state import Refs, launch

Array = jax.Array
SIZE = 64  # l, c and m
FAR = 2**30  # behind all tokens
PARAMS = (4, 1)  # warps and stages


class Queries(NamedTuple):
    """Where queries stand among tokens in order, each `[B, L]`."""

    index: Array
    begins: Array  # the first token of the document
    own: Array  # the first token of the query's own block
    document: Array


class Blocks(NamedTuple):
    """Each `[B, N]`, in order; where there is none, document 0."""

    start: Array
    document: Array


class Compressed(NamedTuple):
    """How compressed keys lie to each other and to blocks, in tokens."""

    length: int
    stride: int
    block: int


def width(n: int) -> int:
    return max(2, pl.next_power_of_2(n))


def none_yet(l: int, n: int) -> tuple[Array, Array]:
    """The scores and first tokens of the best n so far, `[l, n]` or somewhat wider; no token where there is none."""
    slot = lax.broadcasted_iota(jnp.int32, (l, width(n)), 1)
    return jnp.where(slot < n, -jnp.inf, jnp.inf).astype(jnp.float32), slot - slot.shape[1]


def kept(best: tuple[Array, Array], scores: Array, start: Array, n: int) -> tuple[Array, Array]:
    """The best of those and of blocks with such scores, `[l, c]`, that come after them; start: [1, c].

    Of equal scores the earlier block's counts more: it is taken first, and given up last.
    """

    def once(_, carry):
        scores, value, first = carry
        top, low = jnp.max(scores, axis=1)[:, None], jnp.min(value, axis=1)[:, None]
        at = jnp.min(jnp.where(scores == top, start, FAR), axis=1)[:, None]
        last = jnp.max(jnp.where(value == low, first, -FAR), axis=1)[:, None]
        here = (value == low) & (first == last) & (top > low)
        return jnp.where(start == at, -jnp.inf, scores), jnp.where(here, top, value), jnp.where(here, at, first)

    return lax.fori_loop(0, n, once, (scores, *best))[1:]


def over_blocks(see: Refs, out, n: int, scores_of: Callable[[Array, Array], Array]) -> None:
    """Keeps the best of `scores_of(i, start)` `[l, c]` over all i; out: [l, n], or somewhat wider."""
    own, mine = see["own"][...][:, None], see["document"][...][:, None]

    def step(i, best):
        here = pl.ds(i * SIZE, SIZE)
        start, document = see["start"][here][None, :], see["of"][here][None, :]
        scores = jnp.where((document == mine) & (start < own), scores_of(i, start), -jnp.inf)
        return kept(best, scores, start, n)

    _, first = lax.fori_loop(see["met"][0], see["met"][1], step, none_yet(SIZE, n))
    out[...] = jnp.maximum(first, -1)


def means_kernel(see: Refs, out, *, n: int):
    """Of one head. q: [l, K]; means, rest: [N, K], whose sum is the mean keys."""
    q = see["q"][...]

    def scores_of(i, _):
        here = pl.ds(i * SIZE, SIZE)
        scores = dot(q, see["means"][here, :], trans_b=True)
        return scores + dot(q, see["rest"][here, :], trans_b=True) if "rest" in see else scores

    over_blocks(see, out, n, scores_of)


def weights_kernel(see: Refs, out, *, n: int, scale: float, form: Compressed):
    """Of one group of heads. q: [l, R, K]; lse: [R, l]; k: [N, K], compressed, with k_start and k_of: [N]."""
    index, begins, own, mine = (see[name][...][:, None] for name in Queries._fields)
    R = see["q"].shape[1]
    alone = see["q"][:, 0, :] if R == 1 else None

    def scores_of(i, start):
        def add(j, sum_):
            here = pl.ds(j * SIZE, SIZE)
            k, k_start, k_of = see["k"][here, :], see["k_start"][here], see["k_of"][here]

            def of_head(r, sum_):
                q = see["q"][:, r, :] if alone is None else alone
                scores = dot(q, k, trans_b=True) * (scale * LOG2_E)
                return sum_ + jnp.exp2(scores - see["lse"][r, :][:, None] * LOG2_E)

            weights = lax.fori_loop(0, R, of_head, jnp.zeros((SIZE, SIZE), jnp.float32))
            seen = (k_of[None, :] == mine) & (k_start[None, :] + (form.length - 1) <= index)
            weights, k_start = jnp.where(seen, weights, 0), k_start[:, None]
            shared = jnp.minimum(k_start + form.length, start + form.block) - jnp.maximum(k_start, start)
            # A key counts once for every stretch of `stride` tokens that it shares with a block.
            counts = lax.div(jnp.maximum(shared, 0), jnp.int32(form.stride)).astype(jnp.bfloat16)
            large = weights.astype(jnp.bfloat16)  # in two parts, as products of narrow numbers lose nothing
            small = (weights - large.astype(jnp.float32)).astype(jnp.bfloat16)
            return sum_ + dot(large, counts) + dot(small, counts)

        scores = lax.fori_loop(see["spans"][i, 0], see["spans"][i, 1], add, jnp.zeros((SIZE, SIZE), jnp.float32))
        always = (start == begins) | (start == own - form.block)
        return jnp.where(always, jnp.inf, scores)

    over_blocks(see, out, n, scores_of)


def filled(x: Array, axis: int = 1, value: int = 0) -> Array:
    """Up to whole tiles."""
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % SIZE)
    return jnp.pad(x, more, constant_values=value)


def before(start: Array, tokens: Array) -> Array:
    """How many of `[B, N]` are before each of tokens `[B, n]`: all are compared, in one step and in no room."""
    return jnp.sum(start[:, None] < tokens[..., None], axis=-1, dtype=jnp.int32)


def shared(queries: Queries, blocks: Blocks) -> dict[str, tuple[Array, pl.BlockSpec]]:
    """What both kernels see, in a grid of (tiles, heads, rows): where queries and blocks are, and which are met."""
    B = len(queries.index)
    # Queries that fill the last tile are of no document, and meet nothing.
    queries = Queries(*(filled(x, value=-1) for x in queries))
    start, of = filled(jnp.where(blocks.document > 0, blocks.start, FAR), value=FAR), filled(blocks.document)
    N = start.shape[1]
    real = queries.document > 0
    tile = (B, -1, SIZE)
    low = jnp.min(jnp.where(real, queries.begins, FAR).reshape(tile), axis=-1)
    high = jnp.max(jnp.where(real, queries.own, 0).reshape(tile), axis=-1)
    met = jnp.stack([before(start, low) // SIZE, -(-before(start, high) // SIZE)], axis=-1)
    given = {name: (x, pl.BlockSpec((None, SIZE), lambda t, h, b: (b, t))) for name, x in queries._asdict().items()}
    row = pl.BlockSpec((None, N), lambda t, h, b: (b, 0))
    return given | dict(
        start=(start, row), of=(of, row), met=(met, pl.BlockSpec((None, None, 2), lambda t, h, b: (b, t, 0)))
    )


def run(kernel: Callable, name: str, given: dict[str, Any], shape: tuple[int, ...], n: int, interpret: bool) -> Array:
    """First tokens `[B, L, H, n]`; shape: B, L, H."""
    B, L, H = shape
    wide, tiles = width(n), pl.cdiv(L, SIZE)
    made = jax.ShapeDtypeStruct((B, H, tiles * SIZE, wide), jnp.int32)
    block = pl.BlockSpec((None, None, SIZE, wide), lambda t, h, b: (b, h, t, 0))
    (found,) = launch(kernel, name, (tiles, H, B), given, [(made, block)], PARAMS, interpret)
    return jnp.swapaxes(found, 1, 2)[:, :L, :, :n]


def nearest(q: Array, means: Array, queries: Queries, blocks: Blocks, n: int, interpret: bool = False) -> Array:
    """The n blocks before a query's own, of its document, whose mean key has the highest product with it.

    q: [B, L, G, R, K]; means: [B, N, G, K], wide. Gives first tokens, `[B, L, G R, n]`, -1 where there are fewer.
    """
    n = min(n, means.shape[1])

    def on_device(q, means, queries, blocks):
        B, L, G, R, K = q.shape
        means = filled(means)
        parts = [means.astype(q.dtype)]
        if q.dtype != means.dtype:
            parts.append((means - parts[0].astype(means.dtype)).astype(q.dtype))
        keys = pl.BlockSpec((None, means.shape[1], None, K), lambda t, h, b: (b, 0, h // R, 0))
        head = pl.BlockSpec((None, SIZE, None, K), lambda t, h, b: (b, t, h, 0))
        given = shared(queries, blocks) | dict(q=(filled(q.reshape(B, L, G * R, K)), head))
        given |= {name: (x, keys) for name, x in zip(("means", "rest"), parts, strict=False)}
        return run(partial(means_kernel, n=n), "choice_by_means", given, (B, L, G * R), n, interpret)

    return on_each_device(on_device, (q, means), (queries, blocks))


def weightiest(
    q: Array,
    lse: Array,
    k: Array,
    keys: Blocks,
    queries: Queries,
    blocks: Blocks,
    n: int,
    form: Compressed,
    interpret: bool = False,
) -> Array:
    """The first block, that before a query's own, and others by what they get of weights on compressed keys.

    q: [B, L, G, R, K]; lse: [B, L, G, R], of scores of compressed keys k [B, N, G, K], which lie as `keys` says.
    Gives first tokens, `[B, L, G, n]`, -1 where there are fewer.
    """
    n = min(n, blocks.start.shape[1])

    def on_device(q, lse, k, keys, queries, blocks):
        B, L, G, R, K = q.shape
        k, at, of = filled(k), filled(keys.start, value=FAR), filled(keys.document)
        at = jnp.where(of > 0, at, FAR)
        row = pl.BlockSpec((None, k.shape[1]), lambda t, g, b: (b, 0))
        given = shared(queries, blocks)
        start = given["start"][0].reshape(B, -1, SIZE)
        # Which compressed keys, by tiles, some of each tile of blocks share tokens with.
        ends = jnp.max(jnp.where(start < FAR, start + form.block, 0), axis=-1)
        spans = before(at, start[:, :, 0] - form.length + 1) // SIZE, -(-before(at, ends) // SIZE)
        spans = jnp.stack(spans, axis=-1)
        given |= dict(
            q=(filled(q), pl.BlockSpec((None, SIZE, None, R, K), lambda t, g, b: (b, t, g, 0, 0))),
            lse=(
                filled(jnp.moveaxis(lse, 1, 3), axis=3),
                pl.BlockSpec((None, None, R, SIZE), lambda t, g, b: (b, g, 0, t)),
            ),
            k=(k, pl.BlockSpec((None, k.shape[1], None, K), lambda t, g, b: (b, 0, g, 0))),
            k_start=(at, row),
            k_of=(of, row),
            spans=(spans, pl.BlockSpec((None, *spans.shape[1:]), lambda t, g, b: (b, 0, 0))),
        )
        kernel = partial(weights_kernel, n=n, scale=K**-0.5, form=form)
        return run(kernel, "choice_by_weights", given, (B, L, G), n, interpret)

    return on_each_device(on_device, (q, lse, k), (keys, queries, blocks))


def on_each_device(run: Callable, by_group: tuple[Array, ...], by_row: tuple[Any, ...]) -> Array:
    """On a device's own rows and groups, of `[B, L, G, ...]` and then of trees of `[B, ...]`."""
    shape = by_group[0].shape[:3]
    token, row = placement.spec(("batch", None, "heads"), shape), placement.spec(("batch",), shape[:1])
    specs = *[token] * len(by_group), *jax.tree.map(lambda _: row, by_row)
    return placement.on_each_device(run, specs, token)(*by_group, *by_row)
