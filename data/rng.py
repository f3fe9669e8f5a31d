"""One random stream per example, addressed by (seed, split, index) and never stored.

Philox (Salmon et al., SC 2011, https://doi.org/10.1145/2063384.2063405) is a keyed bijection of a 256-bit
counter. SHA-256 makes the key from the seed and the split; the index is the counter's upper half, so every
example owns 2^128 blocks that no other example touches. Seeking costs 2 us; hashing a seed per example 25 us.
"""

import functools
import hashlib

import numpy as np


@functools.lru_cache(maxsize=64)
def _key(seed: int, split: str, order: int) -> tuple[int, int]:
    digest = hashlib.sha256(f"{seed}/{split}/{order}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


class Stream:
    """The random numbers of a split: `at(index)` is one example's generator, good until the next call."""

    def __init__(self, seed: int, split: str, order: int = 0):
        key = np.array(_key(seed, split, order), np.uint64)
        self.rng = np.random.Generator(np.random.Philox(key=key))
        self.key = key
        self.empty = np.zeros(4, np.uint64)

    def at(self, index: int) -> np.random.Generator:
        # Moving a generator is ten times cheaper than building one. At buffer_pos 4 no old number is left.
        self.rng.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {"counter": (0, 0, index, 0), "key": self.key},
            "buffer": self.empty,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self.rng


def distinct(rng: np.random.Generator, rows: int, n: int, k: int) -> np.ndarray:
    """`[rows, k]`: in each row k different numbers below n, in random order."""
    if k * k > 2 * n:  # else a row of k draws is free of repeats one time in three, or more
        clocks = rng.random((rows, n), np.float32)
        first = np.argpartition(clocks, k - 1, axis=1)[:, :k]
        order = np.take_along_axis(clocks, first, axis=1).argsort(axis=1)
        found = np.take_along_axis(first, order, axis=1)
        # Which of two equal clocks comes first depends on the machine's sort, except in a stable one.
        rung = np.take_along_axis(clocks, found, axis=1)
        tied = (np.diff(rung) == 0).any(axis=1) | ((clocks <= rung[:, -1:]).sum(axis=1) > k)
        found[tied] = clocks[tied].argsort(axis=1, kind="stable")[:, :k]
        return found
    found = rng.integers(n, size=(rows, k))
    drawn = np.arange(rows)
    while True:  # a row with a repeat is drawn anew, which leaves the law uniform
        ordered = np.sort(found[drawn], axis=1)
        drawn = drawn[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
        if not drawn.size:
            return found
        found[drawn] = rng.integers(n, size=(drawn.size, k))
