"""Diagonal linear recurrences in kernels for NVIDIA GPUs: states live in registers, one token after another.

    h_t = a_t h_{t-1} + b_t

A program takes some channels of a part of the row. Where rows are too few to fill the chip they are parted, and a first
kernel finds what each part does to any state, `h -> left h + added`: through these a program comes to where its own
part begins. The gradient goes the same way from the end: b gets `g_t = dh_t + a_{t+1} g_{t+1}`, and a `g_t h_{t-1}`.
Letters beside the project's own: P parts, T tokens of a part, F of E channels a program, U tokens fetched together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from model import placement
from model.ops.fused_conv import Tile
from model.ops.fused_selective import Shape, by_channel, struct, walk
from model.ops.fused_state import Refs, launch

Array = jax.Array

# Where a program for each row fills the chip, and where rows are parted: six other shapes took 0.98 to 1.05 of the time
# of a million tokens with gradient on an H200.
OUT = {"whole": Shape(32, 32, 128), "parted": Shape(64, 8, 1024)}
BACK = {"whole": Shape(32, 16, 128), "parted": Shape(64, 8, 1024)}
SHORTEST = 128  # tokens of a part, where there are several
PARAMS = (1, 1)  # warps and stages


class Cut(NamedTuple):
    """How work is shared out."""

    P: int
    T: int
    F: int
    U: int


def cut(rows: int, L: int, E: int, shapes: dict[str, Shape], P: int | None) -> Cut:
    """In one part, where that fills the chip, or in as many as do, of no few tokens each."""

    def programs(shape: Shape) -> int:
        return rows * pl.cdiv(E, shape.F)

    whole, parted = shapes["whole"], shapes["parted"]
    if P is None:
        full = programs(whole) >= whole.programs
        P = 1 if full else max(1, min(pl.cdiv(parted.programs, programs(parted)), L // SHORTEST))
    F, U, _ = whole if P == 1 else parted
    T = pl.cdiv(L, P * U) * U
    return Cut(pl.cdiv(L, T), T, min(F, pl.next_power_of_2(E)), U)


class Part(NamedTuple):
    """Where a program stands, and whether it goes back from the end."""

    tile: Tile
    T: int
    U: int
    back: bool

    def here(self, t: Array) -> Array | None:
        """Whether the row has such a token; None: it has all of them."""
        return None if self.tile.L % self.T == 0 else self.tile.first + t < self.tile.L

    def pair(self, see: Refs, t: Array) -> tuple[Array, Array]:
        """A token's a, and its b or what its state gets; behind the row, what leaves a state as it was."""
        here, name = self.here(t), "dh" if self.back else "b"
        return self.tile.read(see["a"], t, when=here, other=1.0), self.tile.read(see[name], t, when=here)

    def through(self, fetch: Callable[[Array], Any], step: Callable, carry: Any) -> Any:
        """`carry = step(t, fetch(t), carry)`, a token after another."""

        def places(i: Array) -> list[Array]:
            first = (self.T // self.U - 1 - i if self.back else i) * self.U
            return [first + u for u in (reversed(range(self.U)) if self.back else range(self.U))]

        def some(i, found, carry):
            for t, numbers in zip(places(i), found, strict=True):
                carry = step(t, numbers, carry)
            return carry

        # All are asked for before the first is waited for.
        return walk(self.T // self.U, lambda i: [fetch(t) for t in places(i)], some, carry)

    def begun(self, see: Refs) -> Array:
        """The state that a part begins with, or that is handed to its end, `[F]`; left, added: [P, F]."""
        start = self.tile.read(see["start"])
        if "left" not in see:
            return start
        P, p, U = see["left"].shape[0], pl.program_id(1), self.U
        n = P - 1 - p if self.back else p

        def effect(j: Array) -> tuple[Array, Array]:
            at = P - 1 - j if self.back else j
            left = self.tile.read(see["left"], at, when=j < n, other=1.0)
            return left, self.tile.read(see["added"], at, when=j < n)

        def some(i, found, h):
            for left, added in found:
                h = left * h + added
            return h

        return walk(lax.div(n + U - 1, U), lambda i: [effect(i * U + u) for u in range(U)], some, start)


def this_part(tokens: Any, L: int, E: int, U: int, back: bool = False) -> Part:
    """tokens: [T, F]."""
    T, F = tokens.shape
    there = None if E % F == 0 else pl.program_id(0) * F + jnp.arange(F) < E
    return Part(Tile(pl.program_id(1) * T, L, there), T, U, back)


def effects_kernel(see: Refs, left, added, *, L: int, E: int, U: int, back: bool):
    """What a part does to the state before it, or back, to what is handed to its end. a, b, dh: [T, F]; left, added:
    [1, F]."""
    part = this_part(see["a"], L, E, U, back)

    def step(t, numbers, effect):
        (a, new), (left, added) = numbers, effect
        return a * left, a * (added + new) if back else a * added + new

    nothing = jnp.ones(left.shape[1:], jnp.float32), jnp.zeros(left.shape[1:], jnp.float32)
    effect = part.through(partial(part.pair, see), step, nothing)
    for ref, value in zip((left, added), effect, strict=True):
        part.tile.write(ref, 0, value)


def states_kernel(see: Refs, h, *, L: int, E: int, U: int):
    """a, b, h: [T, F]; start: [F]."""
    part = this_part(h, L, E, U)

    def step(t, numbers, state):
        a, b = numbers
        state = a * state + b
        part.tile.write(h, t, state, part.here(t))
        return state

    part.through(partial(part.pair, see), step, part.begun(see))


def gradients_kernel(see: Refs, da, db, *, L: int, E: int, U: int):
    """a, dh, da, db: [T, F]; h: [L, F]; h0, start: [F], where `start` is what the last state gets."""
    part = this_part(da, L, E, U, back=True)
    h0 = part.tile.read(see["h0"])

    def fetch(t):
        place, here = part.tile.first + t, part.here(t)
        later = place > 0 if here is None else (place > 0) & here
        return *part.pair(see, t), part.tile.read(see["h"], place - 1, when=later, other=h0)

    def step(t, numbers, g):
        a, dh, before = numbers
        g = g + dh
        part.tile.write(db, t, g, part.here(t))
        part.tile.write(da, t, g * before, part.here(t))
        return a * g

    part.through(fetch, step, part.begun(see))


# What a program of the grid (channels, parts, rows) sees


def of_row(F: int, *sizes: int) -> pl.BlockSpec:
    """Of `[B, ..., E]`."""
    return pl.BlockSpec((None, *sizes, F), lambda e, p, b: (b, *[0] * len(sizes), e))


def run(kernel: Callable, name: str, given: dict[str, Array], made: int, cut: Cut, interpret: bool) -> list[Array]:
    """As many arrays as are made: of tokens, or of effects where no start is given."""
    (rows, L, E), (P, T, F, U) = given["a"].shape, cut
    blocks = dict.fromkeys(("a", "b", "dh"), by_channel(T, F)) | dict.fromkeys(("start", "h0"), of_row(F))
    blocks |= {"h": of_row(F, L)} | dict.fromkeys(("left", "added"), of_row(F, P))
    out = (struct(rows, L, E), by_channel(T, F)) if "start" in given else (struct(rows, P, E), by_channel(1, F))
    return launch(
        partial(kernel, L=L, E=E, U=U),
        f"linear_{name}",
        (pl.cdiv(E, F), P, rows),
        {name: (array, blocks[name]) for name, array in given.items()},
        [out] * made,
        PARAMS,
        interpret,
    )


def effects(given: dict[str, Array], back: bool, cut: Cut, interpret: bool) -> dict[str, Array]:
    """Of all parts, if there are several."""
    if cut.P == 1:
        return {}
    name = "adjoints" if back else "effects"
    left, added = run(partial(effects_kernel, back=back), name, given, 2, cut, interpret)
    return dict(left=left, added=added)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def fused(a: Array, b: Array, h0: Array, P: int | None, interpret: bool) -> tuple[Array, Array]:
    """As `fused_linear`. a, b: [B, L, E]; h0: [B, E]."""
    return fused_forward(a, b, h0, P, interpret)[0]


def fused_forward(a, b, h0, P, interpret):
    given, how = dict(a=a, b=b), cut(*a.shape, OUT, P)
    given |= effects(given, False, how, interpret) | dict(start=h0)
    (h,) = run(states_kernel, "states", given, 1, how, interpret)
    return (h, h[:, -1]), (a, h, h0)


def fused_backward(P, interpret, saved, grads):
    (a, h, h0), (dh, d_last) = saved, grads
    given, how = dict(a=a, dh=dh), cut(*a.shape, BACK, P)
    given |= effects(given, True, how, interpret) | dict(start=d_last, h=h, h0=h0)
    da, db = run(gradients_kernel, "gradients", given, 2, how, interpret)
    return da, db, a[:, 0] * db[:, 0]


fused.defvjp(fused_forward, fused_backward)


def fused_linear(a: Array, b: Array, h0: Array, P: int | None = None, interpret: bool = False) -> tuple[Array, Array]:
    """All states, `[B, L, E, ...]`, and the last. a, b: [B, L, E, ...]; h0: [B, E, ...]; all in float32."""
    r, e = placement.spec(("batch", "inner"), h0.shape[:2])

    def on_device(a, b, h0):
        flat = (leaf.reshape(*leaf.shape[:axes], -1) for leaf, axes in ((a, 2), (b, 2), (h0, 1)))
        h, last = fused(*flat, P, interpret)
        return h.reshape(b.shape), last.reshape(h0.shape)

    tokens, state = PartitionSpec(r, None, e), PartitionSpec(r, e)
    return placement.on_each_device(on_device, (tokens, tokens, state), (tokens, state))(a, b, h0)
