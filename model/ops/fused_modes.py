"""The selective scan of complex modes in kernels for NVIDIA GPUs: states live in registers, one token after another.

    h_t = keep_t e^{dt_t A} h_{t-1} + (e^{dt_t A} - 1) (B_t + bias) x_t        y_t = Re C_t h_t

As the kernels of Mamba's scan, whose plan and letters these share, but that a block of channels has its own B and C.
Instructions bound them, so a token moves, by `e^{dt A} - 1`, what is left of the past and what it brings as one.
Complex numbers are pairs of real ones, and so are their gradients, by either part: to the factor `b` of `a b` the
gradient g hands `conj(a) g`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from model import placement
from model.ops.decays import filled
from model.ops.fused_selective import PARAMS, Q, Shape, by_channel, carried, cut, most_parts, of_part, struct, walk
from model.ops.fused_state import Refs, launch

Array = jax.Array

F = 4  # channels of a program, all of one block
# Tuned on an H200, for 32 rows of 4,096 tokens and 8 blocks of 21 channels of 32 numbers.
OUT = {"whole": Shape(F, 4, 1024), "parted": Shape(F, 4, 4096)}
BACK = {"whole": Shape(F, 2, 1024), "parted": Shape(F, 2, 4096)}
# Of sqrt(2) sin(pi r) / r and sqrt(2) cos(pi r) in r^2, for |r| <= 1/2: within 8e-8 of either.
SIN = (4.442883, -7.3082561, 3.6065474, -0.8472852, 0.11208702)
COS = (1.4142135, -6.9788532, 5.7394929, -1.8837281, 0.31098354)
# Of (2^r - 1) / r, for |r| <= NEAR: within 1e-7 of it.
LESS = (0.6931472, 0.2402256, 0.05550425, 0.00964486, 0.00133393)
NEAR = 3 / 8


class Pair(NamedTuple):
    """A complex number."""

    re: Any
    im: Any


def of(ref: Any, *place: Any) -> Pair:
    """Of an array that has both parts in front of the last two axes, or of the last."""
    return Pair(ref[(*place, 0, ...)], ref[(*place, 1, ...)])


def put(ref: Any, value: Pair, *place: Any) -> None:
    ref[(*place, 0, ...)], ref[(*place, 1, ...)] = value


def put_rows(ref: Any, first: Array, rows: list[Array]) -> None:
    """U rows `[F]`, all at once: a sum over modes has to be laid out anew before it is written."""
    U = len(rows)
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [jnp.stack(pair, axis=-1) for pair in zip(rows[:half], rows[half:], strict=True)]
    ref[pl.ds(first, U), :] = rows[0].reshape(-1, U).T


def plus(a: Pair, b: Pair) -> Pair:
    return Pair(a.re + b.re, a.im + b.im)


def scaled(a: Pair, by: Array | float) -> Pair:
    return Pair(a.re * by, a.im * by)


def plus_product(h: Pair, a: Pair, b: Pair) -> Pair:
    """`h + a b`, in an order of which every product is added as it is made."""
    return Pair(h.re + a.re * b.re - a.im * b.im, h.im + a.re * b.im + a.im * b.re)


def handed(a: Pair, g: Pair) -> Pair:
    """`conj(a) g`."""
    return Pair(a.re * g.re + a.im * g.im, a.re * g.im - a.im * g.re)


def zero(like: Pair) -> Pair:
    return Pair(jnp.zeros_like(like.re), jnp.zeros_like(like.im))


class Token(NamedTuple):
    """What the kernels see of one; None where they do not ask for it."""

    dt: Array  # [F]
    x: Array | None  # [F]
    B: Pair | None  # [N, 1]
    C: Array | None  # [N, 1]
    dy: Array | None  # [F]
    keep: Array | float


def fetched(see: Refs, first: Array, names: str, U: int) -> list[dict[str, Any]]:
    """The next U tokens. All are asked for before the first is waited for."""

    def token(t: Array) -> dict[str, Any]:
        rows = {name: see[name][t, :] for name in ("dt", *names.split()) if name != "B"}
        pair = {"B": of(see["B"], t)} if "B" in names else {}
        return rows | pair | ({"keep": see["keep"][t]} if "keep" in see else {})

    return [token(first + i) for i in range(U)]


def laid(found: dict[str, Any]) -> Token:
    """With B and C down the modes."""
    down = {name: jax.tree.map(lambda leaf: leaf[:, None], found[name]) for name in "BC" if name in found}
    return Token(**dict.fromkeys(("x", "B", "C", "dy")) | {"keep": 1.0} | found | down)


def polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """The first coefficient is that of 1."""
    value = coefficients[-1]
    for one in coefficients[-2::-1]:
        value = value * x + one
    return value


def far(units: Pair, token: Token) -> Pair:
    """`e^{dt A} - 1`, `[N, F]`, exact where it is little too; A in units of log 2 and of turns.

    Only products of the sine and the cosine of half the angle matter, and half a turn leaves them as they are: so it is
    taken between quarters of a turn, where polynomials will do. The library's functions, which are ready for any angle,
    take many more instructions.
    """
    rate, turns = token.dt[None, :] * units.re, token.dt[None, :] * units.im
    rest = turns - jnp.floor(turns + 0.5)  # of half turns of half the angle
    square, size = rest * rest, jnp.exp2(rate)
    sin, cos = rest * polynomial(SIN, square), polynomial(COS, square)
    less = jnp.where(jnp.abs(rate) < NEAR, rate * polynomial(LESS, rate), size - 1)
    part = size * sin
    return Pair(less - part * sin, part * cos)


def stepped(h: Pair, by: Pair, bias: Pair, token: Token) -> tuple[Pair, Pair]:
    """The state behind a token that moves it so far, and what it moved."""
    kept = scaled(h, token.keep)
    moved = plus(kept, scaled(plus(token.B, bias), token.x[None, :]))
    return plus_product(kept, by, moved), moved


def constants(see: Refs) -> tuple[Pair, Pair, Pair]:
    """A: [N, 1]; the same in units of log 2 and of turns; bias: [N, F]."""
    A = Pair(*(leaf[:, None] for leaf in of(see["A"])))
    return A, Pair(A.re / math.log(2), A.im / (2 * math.pi)), of(see["bias"])


def outputs_kernel(see: Refs, *made, tokens: int, out: bool, shape: Shape):
    """Through a part. x, dt: [L / P, F]; B: [L / P, 2, N]; C: [L / P, N]; start: [2, N, F]. With `out`, y as x and the
    state at every chunk; last the state at the end."""
    (_, units, bias), end, U = constants(see), made[-1], shape.U
    names = "x B C" if out else "x B"

    def chunk(c, h):
        if out:
            put(made[1], h, c)

        def some(i, found, h):
            y = []
            for token in map(laid, found):
                h, _ = stepped(h, far(units, token), bias, token)
                y += [jnp.sum(h.re * token.C, axis=0)] if out else []
            if out:
                put_rows(made[0], c * Q + i * U, y)
            return h

        return walk(Q // U, lambda i: fetched(see, c * Q + i * U, names, U), some, h)

    start = of(see["start"]) if "start" in see else zero(bias)
    put(end, lax.fori_loop(0, tokens // Q, chunk, start))


def adjoints_kernel(see: Refs, start, *, tokens: int, shape: Shape):
    """What a part hands back to the state before it, were nothing behind it. dy: [L / P, F]; start: [2, N, F]."""
    (_, units, bias), U = constants(see), shape.U

    def some(i, found, g):
        for token in map(laid, reversed(found)):
            g = Pair(g.re + token.C * token.dy[None, :], g.im)
            g = scaled(plus(g, handed(far(units, token), g)), token.keep)
        return g

    put(start, walk(tokens // U, lambda i: fetched(see, tokens - (i + 1) * U, "C dy", U), some, zero(bias)))


def gradients_kernel(see: Refs, dx, d_dt, dB, dC, dA, d_bias, start, scratch, *, tokens: int, shape: Shape):
    """As `outputs_kernel`, with dy: [L / P, F]; states: [L / P / Q, 2, N, F]; end: [2, N, F], of the state behind the
    part. scratch: [Q / U, 2, N, F], the states of the chunk at hand."""
    (A, units, bias), U = constants(see), shape.U

    def chunk(c, carry):
        c = tokens // Q - 1 - c

        def ahead(i, found, h):
            put(scratch, h, i)
            for token in map(laid, found):
                h, _ = stepped(h, far(units, token), bias, token)
            return h

        walk(Q // U, lambda i: fetched(see, c * Q + i * U, "x B", U), ahead, of(see["states"], c))

        def back(i, found, carry):
            g, dA, d_bias = carry
            i = Q // U - 1 - i
            first, some = c * Q + i * U, list(map(laid, found))
            h, known = of(scratch, i), []
            for t, token in enumerate(some):
                by = far(units, token)
                h, moved = stepped(h, by, bias, token)
                known.append((by, moved))
                dC[first + t, :] = jnp.sum(h.re * token.dy[None, :], axis=1)
            by_x, by_dt = [], []
            for t in reversed(range(U)):
                token, (by, moved), weight = some[t], known[t], plus(some[t].B, bias)
                g = Pair(g.re + token.C * token.dy[None, :], g.im)
                by_input = handed(by, g)
                before = plus(g, by_input)  # `conj(e^{dt A}) g`
                by_x.insert(0, jnp.sum(weight.re * by_input.re + weight.im * by_input.im, axis=0))
                by_weight = scaled(by_input, token.x[None, :])
                put(dB, Pair(*(jnp.sum(leaf, axis=1) for leaf in by_weight)), first + t)
                by_log = handed(moved, before)
                by_dt.insert(0, jnp.sum(by_log.re * A.re + by_log.im * A.im, axis=0))
                dA, d_bias = plus(dA, scaled(by_log, token.dt[None, :])), plus(d_bias, by_weight)
                g = scaled(before, token.keep)
            put_rows(dx, first, by_x)
            put_rows(d_dt, first, by_dt)
            return g, dA, d_bias

        def fetch(i):
            return fetched(see, c * Q + (Q // U - 1 - i) * U, "x B C dy", U)

        return walk(Q // U, fetch, back, carry)

    g = of(see["end"]) if "end" in see else zero(bias)
    found = lax.fori_loop(0, tokens // Q, chunk, (g, zero(bias), zero(bias)))
    for ref, value in zip((start, dA, d_bias), found, strict=True):
        put(ref, value)


# What a program of the grid (channels, parts, rows) sees


def by_block(tokens: int, programs: int, *sizes: int) -> pl.BlockSpec:
    """Of `[B, L, J, ...]`, of whose blocks each has so many programs."""
    return pl.BlockSpec((None, tokens, None, *sizes), lambda e, p, b: (b, p, lax.div(e, programs), *[0] * len(sizes)))


def seen(given: dict[str, Array | None], tokens: int) -> dict[str, tuple[Array | None, pl.BlockSpec]]:
    J, N = given["C" if "C" in given else "B"].shape[2], given["A"].shape[-1]
    programs = given["dt"].shape[-1] // F // J
    blocks = dict.fromkeys(("x", "dt", "dy"), by_channel(tokens, F)) | dict.fromkeys(("start", "end"), of_part(F, 2, N))
    blocks |= {"B": by_block(tokens, programs, 2, N), "C": by_block(tokens, programs, N)}
    blocks["A"] = pl.BlockSpec((2, N), lambda e, p, b: (0, 0))
    blocks["bias"] = pl.BlockSpec((2, N, F), lambda e, p, b: (0, 0, e))
    blocks["keep"] = pl.BlockSpec((None, tokens), lambda e, p, b: (b, p))
    blocks["states"] = of_part(F, tokens // Q, 2, N)
    return {name: (array, blocks[name]) for name, array in given.items()}


def carried_pairs(ends: Array, left: Array, start: Array, reverse: bool = False) -> Array:
    """The states before each part; in reverse, what each is handed from behind. ends: [B, P, 2, N, E]; left: complex,
    [B, P, N, E]; start: [B, 2, N, E]."""
    ends, start = (lax.complex(*jnp.moveaxis(pair, -3, 0)) for pair in (ends, start))
    before, _ = carried(ends, left.conj() if reverse else left, start, reverse)
    return jnp.stack([before.real, before.imag], axis=2)


def left_of_parts(dt: Array, A: Array, keep: Array | None, P: int) -> Array:
    """What each part leaves of the state before it, `[B, P, N, E]`, complex; A: [2, N]."""
    rows, _, E = dt.shape
    left = jnp.exp(jnp.sum(dt.reshape(rows, P, -1, E), axis=2)[:, :, None] * lax.complex(*A)[:, None])
    return left if keep is None else left * jnp.min(keep.reshape(rows, P, -1), axis=2)[..., None, None]


@partial(jax.custom_vjp, nondiff_argnums=(8, 9))
def fused(x, dt, A, B, C, bias, h0, keep, P: int | None, interpret: bool) -> tuple[Array, Array]:
    """As `fused_modes`, for whole chunks in each of P parts, and of blocks that F divides. A: [2, N]; B: [B, L, J, 2,
    N]; bias: [2, N, E]; h0: [B, 2, N, E]; all in float32; keep is a number."""
    return fused_forward(x, dt, A, B, C, bias, h0, keep, P, interpret)[0]


def fused_forward(x, dt, A, B, C, bias, h0, keep, P, interpret):
    (rows, L, E), N = x.shape, A.shape[-1]
    P, shape = cut(rows, L, E, OUT, P)
    tokens, grid = L // P, (E // F, P, rows)
    given = dict(x=x, dt=dt, A=A, B=B, bias=bias, keep=keep)
    end = (struct(rows, P, 2, N, E), of_part(F, 2, N))
    starts = h0[:, None]
    if P > 1:
        kernel = partial(outputs_kernel, tokens=tokens, out=False, shape=shape)
        (ends,) = launch(kernel, "modes_ends", grid, seen(given, tokens), [end], PARAMS, interpret)
        starts = carried_pairs(ends, left_of_parts(dt, A, keep, P), h0)
    made = [
        (struct(*x.shape), by_channel(tokens, F)),
        (struct(rows, P, tokens // Q, 2, N, E), of_part(F, tokens // Q, 2, N)),
        end,
    ]
    kernel = partial(outputs_kernel, tokens=tokens, out=True, shape=shape)
    given |= dict(C=C, start=starts)
    y, states, ends = launch(kernel, "modes_outputs", grid, seen(given, tokens), made, PARAMS, interpret)
    return (y, ends[:, -1]), (x, dt, A, B, C, bias, keep, states)


def fused_backward(P, interpret, saved, grads):
    x, dt, A, B, C, bias, keep, states = saved
    dy, dh = grads
    (rows, L, E), J, N = x.shape, C.shape[2], A.shape[-1]
    P, shape = cut(rows, L, E, BACK, P)
    tokens, grid = L // P, (E // F, P, rows)
    given = dict(dt=dt, A=A, C=C, bias=bias, dy=dy, keep=keep)
    part = (struct(rows, P, 2, N, E), of_part(F, 2, N))
    ends = dh[:, None]
    if P > 1:
        kernel = partial(adjoints_kernel, tokens=tokens, shape=shape)
        (starts,) = launch(kernel, "modes_adjoints", grid, seen(given, tokens), [part], PARAMS, interpret)
        ends = carried_pairs(starts, left_of_parts(dt, A, keep, P), dh, reverse=True)

    def sums(*sizes: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """Over the channels of a program."""
        block = pl.BlockSpec((None, None, tokens, *sizes), lambda e, p, b: (e, b, p, *[0] * len(sizes)))
        return struct(E // F, rows, L, *sizes), block

    made = [
        *[(struct(*x.shape), by_channel(tokens, F))] * 2,
        *[sums(2, N), sums(N)],
        *[part] * 3,
        # Of a program in one piece: it is written and read all the time.
        (
            struct(rows, P, E // F, Q // shape.U, 2, N, F),
            pl.BlockSpec((None, None, None, Q // shape.U, 2, N, F), lambda e, p, b: (b, p, e, 0, 0, 0, 0)),
        ),
    ]
    kernel = partial(gradients_kernel, tokens=tokens, shape=shape)
    given |= dict(x=x, B=B, states=states.reshape(rows, P, -1, 2, N, E), end=ends)
    dx, d_dt, dB, dC, dA, d_bias, starts, _ = launch(
        kernel, "modes_gradients", grid, seen(given, tokens), made, PARAMS, interpret
    )
    dB, dC = (jnp.moveaxis(jnp.sum(found.reshape(J, -1, *found.shape[1:]), axis=1), 0, 2) for found in (dB, dC))
    return dx, d_dt, jnp.sum(dA, axis=(0, 1, 4)), dB, dC, jnp.sum(d_bias, axis=(0, 1)), starts[:, 0], None


fused.defvjp(fused_forward, fused_backward)


def fused_modes(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    bias: Array,
    h0: Array,
    keep: Array | None = None,
    P: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Outputs `[B, L, J, D]` of J blocks of D channels, and the last state, `[B, J, D, N]`.

    x, dt: [B, L, J, D]; A: [N], complex; B: [B, L, J, N], complex; C: [B, L, J, N]; bias: [J, D, N] and h0: [B, J, D,
    N], complex; keep: [B, L], false where the past is forgotten. A step with dt = 0 leaves the state as it was. All is
    in float32, and N a power of two.
    """
    rows, L, J, D = x.shape
    more = -D % F
    r, j = (placement.spec([name], [size])[0] for name, size in (("batch", rows), ("inner", J)))

    def whole(leaf: Array, value: float = 0) -> Array:
        """With tokens that leave the state as it was."""
        return filled(leaf, (P or most_parts(L)) * Q, value=value)

    def channels(leaf: Array) -> Array:
        """With channels that stay empty."""
        return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, more)])

    def numbers(leaf: Array) -> Array:
        """Of `[..., J, D, N]`, complex: `[..., 2, N, J, D]`."""
        parts = jnp.stack([leaf.real, leaf.imag], axis=-4)
        return channels(jnp.moveaxis(parts, -1, -3))

    def run(x, dt, A, B, C, bias, h0, keep):
        """On a device; of its J blocks, channels one after another."""
        flat = partial(lax.collapse, start_dimension=-2)
        y, h = fused(*map(flat, (x, dt)), A, B, C, flat(bias), flat(h0), keep, P, interpret)
        return y.reshape(x.shape), h.reshape(h0.shape)

    tokens, row = PartitionSpec(r, None, j), PartitionSpec(r)
    state, maps = PartitionSpec(r, None, None, j), PartitionSpec(None, None, j)
    run = placement.on_each_device(
        run, (tokens, tokens, PartitionSpec(), tokens, tokens, maps, state, row), (tokens, state)
    )
    B = jnp.stack([B.real, B.imag], axis=-2)
    keep = None if keep is None else whole(keep.astype(x.dtype), 1)
    x, dt = (channels(whole(leaf)) for leaf in (x, dt))
    y, h = run(x, dt, jnp.stack([A.real, A.imag]), whole(B), whole(C), numbers(bias), numbers(h0), keep)
    h = jnp.moveaxis(h[..., :D], -3, -1)  # [B, 2, J, D, N]
    return y[:, :L, :, :D], lax.complex(h[:, 0], h[:, 1])
