"""Masks with gaps: static sparse patterns over the positions within a document.

`mask.block_matrix` has the blocks of any of them that see each other, which is what skips the others.
"""

import dataclasses
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from model.errors import UserError
from model.ops.mask import FULL, Array, Band, Block, Mask, Reach

FARTHEST = 2**31 - 2  # positions are int32, and a product of settings may be more than that holds


def library(*arrays: Array):
    """What computes with these: numpy, where all of them are known when traced."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


@dataclasses.dataclass(frozen=True)
class OfBlocks(Mask):
    """A mask that is told by blocks of `n` positions: a subclass says which see which."""

    n: int

    def shows(self, i: Array, j: Array) -> Array:
        """Whether queries of block i see keys of block j, elementwise."""
        raise NotImplementedError

    def sees(self, q: Array, k: Array) -> Array:
        return self.shows(q // self.n, k // self.n)

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        i, j = q_low // self.n, k_low // self.n
        shown, one = self.shows(i, j), (q_high // self.n == i) & (k_high // self.n == j)
        return Block(shown | (one == 0), shown & one)

    def grain(self) -> int:
        return self.n

    def left(self, l: int, m: int) -> Mask:
        return FULL if self.n % l == self.n % m == 0 else self


@dataclasses.dataclass(frozen=True)
class Chunk(OfBlocks):
    """Keys of the query's own block."""

    def shows(self, i: Array, j: Array) -> Array:
        return i == j

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        first, last = q_low // self.n, q_high // self.n
        some = (k_low // self.n <= last) & (k_high // self.n >= first)
        return Block(some, (first == last) & (k_low // self.n == first) & (k_high // self.n == first))

    def reach(self) -> tuple[Reach, Reach]:
        return self.n - 1, self.n - 1


@dataclasses.dataclass(frozen=True)
class Table(OfBlocks):
    """Blocks that see each other by a square table of 0 and 1, `rows`; it goes on along its diagonal without end.

    Beyond the table, a pair of blocks is what the pair is that lies as many blocks before both as brings them into it;
    none where that is before the first block.
    """

    rows: tuple[str, ...]

    def __post_init__(self):
        P = len(self.rows)
        if not P or any(len(row) != P or set(row) - {"0", "1"} for row in self.rows):
            raise UserError(f"pattern {';'.join(self.rows)!r} is no square of 0 and 1; allowed: such as '10;11'")

    @cached_property
    def table(self) -> np.ndarray:
        return np.asarray([[one == "1" for one in row] for row in self.rows])

    def shows(self, i: Array, j: Array) -> Array:
        P = len(self.rows)
        xp = library(i, j)
        shift = xp.maximum(xp.maximum(i, j) - (P - 1), 0)
        inside = (i >= shift) & (j >= shift)
        return inside & xp.asarray(self.table)[xp.maximum(i - shift, 0), xp.maximum(j - shift, 0)]

    def reach(self) -> tuple[Reach, Reach]:
        i, j = np.nonzero(self.table)
        far = int(np.max(i - j, initial=0)), int(np.max(j - i, initial=0))
        return tuple((blocks + 1) * self.n - 1 for blocks in far)


@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """Keys at distances that `step` divides, up to `back` steps before the query and up to `ahead` after it."""

    step: int
    back: Reach
    ahead: Reach

    def within(self) -> Band:
        reach = (None if steps is None else min(steps * self.step, FARTHEST) for steps in (self.back, self.ahead))
        return Band(*reach)

    def sees(self, q: Array, k: Array) -> Array:
        near = self.within().sees(q, k)
        every = (q - k) % self.step == 0
        return every if near is None else near & every

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        near = self.within().block(q_low, q_high, k_low, k_high)
        # Of all distances between the two blocks, the last that the step divides.
        some = (q_high - k_low) // self.step * self.step >= q_low - k_high
        return Block(near.some & some, near.every & (self.step == 1))

    def reach(self) -> tuple[Reach, Reach]:
        return self.within().band()


@dataclasses.dataclass(frozen=True)
class Columns(Mask):
    """The last `last` keys of every stretch of `n`, up to `ahead` after the query; and the query's own."""

    n: int
    last: int
    ahead: Reach

    def chosen(self, k: Array) -> Array:
        return k % self.n >= self.n - self.last

    def sees(self, q: Array, k: Array) -> Array:
        near, chosen = Band(None, self.ahead).sees(q, k), self.chosen(k)
        return (chosen if near is None else chosen & near) | (q == k)

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        begin = k_low - k_low % self.n + self.n - self.last  # of the chosen ones in the first key's stretch
        first = begin + (k_low - begin) * (k_low > begin)
        near = Band(None, self.ahead).block(q_low, q_high, first, k_high)
        itself = (k_low <= q_high) & (k_high >= q_low)
        every = (k_low >= begin) & (k_high // self.n == k_low // self.n) & near.every
        return Block((first <= k_high) & near.some | itself, every)


@dataclasses.dataclass(frozen=True)
class FirstQueries(Mask):
    """All keys, for the first queries of a document, at positions below `n`; none for others."""

    n: int

    def sees(self, q: Array, k: Array) -> Array:
        return (q < self.n) & (k >= 0)

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        return Block(q_low < self.n, q_high < self.n)


MIX = (0x7FEB352D, 0x846CA68B)  # multipliers that spread bits (https://github.com/skeeto/hash-prospector)


def drawn(seed: int, i: Array, t: int) -> Array:
    """The t-th random number of block i, uint32."""
    xp = library(i)
    start = (seed * 0x9E3779B1 + (t + 1) * 0xC2B2AE3D) % 2**32
    x = xp.atleast_1d(i).astype(xp.uint32) * xp.uint32(0x85EBCA77) + xp.uint32(start)
    for shift, factor in ((16, MIX[0]), (15, MIX[1])):
        x = (x ^ (x >> shift)) * xp.uint32(factor)
    return (x ^ (x >> 16)).reshape(xp.shape(i))


@dataclasses.dataclass(frozen=True)
class BigBird(OfBlocks):
    """Blocks less than `near` apart, the first ones, and `random` earlier ones that each block draws.

    What a block draws is told by the seed and the block's number alone, however long the document becomes: one from
    each of as many equal parts of the blocks before it that it does not see anyway. A draw is seen from both its ends.
    """

    first: int  # blocks that see all and that all see
    near: int
    random: int
    seed: int

    def shows(self, i: Array, j: Array) -> Array:
        seen = (abs(i - j) < self.near) | (i < self.first) | (j < self.first)
        for t in range(self.random):
            seen = seen | self.draws(i, j, t) | self.draws(j, i, t)
        return seen

    def draws(self, i: Array, j: Array, t: int) -> Array:
        """Whether j is the t-th draw of i."""
        xp = library(i, j)
        others = xp.maximum(i - self.near + 1 - self.first, 0)
        begin, end = t * others // self.random, (t + 1) * others // self.random
        place = drawn(self.seed, i, t) % xp.maximum(end - begin, 1).astype(xp.uint32)
        return (end > begin) & (j == self.first + begin + place.astype(xp.int32))
