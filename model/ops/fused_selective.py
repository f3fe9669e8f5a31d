"""Mamba's selective scan in kernels for NVIDIA GPUs: states live in registers, one token after another.

    h_t = keep_t e^{dt_t A} h_{t-1} + dt_t x_t B_t        y_t = C_t h_t

A program takes some channels of a part of the row. Where rows are too few to fill the chip they are parted, and a first
kernel finds the state that each part would leave of nothing. Only states at the first token of every chunk are kept;
the backward pass makes those in between anew, a chunk at a time from its end, and its sums over channels are added up
afterwards, in one order. Letters beside the project's own: P parts, Q tokens of a chunk, F of E channels a program.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from model import placement
from model.ops.decays import filled
from model.ops.fused_state import Refs, launch

Array = jax.Array


class Shape(NamedTuple):
    """Of a kernel's work."""

    F: int  # channels of a program
    U: int  # tokens that are fetched, and then run through, together
    programs: int  # that fill a chip


# Where a program for each row fills the chip, and where rows are parted. Tuned on an H200, for 8 rows of 2,048 tokens
# and one of 65,536, both of 2,048 channels of 16 numbers.
OUT = {"whole": Shape(16, 8, 1024), "parted": Shape(32, 2, 4096)}
BACK = {"whole": Shape(16, 4, 1024), "parted": Shape(32, 2, 2048)}
Q = 64  # tokens of a chunk
PARAMS = (1, 1)  # warps and stages
LOG2_E = math.log2(math.e)


def walk(n: int, fetch: Callable[[Any], Any], step: Callable, carry: Any) -> Any:
    """A loop that asks for what its next round needs before it works on what this one does."""

    def body(i, both):
        carry, now = both
        later = fetch(jnp.minimum(i + 1, n - 1))
        return step(i, now, carry), later

    return lax.fori_loop(0, n, body, (carry, fetch(0)))[0]


def fetched(see: Refs, first: Array, names: tuple[str, ...], shape: Shape) -> list[dict[str, Array]]:
    """The next U tokens. All are asked for before the first is waited for."""

    def token(t: Array) -> dict[str, Array]:
        rows = {name: see[name][t, :] for name in names}
        return rows | ({"keep": see["keep"][t]} if "keep" in see else {})

    return [token(first + i) for i in range(shape.U)]


def wide(token: dict[str, Array]) -> dict[str, Array]:
    """A token's numbers in float32; B and C down the numbers of a state."""
    token = {name: leaf.astype(jnp.float32) for name, leaf in token.items()}
    return token | {name: token[name][:, None] for name in "BC" if name in token}


def decay(A: Array, token: dict[str, Array]) -> Array:
    """What a token leaves of the state before it, `[N, F]`; A in units of log 2."""
    left = jnp.exp2(token["dt"][None, :] * A)
    return left * token["keep"] if "keep" in token else left


def stepped(a: Array, h: Array, token: dict[str, Array]) -> Array:
    return a * h + (token["dt"] * token["x"])[None, :] * token["B"]


def outputs_kernel(see: Refs, *made, tokens: int, out: bool, shape: Shape):
    """Through a part. x, dt: [L / P, F]; B, C: [L / P, N]; A, start: [N, F]. With `out`, y as x and the state at every
    chunk; last the state at the end."""
    A, end, U = see["A"][...], made[-1], shape.U
    names = ("x", "dt", "B", "C") if out else ("x", "dt", "B")

    def chunk(c, h):
        if out:
            made[1][c, :, :] = h

        def some(i, found, h):
            for t, token in enumerate(map(wide, found)):
                h = stepped(decay(A, token), h, token)
                if out:
                    made[0][c * Q + i * U + t, :] = jnp.sum(h * token["C"], axis=0).astype(made[0].dtype)
            return h

        return walk(Q // U, lambda i: fetched(see, c * Q + i * U, names, shape), some, h)

    start = see["start"][...] if "start" in see else jnp.zeros(A.shape, jnp.float32)
    end[...] = lax.fori_loop(0, tokens // Q, chunk, start)


def adjoints_kernel(see: Refs, start, *, tokens: int, shape: Shape):
    """What a part hands back to the state before it, were nothing behind it. dy: [L / P, F]; start: [N, F]."""
    A, U = see["A"][...], shape.U

    def some(i, found, g):
        for token in map(wide, reversed(found)):
            g = decay(A, token) * (g + token["C"] * token["dy"][None, :])
        return g

    def fetch(i):
        return fetched(see, tokens - (i + 1) * U, ("dt", "C", "dy"), shape)

    start[...] = walk(tokens // U, fetch, some, jnp.zeros(A.shape, jnp.float32))


def gradients_kernel(see: Refs, dx, d_dt, dB, dC, dA, start, scratch, *, tokens: int, shape: Shape):
    """As `outputs_kernel`, with dy: [L / P, F]; states: [L / P / Q, N, F]; end: [N, F], of the state behind the part.

    scratch: [Q / U, N, F], the states of the chunk at hand.
    """
    A, U = see["A"][...], shape.U
    names = ("x", "dt", "B", "C", "dy")

    def chunk(c, carry):
        c = tokens // Q - 1 - c

        def ahead(i, found, h):
            scratch[i, :, :] = h
            for token in map(wide, found):
                h = stepped(decay(A, token), h, token)
            return h

        def fetch(i):
            return fetched(see, c * Q + i * U, ("x", "dt", "B"), shape)

        walk(Q // U, fetch, ahead, see["states"][c, :, :])

        def back(i, found, carry):
            g, dA = carry
            i = Q // U - 1 - i
            first = c * Q + i * U
            some = list(map(wide, found))
            h, known = scratch[i, :, :], []
            for token in some:
                a = decay(A, token)
                known.append((a, h))
                h = stepped(a, h, token)
            for t in reversed(range(U)):
                token, (a, before) = some[t], known[t]
                x, dt, B, dy = (token[name] for name in ("x", "dt", "B", "dy"))
                g = g + token["C"] * dy[None, :]
                dC[first + t, :] = jnp.sum(h * dy[None, :], axis=1)
                dB[first + t, :] = jnp.sum(g * (dt * x)[None, :], axis=1)
                by_input = jnp.sum(g * B, axis=0)
                g = g * a
                by_rate = g * before
                dx[first + t, :] = (dt * by_input).astype(dx.dtype)
                d_dt[first + t, :] = (x * by_input + jnp.sum(by_rate * A, axis=0) / LOG2_E).astype(d_dt.dtype)
                dA += by_rate * dt[None, :]
                h = before
            return g, dA

        def fetch_back(i):
            return fetched(see, c * Q + (Q // U - 1 - i) * U, names, shape)

        return walk(Q // U, fetch_back, back, carry)

    zero = jnp.zeros(A.shape, jnp.float32)
    g, found = lax.fori_loop(0, tokens // Q, chunk, (see["end"][...] if "end" in see else zero, zero))
    start[...], dA[...] = g, found


# What a program of the grid (channels, parts, rows) sees


def by_channel(tokens: int, F: int) -> pl.BlockSpec:
    """Of `[B, L, E]`."""
    return pl.BlockSpec((None, tokens, F), lambda e, p, b: (b, p, e))


def by_number(tokens: int, N: int) -> pl.BlockSpec:
    """Of `[B, L, N]`."""
    return pl.BlockSpec((None, tokens, N), lambda e, p, b: (b, p, 0))


def of_part(F: int, *sizes: int) -> pl.BlockSpec:
    """Of `[B, P, ..., E]`."""
    return pl.BlockSpec((None, None, *sizes, F), lambda e, p, b: (b, p, *[0] * len(sizes), e))


def seen(given: dict[str, Array | None], tokens: int, F: int) -> dict[str, tuple[Array | None, pl.BlockSpec]]:
    N = given["A"].shape[0]
    blocks = dict.fromkeys(("x", "dt", "dy"), by_channel(tokens, F)) | dict.fromkeys("BC", by_number(tokens, N))
    blocks |= dict.fromkeys(("start", "end"), of_part(F, N))
    blocks["A"] = pl.BlockSpec((N, F), lambda e, p, b: (0, e))
    blocks["keep"] = pl.BlockSpec((None, tokens), lambda e, p, b: (b, p))
    blocks["states"] = of_part(F, tokens // Q, N)
    return {name: (array, blocks[name]) for name, array in given.items()}


def carried(ends: Array, left: Array, start: Array, reverse: bool = False) -> tuple[Array, Array]:
    """The states before each part, and behind the last; in reverse, from the end. All but start: [B, P, N, E]."""

    def step(h, part):
        end, left = part
        return left * h + end, h

    last, before = lax.scan(step, start, (jnp.moveaxis(ends, 1, 0), jnp.moveaxis(left, 1, 0)), reverse=reverse)
    return jnp.moveaxis(before, 0, 1), last


def left_of_parts(dt: Array, A: Array, keep: Array | None, P: int) -> Array:
    """What each part leaves of the state before it, `[B, P, N, E]`; A: [N, E], in units of log 2."""
    B, _, E = dt.shape
    left = jnp.exp2(jnp.sum(dt.reshape(B, P, -1, E), axis=2, dtype=jnp.float32)[:, :, None] * A)
    return left if keep is None else left * jnp.min(keep.reshape(B, P, -1), axis=2)[..., None, None]


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def fused(x, dt, A, B, C, h0, keep, P: int | None, interpret: bool) -> tuple[Array, Array]:
    """As `fused_selective`, for whole chunks in each of P parts; A: [N, E], in units of log 2; h0: [B, N, E]; keep is a
    number."""
    return fused_forward(x, dt, A, B, C, h0, keep, P, interpret)[0]


def fused_forward(x, dt, A, B, C, h0, keep, P, interpret):
    (rows, L, E), N = x.shape, A.shape[0]
    P, shape = cut(rows, L, E, OUT, P)
    F = shape.F
    tokens, grid = L // P, (E // F, P, rows)
    given = dict(x=x, dt=dt, A=A, B=B, keep=keep)
    end = (struct(rows, P, N, E), of_part(F, N))
    starts = h0[:, None]
    if P > 1:
        kernel = partial(outputs_kernel, tokens=tokens, out=False, shape=shape)
        (ends,) = launch(kernel, "selective_ends", grid, seen(given, tokens, F), [end], PARAMS, interpret)
        starts, _ = carried(ends, left_of_parts(dt, A, keep, P), h0)
    made = [
        (struct(*x.shape, dtype=x.dtype), by_channel(tokens, F)),
        (struct(rows, P, tokens // Q, N, E), of_part(F, tokens // Q, N)),
        end,
    ]
    kernel = partial(outputs_kernel, tokens=tokens, out=True, shape=shape)
    given |= dict(C=C, start=starts)
    y, states, ends = launch(kernel, "selective_outputs", grid, seen(given, tokens, F), made, PARAMS, interpret)
    return (y, ends[:, -1]), (x, dt, A, B, C, keep, states)


def fused_backward(P, interpret, saved, grads):
    x, dt, A, B, C, keep, states = saved
    dy, dh = grads
    (rows, L, E), N = x.shape, A.shape[0]
    P, shape = cut(rows, L, E, BACK, P)
    F = shape.F
    tokens, grid = L // P, (E // F, P, rows)
    given = dict(dt=dt, A=A, C=C, dy=dy, keep=keep)
    part = (struct(rows, P, N, E), of_part(F, N))
    ends = dh[:, None]
    if P > 1:
        kernel = partial(adjoints_kernel, tokens=tokens, shape=shape)
        (starts,) = launch(kernel, "selective_adjoints", grid, seen(given, tokens, F), [part], PARAMS, interpret)
        ends, _ = carried(starts, left_of_parts(dt, A, keep, P), dh, reverse=True)
    sums = pl.BlockSpec((None, None, tokens, N), lambda e, p, b: (e, b, p, 0))
    made = [
        (struct(*x.shape, dtype=x.dtype), by_channel(tokens, F)),
        (struct(*x.shape, dtype=dt.dtype), by_channel(tokens, F)),
        (struct(E // F, rows, L, N), sums),
        (struct(E // F, rows, L, N), sums),
        part,
        part,
        (struct(rows, P, Q // shape.U, N, E), of_part(F, Q // shape.U, N)),
    ]
    kernel = partial(gradients_kernel, tokens=tokens, shape=shape)
    given |= dict(x=x, B=B, states=states.reshape(rows, P, -1, N, E), end=ends)
    dx, d_dt, dB, dC, dA, starts, _ = launch(
        kernel, "selective_gradients", grid, seen(given, tokens, F), made, PARAMS, interpret
    )
    dB, dC = (jnp.sum(parts, axis=0).astype(like.dtype) for parts, like in ((dB, B), (dC, C)))
    return dx, d_dt, jnp.sum(dA, axis=(0, 1)) / LOG2_E, dB, dC, starts[:, 0], None


fused.defvjp(fused_forward, fused_backward)


def cut(rows: int, L: int, E: int, shapes: dict[str, Shape], P: int | None) -> tuple[int, Shape]:
    """How many parts rows are cut into, as many as fill the chip, of a few whole chunks each; and a kernel's shape."""
    whole, parted = shapes["whole"], shapes["parted"]
    if P == 1 or (P is None and rows * E // whole.F >= whole.programs):
        return 1, whole
    if P is None:
        P = 1
        while rows * P * E // parted.F < parted.programs and L % (2 * P * Q) == 0 and L // (2 * P) >= 8 * Q:
            P *= 2
    return P, parted


def most_parts(L: int) -> int:
    """Parts that a row of this length is filled up for; that makes it longer by a sixteenth at most."""
    P = 1
    while L >= 32 * P * Q and P < 64:
        P *= 2
    return P


def fused_selective(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    h0: Array,
    keep: Array | None = None,
    P: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Outputs `[B, L, E]` in x's dtype, and the last state, `[B, E, N]`.

    x, dt: [B, L, E]; A: [E, N]; B, C: [B, L, N]; h0: [B, E, N], wide; keep: [B, L], false where the past is forgotten.
    32 must divide E, and N be a power of two.
    """
    (rows, L, E), f = x.shape, jnp.float32
    (r,), (e,) = (placement.spec([name], [size]) for name, size in (("batch", rows), ("inner", E)))

    def whole(leaf: Array, value: float = 0) -> Array:
        """With tokens that leave the state as it was."""
        return filled(leaf, (P or most_parts(L)) * Q, value=value)

    tokens, row = PartitionSpec(r, None, e), PartitionSpec(r)
    in_specs = (tokens, tokens, PartitionSpec(None, e), row, row, PartitionSpec(r, None, e), row)
    run = placement.on_each_device(
        lambda *given: fused(*given, P, interpret), in_specs, (tokens, PartitionSpec(r, None, e))
    )
    given = (whole(leaf) for leaf in (x, dt))
    keep = None if keep is None else whole(keep.astype(f), 1)
    y, h = run(*given, A.T.astype(f) * LOG2_E, whole(B), whole(C), jnp.swapaxes(h0, 1, 2).astype(f), keep)
    return y[:, :L], jnp.swapaxes(h, 1, 2).astype(h0.dtype)
