"""A short convolution and SiLU in kernels for NVIDIA GPUs: every number is read about once, which is all it costs.

    y_t = silu(bias + sum_w kernel_w x_{t-W+1+w})

A program takes some channels of a tile of tokens, one token after another, with the few before it in registers. The
backward pass makes what is activated anew, and looks as far beyond its tile as tokens there look back into it; what
each tile adds to the gradients of kernel and bias is added up afterwards, in one order. Letters beside the project's
own: W taps, F of E channels a program, T tokens of a tile, P tiles.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from model import placement
from model.ops.fused_selective import walk
from model.ops.fused_state import Refs, launch

Array = jax.Array
Rows = tuple[Array, ...]  # of a program's channels, [F] each, the oldest token's first


class Shape(NamedTuple):
    """Of a kernel's work."""

    T: int  # tokens of a tile
    U: int  # of these, fetched together


OUT, BACK = Shape(64, 8), Shape(64, 4)
FETCHED = 512  # bytes of a token that a program, which is one warp, asks for at once: 16 a thread
PARAMS = (1, 1)  # warps and stages


class Tile(NamedTuple):
    """Where a program stands."""

    first: Array  # its first token
    L: int  # tokens of a row
    there: Array | None  # which of its channels there are, [F]; None: all of them

    def mask(self, F: int, when: Array | None) -> Array | None:
        """Of the channels there are, all or none."""
        if when is None:
            return self.there
        return jnp.broadcast_to(when, (F,)) if self.there is None else self.there & when

    def read(self, ref: Any, *at: Any, when: Array | None = None, other: Array | float = 0) -> Array:
        """A row of channels."""
        mask, ref = self.mask(ref.shape[-1], when), ref.at[(*map(jnp.int32, at), slice(None))]
        return ref[...] if mask is None else triton.load(ref, mask=mask, other=other)

    def write(self, ref: Any, at: Any, row: Array, when: Array | None = None) -> None:
        mask = self.mask(row.shape[-1], when)
        row, ref = row.astype(ref.dtype), ref.at[jnp.int32(at), :]
        if mask is None:
            ref[...] = row
        else:
            triton.store(ref, row, mask=mask)

    def token(self, see: Refs, t: Array, names: tuple[str, ...]) -> dict[str, Array]:
        """As it lies in memory: to widen a number is to wait for it."""
        t = jnp.minimum(t, self.L - 1)
        found = {name: self.read(see[name], t) for name in names}
        return found | ({"reach": see["reach"][t]} if "reach" in see else {})

    def before(self, see: Refs, W: int) -> Rows:
        """The W-1 tokens before the tile: those of the past, before the first."""
        rows = []
        for i in range(W - 1):
            here = self.read(see["x"], jnp.maximum(self.first - (W - 1) + i, 0))
            rows.append(wide(jnp.where(self.first == 0, self.read(see["past"], i), here)))
        return tuple(rows)


def wide(row: Array) -> Array:
    return row.astype(jnp.float32)


def this_tile(see: Refs, T: int, E: int) -> Tile:
    L, F = see["x"].shape
    there = None if E % F == 0 else pl.program_id(0) * F + jnp.arange(F) < E
    return Tile(pl.program_id(1) * T, L, there)


def within(found: dict[str, Array], rows: Rows) -> Rows:
    """What a token sees, or gives back, of W rows, the last of them its own: nothing beyond its reach."""
    if "reach" not in found:
        return rows
    back = range(len(rows) - 1, 0, -1)
    return *(jnp.where(found["reach"] >= n, row, 0.0) for n, row in zip(back, rows, strict=False)), rows[-1]


def total(seen: Rows, taps: Rows, bias: Array) -> Array:
    return sum((row * tap for row, tap in zip(seen, taps, strict=True)), bias)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def outputs_kernel(see: Refs, y, *, E: int, shape: Shape):
    """x: [L, F]; past: [W-1, F]; kernel: [W, F]; bias: [F]; reach: [L]; y: [T, F]."""
    W, (T, U) = see["kernel"].shape[0], shape
    tile = this_tile(see, T, E)
    taps, bias = tuple(tile.read(see["kernel"], w) for w in range(W)), tile.read(see["bias"])

    def fetch(i):
        return [tile.token(see, tile.first + i * U + u, ("x",)) for u in range(U)]

    def some(i, found, rows):
        for u, token in enumerate(found):
            rows = (*rows, wide(token["x"]))
            sums = total(within(token, rows), taps, bias)
            t = i * U + u
            tile.write(y, t, sums * sigmoid(sums), None if tile.L % T == 0 else tile.first + t < tile.L)
            rows = rows[1:]
        return rows

    walk(T // U, fetch, some, tile.before(see, W))


def gradients_kernel(see: Refs, dx, d_past, d_weights, *, E: int, shape: Shape):
    """As `outputs_kernel`, with dy: [L, F]; dx: [T, F]; d_past: [W-1, F]; d_weights: [W+1, F], the bias's last."""
    W, (T, U) = see["kernel"].shape[0], shape
    tile = this_tile(see, T, E)
    taps, bias = tuple(tile.read(see["kernel"], w) for w in range(W)), tile.read(see["bias"])

    def step(t, found, carry):
        """The tokens before the next one, what is known of their gradients, and that of the last whose is complete."""
        before, grads, sums = carry
        rows = (*before, wide(found["x"]))
        seen = within(found, rows)
        pre = total(seen, taps, bias)
        s = sigmoid(pre)
        d = jnp.where(t < tile.L, wide(found["dy"]) * s * (1 + pre * (1 - s)), 0.0)
        own = jnp.where(t < tile.first + T, d, 0.0)
        sums = *(a + own * row for a, row in zip(sums, seen, strict=False)), sums[-1] + own
        given = within(found, tuple(d * tap for tap in taps))
        complete, *grads = (a + b for a, b in zip((*grads, 0.0), given, strict=True))
        return (rows[1:], tuple(grads), sums), complete

    def fetched(t):
        return tile.token(see, t, ("x", "dy"))

    zero = jnp.zeros_like(bias)
    carry = tile.before(see, W), (zero,) * (W - 1), (zero,) * (W + 1)
    for i in range(W - 1):  # which complete those before the tile
        carry, complete = step(tile.first + i, fetched(tile.first + i), carry)
        tile.write(d_past, i, complete, tile.first == 0)

    def fetch(i):
        return [fetched(tile.first + W - 1 + i * U + u) for u in range(U)]

    def some(i, found, carry):
        for u, token in enumerate(found):
            t = i * U + u
            carry, complete = step(tile.first + W - 1 + t, token, carry)
            tile.write(dx, t, complete, None if tile.L % T == 0 else tile.first + t < tile.L)
        return carry

    _, _, sums = walk(T // U, fetch, some, carry)
    for w, row in enumerate(sums):
        tile.write(d_weights, w, row)


def channels(x: Array) -> int:
    """Of a program: F."""
    return min(FETCHED // x.dtype.itemsize, pl.next_power_of_2(x.shape[-1]))


def seen(given: dict[str, Array | None], W: int) -> dict[str, tuple[Array | None, pl.BlockSpec]]:
    """What a program of the grid (channels, tiles, rows) sees: whole rows, of its channels."""
    L, F = given["x"].shape[1], channels(given["x"])
    blocks = dict.fromkeys(("x", "dy"), pl.BlockSpec((None, L, F), lambda e, p, b: (b, 0, e)))
    blocks["past"] = pl.BlockSpec((None, W - 1, F), lambda e, p, b: (b, 0, e))
    blocks["kernel"] = pl.BlockSpec((W, F), lambda e, p, b: (0, e))
    blocks["bias"] = pl.BlockSpec((F,), lambda e, p, b: (e,))
    blocks["reach"] = pl.BlockSpec((None, L), lambda e, p, b: (b, 0))
    return {name: (array, blocks[name]) for name, array in given.items()}


def grid_of(x: Array, T: int) -> tuple[int, int, int]:
    rows, L, E = x.shape
    return pl.cdiv(E, channels(x)), pl.cdiv(L, T), rows


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def fused(x, kernel, bias, past, reach, interpret: bool) -> Array:
    return fused_forward(x, kernel, bias, past, reach, interpret)[0]


def fused_forward(x, kernel, bias, past, reach, interpret):
    given = dict(x=x, kernel=kernel, bias=bias, past=past, reach=reach)
    made = [(jax.ShapeDtypeStruct(x.shape, x.dtype), of_tile(OUT.T, channels(x)))]
    run = partial(outputs_kernel, E=x.shape[-1], shape=OUT)
    (y,) = launch(run, "conv_outputs", grid_of(x, OUT.T), seen(given, len(kernel)), made, PARAMS, interpret)
    return y, (x, kernel, bias, past, reach)


def fused_backward(interpret, saved, dy):
    x, kernel, bias, past, reach = saved
    W, F, grid = len(kernel), channels(x), grid_of(x, BACK.T)
    rows, _, E = x.shape
    given = dict(x=x, kernel=kernel, bias=bias, past=past, reach=reach, dy=dy)
    made = [
        (jax.ShapeDtypeStruct(x.shape, x.dtype), of_tile(BACK.T, F)),
        (jax.ShapeDtypeStruct(past.shape, past.dtype), pl.BlockSpec((None, W - 1, F), lambda e, p, b: (b, 0, e))),
        (
            jax.ShapeDtypeStruct((rows, grid[1], W + 1, E), jnp.float32),
            pl.BlockSpec((None, None, W + 1, F), lambda e, p, b: (b, p, 0, e)),
        ),
    ]
    run = partial(gradients_kernel, E=E, shape=BACK)
    dx, d_past, parts = launch(run, "conv_gradients", grid, seen(given, W), made, PARAMS, interpret)
    sums = jnp.sum(parts, axis=(0, 1))
    return dx, sums[:W].astype(kernel.dtype), sums[W].astype(bias.dtype), d_past, None


fused.defvjp(fused_forward, fused_backward)


def of_tile(T: int, F: int) -> pl.BlockSpec:
    """Of `[B, L, E]`."""
    return pl.BlockSpec((None, T, F), lambda e, p, b: (b, p, e))


def fused_conv_silu(
    x: Array, kernel: Array, bias: Array, past: Array, reach: Array | None = None, interpret: bool = False
) -> Array:
    """As `model.ops.conv.short_conv_silu` of rows without padding, in x's dtype."""
    (rows, _, E), f = x.shape, jnp.float32
    (r,), (e,) = (placement.spec([name], [size]) for name, size in (("batch", rows), ("inner", E)))
    tokens = PartitionSpec(r, None, e)
    in_specs = (tokens, PartitionSpec(None, e), PartitionSpec(e), tokens, PartitionSpec(r))
    run = placement.on_each_device(lambda *given: fused(*given, interpret), in_specs, tokens)
    return run(x, kernel.astype(f), bias.astype(f), past.astype(x.dtype), reach)
