"""ListOps, by the law of Long Range Arena (Tay et al., 2020, https://arxiv.org/abs/2011.04006).

The trees are those of Nangia and Bowman (2018, https://arxiv.org/abs/1804.06028). The root is at depth 1.
Above the deepest level a node is an operator with chance 1/4, else a digit; on it every node is a digit. An
operator (MIN, MAX, MED, SM, equally likely) has 2..max_args arguments, uniformly. A digit is one token, an
operator two, and a tree is kept if min_length < tokens < max_length. LRA's data went through a set, so it
has no duplicates; here examples are independent, which at LRA's lengths is the same thing.

Instead of the law, `source` may name the trees that LRA released (`python -m data.prepare lra_listops`).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from data import bins
from data.rng import Stream
from data.stored import Stored
from data.task import SPLITS, Example
from model.errors import UserError
from model.settings import Count, Length, within

TOKENS = ("<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
ZERO, MIN, CLOSE = TOKENS.index("0"), TOKENS.index("[MIN"), TOKENS.index("]")
END = len(TOKENS)  # protocol s4

_TRIES = 100_000  # candidate trees per example before the bounds are called hopeless
LRA = (10, 10, 500, 2000)  # its law: levels, arguments, and the bounds of the tokens
KNOWN = {"majority": 0.168, "root operator": 0.361}  # of 100,000 of its trees, guessed from 100,000 others


class Tree(NamedTuple):
    """A tree breadth first: the children of one operator are neighbours, in the order of their parents."""

    levels: list[int]  # the nodes of level d are levels[d] .. levels[d + 1] - 1
    cuts: list[int]  # its operators are those numbered cuts[d] .. cuts[d + 1] - 1
    nodes: np.ndarray  # [P] the operators' nodes
    operators: np.ndarray  # [P] 0..3: MIN, MAX, MED, SM
    n_args: np.ndarray  # [P]
    length: int  # tokens


def grow(rng: np.random.Generator, max_depth: int, max_args: int, max_length: int) -> Tree | None:
    """A random tree with an operator at its root, or None once it has max_length nodes and so is too long."""
    u = 4 * rng.random(max_length)  # below 1 with chance 1/4, and then uniform once more
    u[0] /= 4
    nodes = (u < 1).nonzero()[0]
    code = (u[nodes] * (4 * (max_args - 1))).astype(np.int64)
    n_args = 2 + code // 4
    born = 1 + n_args.cumsum()  # nodes there are once an operator has its arguments
    levels, cuts = [0, 1], [0]
    while len(levels) <= max_depth:
        cuts.append(int(nodes.searchsorted(levels[-1])))
        if cuts[-1] == cuts[-2]:
            break
        levels.append(int(born[cuts[-1] - 1]))
        if levels[-1] >= max_length:
            return None
    P = cuts[len(levels) - 2]
    return Tree(levels, cuts, nodes[:P], code[:P] % 4, n_args[:P], levels[-1] + P)


def solve(tree: Tree, digits: np.ndarray) -> tuple[int, np.ndarray]:
    """The tree's value and its tokens [tree.length]; `digits` has one per node, read where that is a leaf."""
    levels, cuts, nodes, operators, n_args, _ = tree
    inner = range(len(levels) - 2)
    first = 1 + n_args.cumsum() - n_args  # each operator's first argument
    parent = np.arange(nodes.size).repeat(n_args)  # of nodes 1, 2, ...; the root has none
    # Among an operator's sorted arguments, MIN, MAX and MED are the mean of these two places, rounded down.
    left = first + np.choose(operators, (0, n_args - 1, (n_args - 1) // 2, 0))
    right = first + np.choose(operators, (0, n_args - 1, n_args // 2, 0))
    is_sum = operators == 3

    value = digits.copy()
    size = np.ones_like(value)  # tokens of the node's subtree
    ranked = np.empty_like(value)
    for d in reversed(inner):
        p, low, high = slice(cuts[d], cuts[d + 1]), levels[d + 1], levels[d + 2]
        start = first[p] - low
        # With the parent as leading digit, one sort puts the arguments of each operator in order.
        keyed = value[low:high] + 10 * parent[low - 1 : high - 1]
        keyed.sort()
        ranked[low:high] = keyed % 10
        picked = (ranked[left[p]] + ranked[right[p]]) // 2
        value[nodes[p]] = np.where(is_sum[p], np.add.reduceat(value[low:high], start) % 10, picked)
        size[nodes[p]] = 2 + np.add.reduceat(size[low:high], start)

    place = np.zeros_like(value)  # of the node's first token
    before = size.cumsum() - size
    for d in inner:
        p, low, high = slice(cuts[d], cuts[d + 1]), levels[d + 1], levels[d + 2]
        shift = place[nodes[p]] + 1 - before[first[p]]
        place[low:high] = before[low:high] + shift[parent[low - 1 : high - 1] - cuts[d]]

    tokens = np.empty(tree.length, np.int32)
    tokens[place] = ZERO + digits
    tokens[place[nodes]] = MIN + operators
    tokens[place[nodes] + size[nodes] - 1] = CLOSE
    return int(value[0]), tokens


def stack(examples: list[Example]) -> Example:
    return {key: np.stack([one[key] for one in examples]) for key in examples[0]}


@dataclass(frozen=True)
class ListOps(Stored):
    """Nested prefix expressions of MIN, MAX, MED and SM over digits: name the value (Long Range Arena).

    Protocol `lra` reads the tokens alone, at most 2,000. Protocol `s4` (https://github.com/state-spaces/s4,
    src/dataloaders/lra.py) puts an end mark after them; its length is 2048, and its 18 ids count besides the 17 here an
    unknown token, which never comes.
    """

    name: ClassVar[str] = "listops"
    set_name: ClassVar[str] = "lra_listops"
    kind: ClassVar[str] = "classify"
    n_classes: ClassVar[int] = 10

    length: Length = 2000  # tokens, padding included
    max_depth: Annotated[int, within(2, 100)] = 10  # levels of the tree
    max_args: Annotated[int, within(2, 1000)] = 10  # arguments of one operator, from 2 on
    min_length: Length = 500  # a tree has more tokens than this; a lone digit is one token long
    max_length: Length = 2000  # and fewer than this
    n_train: Count = 96_000
    n_validation: Count = 2000
    n_test: Count = 2000
    protocol: Literal["lra", "s4"] = "lra"
    source: Literal["law", "released"] = "law"  # released: what was prepared below `root`, by the law's defaults

    @property
    def on_disk(self) -> bool:
        return self.source == "released"

    @property
    def vocab_size(self) -> int:
        return len(TOKENS) + (self.protocol == "s4")

    @property
    def costly(self) -> bool:
        return not self.on_disk

    def check(self) -> None:
        if self.on_disk:
            self.check_released()
        super().check()
        nodes = [self.max_args**d for d in range(self.max_depth)]
        longest = sum(nodes) + sum(nodes[:-1])
        # A lone digit is one token long: from min_length 1 on, every tree kept has an operator at its root.
        self.bound("min_length", 1, longest - 1, f"the largest tree has {longest} tokens")
        self.bound("max_length", self.min_length + 2, why=f"min_length {self.min_length}, both bounds excluded")
        end = int(self.protocol == "s4")
        self.bound("length", min(self.max_length - 1, longest) + end, why="the longest tree kept must fit")

    def check_released(self) -> None:
        """What was released has its own law: a setting of it that was changed would be read by nobody."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("length", "protocol", "source", "root") and value != field.default:
                raise UserError(
                    f"data.listops.{field.name} is {value}, but source='released' has its own law; "
                    f"closest: {field.default}, or source=law"
                )

    def sizes(self) -> dict[str, int | None]:
        if self.on_disk:
            return {split: len(self.stored.arrays[f"{split}_values"]) for split in SPLITS}
        return {"train": self.n_train, "validation": self.n_validation, "test": self.n_test}

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        return super().examples(split, index, rng) if self.on_disk else stack([self.shown(*self.make(rng))])

    def rows(self, split: str, places: np.ndarray) -> Example:
        return stack([self.shown(*self.read(split, place)) for place in places])

    def shown(self, value: int, tokens: np.ndarray, depth: int) -> Example:
        """A tree of a value and so many levels as the protocol has it."""
        n = len(tokens)
        inputs, segments = np.zeros((2, self.length), np.int32)
        inputs[:n] = tokens
        if self.protocol == "s4":
            inputs[n] = END
        segments[: n + (self.protocol == "s4")] = 1
        return {
            "inputs": inputs,
            "segments": segments,
            "targets": np.array(value, np.int32),
            "weights": np.array(1, np.float32),
            "attr_length": np.array(n.bit_length() - 1, np.int32),
            "attr_depth": np.array(depth - 2, np.int32),
        }

    def read(self, split: str, index: int) -> tuple[int, np.ndarray, int]:
        """Value, tokens and levels of a tree that was released."""
        arrays = self.stored.arrays
        tokens = arrays[f"{split}_tokens"][slice(*arrays[f"{split}_starts"][index : index + 2])]
        open_brackets = np.cumsum((tokens >= MIN).astype(np.int32) - 2 * (tokens == CLOSE))
        return arrays[f"{split}_values"][index], tokens, 1 + int(open_brackets.max())

    def make(self, rng: np.random.Generator) -> tuple[int, np.ndarray, int]:
        """Value, tokens and levels of a tree by the law."""
        for _ in range(_TRIES):
            tree = grow(rng, self.max_depth, self.max_args, self.max_length)
            if tree is not None and self.min_length < tree.length < self.max_length:
                break
        else:
            raise UserError(
                f"no tree of {self.min_length} < tokens < {self.max_length} in {_TRIES:,} tries; lower "
                f"data.listops.min_length or raise max_depth ({self.max_depth}) or max_args ({self.max_args})"
            )
        return *solve(tree, rng.integers(10, size=tree.levels[-1])), len(tree.levels) - 1

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        return {
            "length": bins.labels(self.max_length - 1),  # of the tree, in tokens
            "depth": tuple(str(d) for d in range(2, self.max_depth + 1)),  # levels of the tree
        }

    @property
    def law(self) -> tuple[int, ...]:
        return self.max_depth, self.max_args, self.min_length, self.max_length

    def baselines(self) -> dict[str, float]:
        """Always the commonest value; and the commonest value under each root operator, the first token."""
        if self.on_disk:
            return guessed(*(self.roots_and_values(split) for split in ("train", "test")))
        return dict(KNOWN) if self.law == LRA else dict(sampled(self))

    def roots_and_values(self, split: str) -> np.ndarray:
        """`[2, n]`, of the trees that were released."""
        arrays = self.stored.arrays
        return np.stack([arrays[f"{split}_tokens"][arrays[f"{split}_starts"][:-1]] - MIN, arrays[f"{split}_values"]])

    def parameters(self) -> dict[str, Any]:
        """What came later says nothing while it is as it always was."""
        later = {"protocol": "lra", "source": "law"}
        return {key: value for key, value in super().parameters().items() if later.get(key) != value}


@functools.cache
def sampled(task: ListOps, samples: int = 2000) -> dict[str, float]:
    """By the law: guesses from as many trees as they are tried on."""
    stream = Stream(0, "baselines")
    found = [(tokens[0] - MIN, value) for value, tokens, _ in (task.make(stream.at(i)) for i in range(2 * samples))]
    return guessed(*np.split(np.array(found).T, 2, axis=1))


def guessed(known: np.ndarray, asked: np.ndarray) -> dict[str, float]:
    """How often the guesses that fit known trees best are right of others. Both: root operators, values; `[2, n]`."""
    counts = np.zeros((4, 10))
    np.add.at(counts, tuple(known), 1)
    roots, values = asked
    return {
        "majority": float(np.mean(values == counts.sum(0).argmax())),
        "root operator": float(np.mean(values == counts.argmax(1)[roots])),
    }
