"""What attention keeps of the past: all of it, or the last tokens in a ring, after the first ones if they are sinks.

A cache is a plan (`Full`, `Ring`) and a state, a dict of arrays that is passed in and returned. The names and shapes
of the entries are the mixer's business: keys and values, or a latent vector, per token.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.contract import wide
from model.errors import UserError

Arrays = dict[str, jax.Array]  # each [B, M, ...]


@dataclasses.dataclass(frozen=True)
class Full:
    """Every token, in the order written."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]  # name, shape per token
    dtype: Any
    wide: tuple[str, ...] = ()  # entries in float32 at least

    def slots(self, max_len: int) -> int:
        return max_len

    def open(self, batch: int, max_len: int) -> Arrays:
        return open_slots(self, batch, max_len) | {"written": np.zeros((), np.int32)}  # see `is_empty`

    def bytes(self, length: int) -> int:
        return bytes_of(self, length) + 4

    def extend(self, state: Arrays, new: Arrays) -> tuple[Arrays, Arrays]:
        """The tokens to attend to, and the state after; `new` also names its `positions` and `segments`."""
        start, (L, M) = state["written"], (new["segments"].shape[1], state["segments"].shape[1])
        if L > M:
            raise UserError(f"{L} tokens do not fit in a key-value cache of {M}; open it with max_len={L}")
        # How much is written is not known when traced. Past the end: NaN, rather than an answer from a torn cache.
        # Only what is new is touched, so that a loop over tokens writes into one array, in place.
        fits = start + L <= M
        new = new | {name: jnp.where(fits, new[name], jnp.nan) for name, _ in self.entries}
        after = {key: lax.dynamic_update_slice_in_dim(state[key], new[key], start, axis=1) for key in new}
        return after, after | {"written": start + L}


@dataclasses.dataclass(frozen=True)
class Ring:
    """The first `sinks` tokens of a document and the last `window`; others are overwritten. Constant memory."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: Any
    window: int
    sinks: int = 0
    wide: tuple[str, ...] = ()

    def slots(self, max_len: int) -> int:
        return min(self.sinks + self.window, max_len)

    def open(self, batch: int, max_len: int) -> Arrays:
        return open_slots(self, batch, max_len)

    def bytes(self, length: int) -> int:
        return bytes_of(self, length)

    def extend(self, state: Arrays, new: Arrays) -> tuple[Arrays, Arrays]:
        """What was there and what is new: a query may still want a key that a later one overwrites."""
        M = state["segments"].shape[1]
        sinks = min(self.sinks, M - 1)
        positions = new["positions"]
        slot = jnp.where(positions < sinks, positions, sinks + (positions - sinks) % (M - sinks))
        slot = jnp.where(new["segments"] > 0, slot, M)  # padding is not kept
        if slot.shape[1] == 1 and M == self.sinks + self.window:  # it overwrites what its window has just left
            rows = jnp.arange(slot.shape[0])
            after = {key: state[key].at[rows, slot[:, 0]].set(new[key][:, 0], mode="drop") for key in new}
            return after, after
        # Of several tokens for one slot the last stays; -1: none came.
        index = jnp.broadcast_to(jnp.arange(slot.shape[1]), slot.shape)
        last = jax.vmap(lambda s, i: jnp.full(M, -1).at[s].max(i, mode="drop"))(slot, index)

        def written(old: jax.Array, added: jax.Array) -> jax.Array:
            spread = (..., *(None,) * (old.ndim - 2))
            taken = jnp.take_along_axis(added, jnp.maximum(last, 0)[spread], axis=1)
            return jnp.where((last >= 0)[spread], taken, old)

        seen = {key: jnp.concatenate([state[key], new[key]], axis=1) for key in new}
        return seen, {key: written(state[key], new[key]) for key in new}


Cache = Full | Ring


def open_slots(cache: Cache, batch: int, max_len: int) -> Arrays:
    M = cache.slots(max_len)
    arrays = {name: jnp.zeros((batch, M, *shape), dtype_of(cache, name)) for name, shape in cache.entries}
    empty = jnp.zeros((batch, M), jnp.int32)
    return arrays | {"positions": empty, "segments": empty}  # segment 0: nothing written yet


def bytes_of(cache: Cache, length: int) -> int:
    token = sum(math.prod(shape) * jnp.dtype(dtype_of(cache, name)).itemsize for name, shape in cache.entries)
    return cache.slots(length) * (token + 2 * 4)


def is_empty(state: Arrays) -> bool:
    """Whether nothing has been written since it was opened, where that is known when traced: by the same function."""
    written = state.get("written")
    return isinstance(written, np.ndarray) and written == 0


def dtype_of(cache: Cache, name: str) -> Any:
    return wide(cache.dtype) if name in cache.wide else cache.dtype
