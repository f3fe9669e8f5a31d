"""Examples that have been made and may be asked for again, in a bounded number of bytes.

Threads may share both stores: one makes training batches while another evaluates.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np

from data.task import Example


class Blocks:
    """The blocks used last; the newest even where it alone is larger than the room."""

    def __init__(self, room: int):
        self.room, self.bytes = room, 0
        self._blocks: OrderedDict[Hashable, Example] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Example]) -> Example:
        """The block of that key, made if it is not there; not to be written to."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        made = make()  # outside the lock: a block that another thread has in hand is no reason to wait
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = made
                self.bytes += weight(made)
            while self.bytes > self.room and len(self._blocks) > 1:
                self.bytes -= weight(self._blocks.popitem(last=False)[1])
        return made


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
        self, key: Hashable, size: int, block: int, make: Callable[[int], Example], places: np.ndarray
    ) -> Example | None:
        """Examples `places` [B] of a set of `size`, of which `make(first)` makes a block; None: it does not fit."""
        with self._lock:
            if key not in self._sets:
                self._sets[key] = FixedSet(size, block, self.room)
            self._sets.move_to_end(key)
            kept = self._sets[key]
        found = kept.rows(make, places)
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

    def rows(self, make: Callable[[int], Example], places: np.ndarray) -> Example | None:
        with self._lock:
            for number in np.unique(places // self.block):
                if self._fits and not self._made[number]:
                    self._write(int(number) * self.block, make(int(number) * self.block))
                    self._made[number] = True
            if not self._fits:
                return None
            return {key: column[places].astype(self._dtypes[key]) for key, column in self._columns.items()}

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
