"""Recall of keys and values of several tokens (Poli et al., 2024, "MAD", https://arxiv.org/abs/2403.17844)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.mad import Mad, shown_before
from data.rng import distinct
from data.task import Example
from model.settings import LONGEST, WIDEST, Dim, within


@dataclass(frozen=True)
class MadFuzzyRecall(Mad):
    """Keys and values of one or more tokens each: name the value of every key seen before.

    The first half of the ids, less the last, which is padding, make keys, the second half values. Keys and values have
    1 to `key_size` and 1 to `value_size` different tokens, every size as likely, but in the splits other than training
    all keys have `key_size`. A key has the same value all through a row. Pairs follow each other as long as there is
    room; the last one is a pair that was shown, the first to begin at or after a place that is uniform in the row. A
    row is filled up with padding in front, which is asked for in training as all next tokens are.

    (Where MAD draws that place too near the end, its last key has not been shown; here it always has.)
    """

    name: ClassVar[str] = "mad_fuzzy_recall"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64
    next_token: ClassVar[bool] = True

    length: Annotated[int, within(6, LONGEST)] = 128  # tokens
    vocab_size: Annotated[int, within(3, WIDEST)] = 16  # padding included
    key_size: Dim = 3  # tokens of a key, at most
    value_size: Dim = 3  # tokens of a value, at most

    def check(self) -> None:
        most = min(self.n_keys, 62 // (self.n_keys + 1).bit_length())  # that a whole number tells apart
        self.bound("key_size", 1, most, f"of {self.n_keys} different tokens")
        self.bound("value_size", 1, self.n_values, f"of {self.n_values} different tokens")
        self.bound("length", 3 * (self.key_size + self.value_size), why="three of the longest pairs")

    @property
    def n_keys(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def n_values(self) -> int:
        return self.vocab_size - 1 - self.n_keys

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, K, V = self.block, self.length, self.key_size, self.value_size
        least = 1 if split == "train" else K
        P = L // (least + 1)  # more pairs than there is room for
        key_sizes, value_sizes = rng.integers(least, K + 1, (B, P)), rng.integers(1, V + 1, (B, P))
        keys = distinct(rng, B * P, self.n_keys, K).reshape(B, P, K)
        keys = np.where(np.arange(K) < key_sizes[..., None], keys, -1)  # -1: no token
        values = self.n_keys + distinct(rng, B * P, self.n_values, V).reshape(B, P, V)
        values = np.where(np.arange(V) < value_sizes[..., None], values, -1)
        numbers = ((keys + 1) * (self.n_keys + 1) ** np.arange(K)).sum(axis=2)  # one for each key
        first, _ = shown_before(numbers)
        values = np.take_along_axis(values, first[..., None], axis=1)
        sizes = key_sizes + np.take_along_axis(value_sizes, first, axis=1)

        starts = sizes.cumsum(axis=1) - sizes
        place = rng.integers(L - 3 * (K + V) + 1, size=(B, 1))
        probe = (starts >= place).argmax(axis=1)[:, None]
        room = L - np.take_along_axis(sizes, probe, axis=1) - (K + V)
        end = (starts < room).sum(axis=1, keepdims=True)  # the pairs before the last
        pair = np.where(np.arange(P) == end, probe, np.arange(P))

        tokens = np.take_along_axis(np.concatenate([keys, values], axis=2), pair[..., None], axis=1)
        real = (tokens >= 0) & (np.arange(P) <= end)[..., None]
        nth = real.reshape(B, -1).cumsum(axis=1)
        # The last token at L, where it is a target only; at L + 1 what is no token.
        at = np.where(real.reshape(B, -1), nth + L - nth[:, -1:], L + 1)
        row = np.full((B, L + 2), self.vocab_size - 1)
        np.put_along_axis(row, at, tokens.reshape(B, -1), axis=1)

        _, last = shown_before(np.take_along_axis(numbers, pair, axis=1))
        sizes = np.take_along_axis(sizes, pair, axis=1)
        starts = sizes.cumsum(axis=1) - sizes
        since = np.where(last >= 0, starts - np.take_along_axis(starts, np.maximum(last, 0), axis=1), 0)
        of_values = np.where(np.arange(K + V) < K, 0, since[..., None])  # 0: not asked for
        distance = np.zeros((B, L + 2), np.int64)
        np.put_along_axis(distance, at, of_values.reshape(B, -1), axis=1)
        distance = distance[:, 1:-1]
        return {
            "inputs": row[:, :L].astype(np.int32),
            "targets": row[:, 1:-1].astype(np.int32),
            "weights": (distance > 0 if split != "train" else np.ones((B, L))).astype(np.float32),
            "attr_distance": np.where(distance > 0, bins.number(np.maximum(distance, 1)), 0).astype(np.int32),
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"distance": bins.labels(self.length - 1)}  # tokens since the key was last shown

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.n_values}
