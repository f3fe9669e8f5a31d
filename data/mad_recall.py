"""In-context recall with and without noise (Poli et al., 2024, "MAD", https://arxiv.org/abs/2403.17844)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data import bins
from data.mad import Mad, shown_before
from data.task import Example
from model.settings import LONGEST, WIDEST, Dim, at_least, below, even, within


@dataclass(frozen=True)
class MadRecall(Mad):
    """Keys and values in turn, a value fixed for each key of a row: name the value of every key seen before.

    The first half of the ids are keys, the second values. Each key is uniform, its value uniform and the same all
    through a row. The last key is one of those shown, each as likely. Training asks for every next token; the other
    splits for values of keys that are there for the second time or later. The last token of a row asks for nothing.
    """

    name: ClassVar[str] = "mad_recall"
    kind: ClassVar[str] = "lm"
    block: ClassVar[int] = 64
    next_token: ClassVar[bool] = True
    noise: ClassVar[float] = 0.0  # share of the pairs that are noise
    noise_size: ClassVar[int] = 0  # ids of noise, the last ones

    length: Annotated[int, within(4, LONGEST), even] = 128  # tokens
    vocab_size: Annotated[int, within(2, WIDEST)] = 16

    @property
    def n_keys(self) -> int:
        return (self.vocab_size - self.noise_size) // 2

    @property
    def n_values(self) -> int:
        return self.vocab_size - self.noise_size - self.n_keys

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, L, P = self.block, self.length, self.length // 2
        table = self.n_keys + rng.integers(self.n_values, size=(B, self.n_keys))
        keys = rng.integers(self.n_keys, size=(B, P))
        noise = np.zeros((B, P), bool)
        if self.noise:
            noise = rng.random((B, P)) < self.noise
            np.put_along_axis(noise, rng.integers(P - 1, size=(B, 1)), False, axis=1)  # at least one pair
            noise[:, -1] = False
        there = np.zeros((B, self.n_keys), bool)  # keys to choose the last one from
        row, place = np.nonzero(~noise[:, :-1])
        there[row, keys[row, place]] = True
        keys[:, -1] = np.where(there, rng.random(there.shape), -1).argmax(axis=1)

        pairs = np.stack([keys, np.take_along_axis(table, keys, axis=1)], axis=2)
        if self.noise:
            sounds = rng.integers(self.vocab_size - self.noise_size, self.vocab_size, pairs.shape)
            pairs = np.where(noise[..., None], sounds, pairs)
        inputs = pairs.reshape(B, L)
        # Noise is no key: each of its places gets a number of its own, which has not been shown.
        _, last = shown_before(np.where(noise, self.vocab_size + np.arange(P), keys))
        known = last >= 0
        asked = np.zeros((B, L), np.float32)
        asked[:, ::2] = known  # at the key, whose value comes next
        distance = np.zeros((B, L), np.int32)
        distance[:, ::2] = np.where(known, bins.number(np.maximum(2 * (np.arange(P) - last), 1)), 0)
        every = np.ones((B, L), np.float32)
        every[:, -1] = 0
        return {
            "inputs": inputs.astype(np.int32),
            "targets": np.roll(inputs, -1, axis=1).astype(np.int32),
            "weights": every if split == "train" else asked,
            "attr_distance": distance,
        }

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {"distance": bins.labels(self.length - 1)}  # tokens since the key was last shown

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.n_values}


@dataclass(frozen=True)
class MadNoisyRecall(MadRecall):
    """The same, with pairs of noise in between, from ids of their own.

    Each pair is noise with probability `noise`, but for the last and one more, so that there is something to recall.
    """

    name: ClassVar[str] = "mad_noisy_recall"

    vocab_size: Annotated[int, within(3, WIDEST)] = 32  # noise included
    noise: Annotated[float, at_least(0), below(1)] = 0.2
    noise_size: Dim = 16

    def check(self) -> None:
        self.bound("noise_size", 1, self.vocab_size - 2, f"vocab_size {self.vocab_size}, less a key and a value")
