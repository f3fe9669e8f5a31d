"""Chains of assignments hidden in a haystack (RULER's variable tracking, https://arxiv.org/abs/2404.06654)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from data.haystack import ASK, FIRST, STOP, Haystack, depth, different, hide, repeated
from data.task import Example
from model.settings import within

WIDTH = 3  # tokens of an assignment

Few = Annotated[int, within(1, 256)]


@dataclass(frozen=True)
class VariableTracking(Haystack):
    """X1 = 123; X2 = X1; X3 = X2; ...: which variables hold the value?

    An assignment is `name value STOP` or `name name STOP`. Those of a chain stand in their order, those of different
    chains among each other in any. The question is `ASK value`, the answer the names of its chain, the first one first.
    """

    name: ClassVar[str] = "variable_tracking"

    n_chains: Few = 1  # with values of their own, of which one is asked for
    n_hops: Few = 4  # from the first variable of a chain to its last

    def check(self) -> None:
        n = self.n_chains * (self.n_hops + 1)
        self.bound("names", n, why="one for each variable")
        self.bound("values", self.n_chains, why="one for each chain")
        self.bound("length", WIDTH * n + self.n_hops + 2, why=f"{n} assignments, the question and its answer")

    @property
    def asked_places(self) -> np.ndarray:
        return np.arange(2 + self.n_hops + 1) >= 2

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B, C, S = self.block, self.n_chains, self.n_hops + 1  # S: assignments of a chain
        values = self.first_value + different(rng, B, self.values, C)
        names = FIRST + different(rng, B, self.names, C * S).reshape(B, C, S)
        held = np.concatenate([values[..., None], names[..., :-1]], axis=2)
        chain = rng.permuted(np.tile(np.repeat(np.arange(C), S), (B, 1)), axis=1)  # of each assignment in a row
        step = np.argsort(np.argsort(chain, axis=1, kind="stable"), axis=1) - S * chain  # and its number in the chain
        row = np.arange(B)[:, None]
        assignments = np.stack([names[row, chain, step], held[row, chain, step], np.full_like(chain, STOP)], axis=2)
        filler = self.first_filler + repeated(rng, B, self.haystack - WIDTH * C * S, self.fillers)
        rows, starts = hide(rng, assignments, filler)
        one = np.arange(B), rng.integers(C, size=B)
        ending = np.concatenate([np.full((B, 1), ASK), values[one][:, None], names[one]], axis=1)
        first = np.argmax(chain == one[1][:, None], axis=1)  # the assignment of a value to the chain's first variable
        return self.asked_of(rows, ending, depth(starts[np.arange(B), first], self.haystack - WIDTH))

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / self.names, "any variable shown": 1 / (self.n_chains * (self.n_hops + 1))}
