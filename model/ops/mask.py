"""Who sees whom, as one static value: an algebra of masks over the positions of queries and keys within a document.

A mask answers two questions, one for a pair and one for a block of pairs, by operators alone, so that numpy and JAX
arrays both will do. Implementations of attention ask nothing else, but for `band`, which is what fused kernels know.
Documents and padding are data and no part of it.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from model.errors import UserError

Array = Any  # of numpy, where it is known when traced, or of JAX
Reach = int | None  # None: any distance


class Block(NamedTuple):
    """What is known of the pairs of a block; where that is not all, `some` errs to True and `every` to False."""

    some: Array  # False: no query sees a key, so that the block may be skipped
    every: Array  # True: every query sees every key, so that nothing need be masked


@dataclasses.dataclass(frozen=True)
class Mask:
    """Equal masks of one make are equal values, and hashable; `&` and `|` make further ones."""

    def sees(self, q: Array, k: Array) -> Array | None:
        """Whether a query at q sees a key at k, elementwise, of a shape that spreads to both; None: all see all."""
        raise NotImplementedError

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        """Of queries within q_low..q_high and keys within k_low..k_high, elementwise."""
        raise NotImplementedError

    def band(self) -> tuple[Reach, Reach] | None:
        """How far back and how far ahead a query sees; None where distance alone does not say it."""
        return None

    def reach(self) -> tuple[Reach, Reach]:
        """How far back and how far ahead a query sees at most."""
        return self.band() or (None, None)

    def grain(self) -> int | None:
        """The size of the blocks that it is made of, beginning at position 0; None: it is not made of blocks."""
        return None

    def left(self, l: int, m: int) -> "Mask":
        """What is still to be asked in blocks of l queries and m keys, counted from 0, of which it shows some."""
        return self

    def by_order(self) -> bool:
        """Whether it is enough to know which of two positions comes first."""
        return self.band() in ((None, None), (None, 0))

    def __and__(self, other: "Mask") -> "Mask":
        if isinstance(self, Band) and isinstance(other, Band):
            return Band(nearer(self.back, other.back), nearer(self.ahead, other.ahead))
        if FULL in (self, other):
            return other if self == FULL else self
        return Both(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        if isinstance(self, Band) and isinstance(other, Band):  # which overlap: all see themselves
            return Band(farther(self.back, other.back), farther(self.ahead, other.ahead))
        return FULL if FULL in (self, other) else Either(self, other)


@dataclasses.dataclass(frozen=True)
class Band(Mask):
    """Keys up to `back` before the query and up to `ahead` after it."""

    back: Reach
    ahead: Reach

    def __post_init__(self):
        for name, reach in (("back", self.back), ("ahead", self.ahead)):
            if reach is not None and reach < 0:
                raise UserError(f"a mask that reaches {reach} {name}; allowed: at least 0, or None for any distance")

    def sees(self, q: Array, k: Array) -> Array | None:
        if self == FULL:
            return None
        distance = q - k
        if self.back == self.ahead:  # one comparison for two
            return abs(distance) <= self.back
        before = None if self.back is None else distance <= self.back
        return both(before, None if self.ahead is None else distance >= -self.ahead)

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        some = every = True
        if self.ahead is not None:
            some, every = k_low - q_high <= self.ahead, k_high - q_low <= self.ahead
        if self.back is not None:
            some, every = some & (q_low - k_high <= self.back), every & (q_high - k_low <= self.back)
        return Block(some, every)

    def band(self) -> tuple[Reach, Reach]:
        return self.back, self.ahead


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """The first keys of a document, at positions below `n`, for every query."""

    n: int

    def sees(self, q: Array, k: Array) -> Array:
        return k < self.n

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        return Block(k_low < self.n, k_high < self.n)


@dataclasses.dataclass(frozen=True)
class Both(Mask):
    """What two masks show."""

    one: Mask
    other: Mask

    def sees(self, q: Array, k: Array) -> Array | None:
        return both(self.one.sees(q, k), self.other.sees(q, k))

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        one, other = (mask.block(q_low, q_high, k_low, k_high) for mask in (self.one, self.other))
        return Block(one.some & other.some, one.every & other.every)

    def reach(self) -> tuple[Reach, Reach]:
        return tuple(map(nearer, self.one.reach(), self.other.reach()))

    def grain(self) -> int | None:
        return nearer(self.one.grain(), self.other.grain())

    def left(self, l: int, m: int) -> Mask:
        return self.one.left(l, m) & self.other.left(l, m)


@dataclasses.dataclass(frozen=True)
class Either(Mask):
    """What one or the other of two masks shows."""

    one: Mask
    other: Mask

    def sees(self, q: Array, k: Array) -> Array | None:
        one, other = self.one.sees(q, k), self.other.sees(q, k)
        return None if one is None or other is None else one | other

    def block(self, q_low: Array, q_high: Array, k_low: Array, k_high: Array) -> Block:
        one, other = (mask.block(q_low, q_high, k_low, k_high) for mask in (self.one, self.other))
        return Block(one.some | other.some, one.every | other.every)

    def reach(self) -> tuple[Reach, Reach]:
        return tuple(map(farther, self.one.reach(), self.other.reach()))

    def grain(self) -> int | None:
        return nearer(self.one.grain(), self.other.grain())

    def left(self, l: int, m: int) -> Mask:
        return FULL if {self.one.left(l, m), self.other.left(l, m)} == {FULL} else self


FULL = Band(None, None)
CAUSAL = Band(None, 0)


def window(n: int) -> Band:
    """Keys less than n away, before and after."""
    if n < 1:
        raise UserError(f"window {n} must be at least 1")
    return Band(n - 1, n - 1)


def block_matrix(mask: Mask, queries: int, keys: int, l: int, m: int) -> np.ndarray:
    """Which of so many blocks of l queries see some of so many blocks of m keys, `[queries, keys]` bool.

    Both are at positions 0, 1, 2, ...; what it says False to may be skipped.
    """
    i, j = np.arange(queries, dtype=np.int32)[:, None], np.arange(keys, dtype=np.int32)[None]
    some = mask.block(i * l, i * l + l - 1, j * m, j * m + m - 1).some
    return np.array(np.broadcast_to(some, (queries, keys)))


def both(one: Array | None, other: Array | None) -> Array | None:
    """Where both hold; None: everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def nearer(one: Reach, other: Reach) -> Reach:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def farther(one: Reach, other: Reach) -> Reach:
    return None if one is None or other is None else max(one, other)
