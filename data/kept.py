"""Examples that have been made and may be asked for again, in a bounded number of bytes.

Threads may share both stores: one makes training batches while another evaluates.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from data.task import Example

Key = TypeVar("Key", bound=Hashable)
# Makes blocks, and gives each with its key, in any order.
Make = Callable[[Sequence[Key]], Iterator[tuple[Key, Example]]]


class Blocks:
    """The blocks used last; the newest even where it alone is larger than the room."""

    def __init__(self, room: int):
        self.room, self.bytes = room, 0
        self._blocks: OrderedDict[Hashable, Example] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[Key], make: Make[Key]) -> dict[Key, Example]:
        """The blocks of these keys, made if they are not there; not to be written to."""
        with self._lock:
            found = {key: self._blocks[key] for key in keys if key in self._blocks}
            for key in found:
                self._blocks.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        # Outside the lock: blocks that another thread has in hand are no reason to wait.
        for key, made in make(missing):
            found[key] = made
            self._keep(key, made)
        return found

    def _keep(self, key: Hashable, made: Example) -> None:
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = made
                self.bytes += weight(made)
            while self.bytes > self.room and len(self._blocks) > 1:
                self.bytes -= weight(self._blocks.popitem(last=False)[1])


def weight(block: Example) -> int:
    """Bytes that a block takes, with those that Python needs to hold an array."""
    return sum(array.nbytes + 256 for array in block.values())


class FixedSets:
    """Finite splits whose examples are each made once, when first asked for; those used last, as far as they fit."""

    def __init__(self, room: int):
        self.room = room
        self._sets: OrderedDict[Hashable, FixedSet] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(kept.bytes for kept in self._sets.values())

    def rows(
        self, key: Hashable, size: int, block: int, make: Make[int], places: np.ndarray, hands: int = 1
    ) -> Example | None:
        """Examples `places` [B] of a set of `size`; None: it does not fit.

        `make` gives the blocks that begin at some places, `hands` of them at a time.
        """
        with self._lock:
            if key not in self._sets:
                self._sets[key] = FixedSet(size, block, self.room)
            self._sets.move_to_end(key)
            kept = self._sets[key]
        found = kept.rows(make, places, hands)
        with self._lock:
            while self.bytes > self.room:
                self._sets.popitem(last=False)
        return found


class FixedSet:
    """A finite split as one array a key, in the narrowest type that holds its values, filled as it is asked for."""

    def __init__(self, size: int, block: int, room: int):
        self.blocks, self.block, self.room = -(-size // block), block, room
        self.bytes = 0
        self._fits = True
        self._made = np.zeros(self.blocks, bool)
        self._columns: dict[str, np.ndarray] = {}
        self._dtypes: dict[str, np.dtype] = {}
        self._lock = threading.Lock()

    def rows(self, make: Make[int], places: np.ndarray, hands: int = 1) -> Example | None:
        with self._lock:
            missing = self._missing(np.unique(places // self.block), hands) if self._fits else []
            for first, made in make([int(number) * self.block for number in missing]):
                self._write(first, made)
                if not self._fits:
                    break
                self._made[first // self.block] = True
            if not self._fits:
                return None
            return {key: column[places].astype(self._dtypes[key]) for key, column in self._columns.items()}

    def _missing(self, wanted: np.ndarray, hands: int) -> np.ndarray:
        """The blocks to make: those wanted, and for hands that would be idle those that follow."""
        missing = wanted[~self._made[wanted]]
        if not 0 < missing.size < hands:
            return missing
        after = missing[-1] + 1
        return np.append(missing, after + np.flatnonzero(~self._made[after:])[: hands - missing.size])

    def _write(self, first: int, made: Example) -> None:
        size = self.blocks * self.block
        types = {key: narrowest(array) for key, array in made.items()}
        types |= {key: np.promote_types(types[key], column.dtype) for key, column in self._columns.items()}
        self.bytes = sum(size * math.prod(array.shape[1:]) * types[key].itemsize for key, array in made.items())
        if self.bytes > self.room:
            self._fits, self._columns, self.bytes = False, {}, 0
            return
        for key, array in made.items():
            if key not in self._columns:
                self._dtypes[key] = array.dtype
                self._columns[key] = np.empty((size, *array.shape[1:]), types[key])  # takes memory as it is written
            self._columns[key] = self._columns[key].astype(types[key], copy=False)
            self._columns[key][first : first + self.block] = array


def narrowest(array: np.ndarray) -> np.dtype:
    """The smallest of uint8, uint16 and the array's own type that gives every bit of it back."""
    for narrow in (np.dtype(np.uint8), np.dtype(np.uint16)):
        with np.errstate(invalid="ignore"):
            back = array.astype(narrow).astype(array.dtype)
        if narrow.itemsize < array.itemsize and back.tobytes() == array.tobytes():
            return narrow
    return array.dtype
