"""Flash attention in kernels for NVIDIA GPUs, for what cuDNN's lacks: patterns, documents, biases, soft cap, sinks.

Forward is the online softmax, a tile of queries a program (https://arxiv.org/abs/2307.08691). Backward has a kernel for
the queries' gradients and one for the keys' and values', each of which makes the scores anew from the log-sum-exp, so
that nothing is added up in an order that varies. Tiles of which the mask shows nothing are not visited, and those of
which it shows all are not masked.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from model import placement
from model.ops.flash_kernels import Shape, keys_kernel, out_kernel, queries_kernel
from model.ops.fused_state import launch
from model.ops.mask import FULL, Band, Mask
from model.ops.scores import Form, Operands
from model.ops.tile_walk import Walk, averaged, in_parts, summed, tiles_met, tiles_of_a_document, walk
from model.ops.tiled_attention import learned, pull_of_sinks

Array = jax.Array


def shapes(form: Form, o: Operands) -> dict[str, Shape]:
    """The best of those tried on an H200; older chips have less room for the stages' tiles.

    Tiles are no larger than the blocks of a pattern, and those of no more than 64 rows have work for four warps.
    """
    if o.q.dtype.itemsize == 4:
        made = dict(out=Shape(64, 32, 4, 2), queries=Shape(64, 32, 4, 1), keys=Shape(32, 64, 4, 1))
    elif placement.capability() < (9, 0):
        made = dict(out=Shape(64, 64, 4, 2), queries=Shape(64, 64, 4, 2), keys=Shape(64, 64, 4, 2))
    else:
        made = dict(out=Shape(128, 128, 8, 3), queries=Shape(128, 64, 8, 3), keys=Shape(64, 64, 4, 2))
    if (grain := form.mask.grain()) is None:
        return made
    most = grain & -grain  # the largest power of two that divides it
    return {name: within(shape, most) for name, shape in made.items()}


def within(shape: Shape, most: int) -> Shape:
    small = shape._replace(l=min(shape.l, most), m=min(shape.m, most))
    return small if small == shape else small._replace(warps=4, stages=2)


def per_token(x: Array | None) -> tuple[Array | None, pl.BlockSpec | None]:
    """All of `[B or 1, L]`, of a program's own row."""
    if x is None:
        return None, None
    one = x.shape[0] == 1
    return x, pl.BlockSpec((None, x.shape[1]), lambda t, h, b: (0 if one else b, 0))


def shared(form: Form, o: Operands, shape: Shape, spans: Walk, by_key: bool) -> dict:
    """What all three kernels see: of the walk, and of the tokens but for their channels and levels."""
    places = form.stretches == 1
    given = dict(
        spans=(jnp.asarray(spans.spans), pl.BlockSpec((None, 4), lambda t, h, b: (t, 0))),
        tile=(jnp.asarray(spans.tiles()), pl.BlockSpec((None,), lambda t, h, b: (t,))),
        q_positions=per_token(None if places else o.q_positions),
        k_positions=per_token(None if places else o.k_positions),
        q_segments=per_token(o.q_segments),
        k_segments=per_token(o.k_segments),
    )
    if spans.listed is not None:
        given["listed"] = (jnp.asarray(spans.listed), pl.BlockSpec(spans.listed.shape, lambda t, h, b: (0,)))
    for name, tiles in found(form, o, shape, spans, by_key).items():
        one = tiles.shape[0] == 1
        given[name] = (
            tiles if spans.tile is None else tiles[:, spans.tile],
            pl.BlockSpec((None, None, 2), lambda t, h, b, one=one: (0 if one else b, t, 0)),
        )
    return given


def by_query(form: Form, o: Operands, shape: Shape, M: int) -> tuple[Walk, dict]:
    """What the kernels see that have a tile of queries each."""
    (B, L, G, R, K), V = o.q.shape, o.v.shape[-1]
    spans = in_parts(walk(known(form), shape[:2], (L, o.k.shape[1]), M, by_key=False))
    head = pl.BlockSpec((None, None, L), lambda t, h, b: (b, h, 0))
    given = shared(form, o, shape, spans, by_key=False) | dict(
        q=(o.q.reshape(B, L, G * R, K), pl.BlockSpec((None, L, None, K), lambda t, h, b: (b, 0, h, 0))),
        k=(o.k, pl.BlockSpec((None, o.k.shape[1], None, K), lambda t, h, b: (b, 0, h // R, 0))),
        v=(o.v, pl.BlockSpec((None, o.k.shape[1], None, V), lambda t, h, b: (b, 0, h // R, 0))),
        sink=(None if o.sinks is None else o.sinks.reshape(-1), pl.BlockSpec((None,), lambda t, h, b: (h,))),
        q_levels=(heads_first(o.q_levels), head),
        k_levels=(heads_first(o.k_levels), pl.BlockSpec((None, None, o.k.shape[1]), lambda t, h, b: (b, h, 0))),
    )
    if form.bias is not None:
        given["bias"] = (o.bias, {name: head_of(x) for name, x in o.bias.items()})
    return spans, given


def head_of(x: Array) -> pl.BlockSpec:
    """A program's own of `[H]` or `[n, H]`."""
    return pl.BlockSpec((*x.shape[:-1], None), lambda t, h, b: (*[0] * (x.ndim - 1), h))


def group_of(x: Array) -> pl.BlockSpec:
    """Those of a program's key-value head, of `[G, R]` or `[n, G, R]`."""
    return pl.BlockSpec((*x.shape[:-2], None, x.shape[-1]), lambda t, g, b: (*[0] * (x.ndim - 2), g, 0))


def heads_first(x: Array | None) -> Array | None:
    """`[B, L, G, R]` as `[B, H, L]`."""
    return None if x is None else jnp.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2)


def placed(form: Form) -> bool:
    """Whether who sees whom is known by their places in the row, documents aside."""
    return form.stretches == 1 or form.gapless


def exact(form: Form) -> bool:
    """Whether within a document `known` is the mask itself."""
    return form.stretches == 1 or form.mask.band() is not None


def known(form: Form) -> Mask:
    """A mask over places in the row that shows all that is seen."""
    if form.stretches == 1:
        return form.mask
    return Band(*form.mask.reach()) if form.gapless else FULL


def found(form: Form, o: Operands, shape: Shape, spans: Walk, by_key: bool) -> dict[str, Array]:
    """The tiles that each may see something of, as far as only the arrays tell, and those that are of its document."""
    if o.k_segments is None and placed(form):
        return {}
    tiles = dict(met=tiles_met(o, shape[:2], None if placed(form) else form.mask, by_key))
    if o.k_segments is not None and placed(form) and exact(form) and spans.listed is None:
        tiles["alone"] = tiles_of_a_document(o, shape[:2], by_key)
    return tiles


Kept = tuple[Operands, Array, Array]  # with output [B, L, G, R, V] and log-sum-exp [B, H, L]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _flash(form: Form, M: int, interpret: bool, o: Operands) -> tuple[Array, Array]:
    return forward(form, M, interpret, o)[0]


def forward(form: Form, M: int, interpret: bool, o: Operands) -> tuple[tuple[Array, Array], Kept]:
    (B, L, G, R, _), V = o.q.shape, o.v.shape[-1]
    H, shape = G * R, shapes(form, o)["out"]
    spans, given = by_query(form, o, shape, M)
    made = [channels_made(spans, shape.l, B, H, V, o.v.dtype), numbers_made(spans, shape.l, B, H)]
    kernel = partial(out_kernel, form=form, shape=shape, spans=spans, M=M)
    out, lse = launch(kernel, "flash_out", (len(spans.spans), H, B), given, made, shape[2:], interpret)
    out, lse = averaged(out, lse, spans, shape.l)
    out = out.reshape(B, L, G, R, V)
    return (out, jnp.swapaxes(lse, 1, 2).reshape(B, L, G, R)), (o, out, lse)


Made = tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[pl.BlockSpec, ...]]


def of_whole_and_parts(spans: Walk, shape: Callable[[int], tuple[int, ...]], dtype: Any, block: pl.BlockSpec) -> Made:
    """An output for n tiles, of `shape(n)`; where some are walked in parts, another one for their further parts."""
    n, more = spans.n, len(spans.spans) - spans.n
    if not more:
        return (jax.ShapeDtypeStruct(shape(n), dtype),), (block,)

    def at(place: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(block.block_shape, lambda t, h, b: block.index_map(place(t), h, b))

    blocks = at(lambda t: jnp.minimum(t, n - 1)), at(lambda t: jnp.maximum(t - n, 0))
    return tuple(jax.ShapeDtypeStruct(shape(tiles), dtype) for tiles in (n, more)), blocks


def channels_made(spans: Walk, size: int, B: int, H: int, channels: int, dtype: Any) -> Made:
    """`[B, L, H, channels]`, `size` tokens a program."""
    block = pl.BlockSpec((None, size, None, channels), lambda t, h, b: (b, t, h, 0))
    return of_whole_and_parts(spans, lambda n: (B, n * size, H, channels), dtype, block)


def numbers_made(spans: Walk, size: int, B: int, H: int) -> Made:
    """`[B, H, L]`, `size` tokens a program."""
    block = pl.BlockSpec((None, None, size), lambda t, h, b: (b, h, t))
    return of_whole_and_parts(spans, lambda n: (B, H, n * size), jnp.float32, block)


def backward(form: Form, M: int, interpret: bool, kept: Kept, grads: tuple[Array, Array]):
    o, out, lse = kept
    dy, d_lse = grads
    delta = jnp.einsum("blgrv,blgrv->blgr", dy, out, preferred_element_type=jnp.float32) - d_lse
    delta = heads_first(delta)
    dq, q_levels, d_bias = queries_gradients(form, M, interpret, o, dy, lse, delta)
    dk, dv, k_levels = keys_gradients(form, M, interpret, o, dy, lse, delta)
    by_token = jnp.swapaxes(lse, 1, 2).reshape(out.shape[:-1])
    sinks = pull_of_sinks(o, out, by_token, grads)
    wide_ones = learned(o).replace(q=dq, k=dk, v=dv, q_levels=q_levels, k_levels=k_levels, bias=d_bias, sinks=sinks)
    return (jax.tree.map(lambda grad, x: grad.astype(x.dtype), wide_ones, learned(o)),)


def queries_gradients(form, M, interpret, o, dy, lse, delta):
    """Gradients of the queries, of their levels, and of the bias."""
    (B, L, G, R, K), V = o.q.shape, o.v.shape[-1]
    H, shape = G * R, shapes(form, o)["queries"]
    spans, given = by_query(form, o, shape, M)
    head = pl.BlockSpec((None, None, L), lambda t, h, b: (b, h, 0))
    given |= dict(
        dy=(dy.reshape(B, L, H, V), pl.BlockSpec((None, L, None, V), lambda t, h, b: (b, 0, h, 0))),
        lse=(lse, head),
        delta=(delta, head),
    )
    P = len(spans.spans)
    made = [channels_made(spans, shape.l, B, H, K, o.q.dtype)]
    if o.q_levels is not None:
        made.append(numbers_made(spans, shape.l, B, H))
    names = sorted(o.bias) if form.bias is not None else []
    for several in (o.bias[name].shape[:-1] for name in names):
        one = pl.BlockSpec(
            (None, None, None, *several), lambda t, h, b, several=several: (b, h, t, *[0] * len(several))
        )
        made.append((jax.ShapeDtypeStruct((B, H, P, *several), jnp.float32), one))
    kernel = partial(queries_kernel, form=form, shape=shape, spans=spans, M=M)
    dq, *more = launch(kernel, "flash_queries", (P, H, B), given, made, shape[2:], interpret)
    dq = summed(dq, spans, shape.l, axis=1)
    q_levels = None
    if o.q_levels is not None:
        q_levels = tokens_first(summed(more.pop(0), spans, shape.l, axis=2), o.q_levels)
    d_bias = {name: jnp.sum(found, axis=(0, 2)).T for name, found in zip(names, more, strict=True)} or None
    return dq.reshape(o.q.shape), q_levels, d_bias


def keys_gradients(form, M, interpret, o, dy, lse, delta):
    """Gradients of keys, values, and the keys' levels."""
    B, L, G, R, _ = o.q.shape
    shape, N = shapes(form, o)["keys"], o.k.shape[1]
    spans = in_parts(walk(known(form), shape[:2], (L, N), M, by_key=True))

    def grouped(x: Array | None, size: int) -> tuple[Array | None, pl.BlockSpec]:
        """`[B, H, L]`, all that a key-value head's queries have."""
        x = None if x is None else x.reshape(B, G, R, size)
        return x, pl.BlockSpec((None, None, R, size), lambda t, g, b: (b, g, 0, 0))

    def queries(x: Array) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec((None, L, None, R, x.shape[-1]), lambda t, g, b: (b, 0, g, 0, 0))

    def keys(x: Array) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec((None, N, None, x.shape[-1]), lambda t, g, b: (b, 0, g, 0))

    given = shared(form, o, shape, spans, by_key=True) | dict(
        q=queries(o.q),
        dy=queries(dy),
        k=keys(o.k),
        v=keys(o.v),
        lse=grouped(lse, L),
        delta=grouped(delta, L),
        q_levels=grouped(heads_first(o.q_levels), L),
        k_levels=grouped(heads_first(o.k_levels), N),
    )
    if form.bias is not None:
        params = {name: x.reshape(*x.shape[:-1], G, R) for name, x in o.bias.items()}
        given["bias"] = (params, {name: group_of(x) for name, x in params.items()})
    made = [channels_made(spans, shape.m, B, G, x.shape[-1], x.dtype) for x in (o.k, o.v)]
    if o.k_levels is not None:
        tile = pl.BlockSpec((None, None, R, shape.m), lambda t, g, b: (b, g, 0, t))
        made.append(of_whole_and_parts(spans, lambda n: (B, G, R, n * shape.m), jnp.float32, tile))
    kernel = partial(keys_kernel, form=form, shape=shape, spans=spans, M=M)
    dk, dv, *more = launch(kernel, "flash_keys", (len(spans.spans), G, B), given, made, shape[2:], interpret)
    dk, dv, *more = (summed(x, spans, shape.m, axis) for x, axis in zip((dk, dv, *more), (1, 1, 3), strict=False))
    return dk, dv, tokens_first(more[0].reshape(B, G * R, N), o.k_levels) if more else None


def tokens_first(x: Array, like: Array) -> Array:
    """`[B, H, L]` as `[B, L, G, R]`."""
    return jnp.swapaxes(x, 1, 2).reshape(like.shape)


_flash.defvjp(forward, backward)


def flash(form: Form, o: Operands, interpret: bool = False) -> tuple[Array, Array]:
    """Output `[B, L, G, R, V]` and log-sum-exp `[B, L, G, R]`; `interpret` runs it anywhere, slowly."""
    L, M, V = o.q.shape[1], o.k.shape[1], o.v.shape[-1]
    tiles = shapes(form, o).values()
    queries, keys = (math.lcm(*(getattr(shape, side) for shape in tiles)) for side in "lm")

    def longer(x: Array | None, multiple: int) -> Array | None:
        return None if x is None else jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))

    def filled(x: Array) -> Array:
        """Channels of zeros up to a power of two."""
        dim = max(16, 2 ** math.ceil(math.log2(x.shape[-1])))
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, dim - x.shape[-1])])

    by_query = {name: longer(getattr(o, name), queries) for name in ("q_positions", "q_segments", "q_levels")}
    by_key = {name: longer(getattr(o, name), keys) for name in ("k_positions", "k_segments", "k_levels")}
    o = o.replace(q=longer(filled(o.q), queries), k=longer(filled(o.k), keys), v=longer(filled(o.v), keys))
    numbers = jax.tree.map(lambda x: x.astype(jnp.float32), (o.bias, o.sinks))
    o = o.replace(bias=numbers[0], sinks=numbers[1], **by_query, **by_key)
    out, lse = _flash(form, M, interpret, o)
    return out[:, :L, ..., :V], lse[:, :L]
