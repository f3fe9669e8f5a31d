"""Attention by sparse patterns: each by its definition, pair by pair, and at its true cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.ops.block_attention import in_parts
from model.ops.mask import CAUSAL, Prefix, block_matrix, window
from model.ops.patterns import BigBird, Chunk, Columns, Dilated, FirstQueries, Table
from tests import zoo
from tests.jaxprs import inner
from tests.test_mask import pairs_of

H, K = 4, zoo.WIDTH // 4
DIRECTIONS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])


# Patterns


def every(step, back, ahead):
    return lambda q, k: (q - k) % step == 0 and -ahead * step <= q - k <= back * step


def columns(n, last, ahead):
    return lambda q, k: q == k or (k % n >= n - last and (ahead or k <= q))


def table(*rows):
    def truth(q, k):
        i, j = q // 5, k // 5
        while max(i, j) >= len(rows):
            i, j = i - 1, j - 1
        return min(i, j) >= 0 and rows[i][j] == "1"

    return truth


MASKS = {
    "chunk": (Chunk(7), lambda q, k: q // 7 == k // 7),
    "causal chunk": (Chunk(7) & CAUSAL, lambda q, k: q // 7 == k // 7 and k <= q),
    "dilated": (Dilated(3, 4, 2), every(3, 4, 2)),
    "strided": (Dilated(5, None, 0), every(5, 1000, 0)),
    "columns": (Columns(8, 2, None), columns(8, 2, True)),
    "causal columns": (Columns(8, 3, 0), columns(8, 3, False)),
    "table": (Table(5, ("101", "110", "011")), table("101", "110", "011")),
    "first queries": (FirstQueries(4), lambda q, k: q < 4),
    "global": (Prefix(3) | window(4) | FirstQueries(3), lambda q, k: min(q, k) < 3 or abs(q - k) < 4),
}


@pytest.mark.quick
@pytest.mark.parametrize(("mask", "truth"), MASKS.values(), ids=MASKS.keys())
def test_a_pattern_is_its_definition_and_its_blocks_hide_nothing(mask, truth):
    n, at = 60, np.arange(60)
    seen = np.asarray([[truth(q, k) for k in at] for q in at])
    np.testing.assert_array_equal(pairs_of(mask, at, at), seen)
    np.testing.assert_array_equal(pairs_of(mask, jnp.asarray(at), jnp.asarray(at)), seen)
    for l, m in ((5, 5), (4, 12), (10, 3), (1, 1), (7, 7)):
        q, k = -(-n // l), -(-n // m)
        wide = np.asarray([[truth(a, b) for b in range(k * m)] for a in range(q * l)]).reshape(q, l, k, m)
        matrix = block_matrix(mask, q, k, l, m)
        assert not (wide.any((1, 3)) & ~matrix).any()
        i, j = np.mgrid[:q, :k]
        whole = np.broadcast_to(mask.block(i * l, i * l + l - 1, j * m, j * m + m - 1).every, (q, k))
        assert not (whole & ~wide.all((1, 3))).any()
        if mask.grain() in (None, l, m):  # no more is listed than is seen
            np.testing.assert_array_equal(matrix, wide.any((1, 3)))
        left = pairs_of(mask.left(l, m), np.arange(q * l), np.arange(k * m)).reshape(q, l, k, m)
        np.testing.assert_array_equal(left & matrix[:, None, :, None], wide)
    for reach, distance in zip(mask.reach(), (at[:, None] - at, at - at[:, None]), strict=True):
        assert reach is None or distance[seen].max() <= reach


def test_only_what_a_pattern_shows_is_listed():
    """Blocks of 64 tokens of 4,096, of which each has so many to look at, and no block more."""
    found = {mask: block_matrix(mask, 64, 64, 64, 64).sum(1) for mask in (Chunk(64), Dilated(1, 63, 0), Prefix(64))}
    assert [counts.max() for counts in found.values()] == [1, 2, 1]
    matrix = block_matrix(Prefix(64) | window(65) | FirstQueries(64), 64, 64, 64, 64)
    first, others = sorted(in_parts(matrix), key=lambda part: len(part.rows))
    assert first.keys.shape == (1, 64) and others.keys.shape == (63, 4)
    listed = np.zeros_like(matrix)
    for part in (first, others):
        for row, keys in zip(part.rows, part.keys, strict=True):
            listed[row, keys[keys >= 0]] = True
    np.testing.assert_array_equal(listed, matrix)


def test_random_blocks_are_drawn_for_good_and_evenly():
    """By the seed and the block's number, whatever the length; each earlier block as often as another."""
    one, other = (BigBird(4, 1, 2, 3, seed) for seed in (0, 1))
    i, j = np.mgrid[:400, :400]
    seen = one.shows(i, j)
    assert (seen == seen.T).all() and (seen != other.shows(i, j)).any()
    np.testing.assert_array_equal(seen[:50, :50], one.shows(*np.mgrid[:50, :50]))
    earlier = np.tril(seen, -2)[:, 1:]
    assert (earlier[5:].sum(1) == 3).all()
    share = np.concatenate([np.flatnonzero(row) / (i - 2) for i, row in enumerate(earlier) if i > 20])
    counts, _ = np.histogram(share, bins=6, range=(0, 1))
    assert counts.min() > 0.8 * counts.max(), counts


# Mixers


def definition(mixer, p, x, sees):
    """Softmax attention of one row, a pair at a time, over the pairs (head, query, key) that are seen."""
    heads = {name: np.einsum("ld,dhk->lhk", x, p[name]["kernel"]) for name in "qkv"}
    y = np.zeros_like(heads["q"])
    for h in range(H):
        for i in range(len(x)):
            seen = [j for j in range(len(x)) if sees(h, i, j) and (j <= i or not mixer.causal)]
            weights = np.exp([heads["q"][i, h] @ heads["k"][j, h] / np.sqrt(K) for j in seen])
            y[i, h] = sum(w * heads["v"][j, h] for w, j in zip(weights, seen, strict=True)) / np.sum(weights)
    return np.einsum("lhk,hkd->ld", y, p["out"]["kernel"])


# By seed 5, of blocks from the third on: one of each half of those between the first and its neighbour. For good: a
# model that was trained with them has them.
DRAWN = [[], [], [], [1], [1, 2], [1, 3], [2, 3], [1, 5], [3, 5], [3, 6], [4, 5], [4, 8]]


def bigbird(h, i, j):
    """Of blocks of 3: near ones, the first, and what either has drawn."""
    i, j = i // 3, j // 3
    return abs(i - j) < 2 or 0 in (i, j) or i in DRAWN[j] or j in DRAWN[i]


DEFINITIONS = {
    "local": (dict(block=5), lambda h, i, j: i // 5 == j // 5),
    "dilated": (dict(seen=3, dilation=4), lambda h, i, j: abs(i - j) in (0, 4, 8)),
    "strided": (dict(stride=5), lambda h, i, j: (i - j) % 5 == 0 if h % 2 else abs(i - j) <= 5),
    "fixed": (dict(stride=5, summary=2), lambda h, i, j: i == j or j % 5 > 2 if h % 2 else i // 5 == j // 5),
    "bigbird": (dict(block=3, near_blocks=2, random_blocks=2, seed=5), bigbird),
    # Of blocks of 4 tokens: their own, the one before, and that three before.
    "block_sparse": (dict(block=4), lambda h, i, j: i // 4 - j // 4 in (0, 1, 3)),
}


@DIRECTIONS
@pytest.mark.few(6)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_mixer_is_its_papers_definition(name, causal):
    """In a row, and in packed documents with padding inside, whose patterns begin anew."""
    settings, sees = DEFINITIONS[name]
    mixer, x = MIXERS[name](width=zoo.WIDTH, causal=causal, **settings), np.asarray(zoo.inputs(2, 34), np.float64)
    variables = zoo.params(mixer)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    y, _ = zoo.apply(mixer)(variables, x.astype(np.float32), Context())
    for row in range(2):
        assert zoo.far(y[row], definition(mixer, wide, x[row], sees)) < 1e-5
    segments = np.asarray([[0] + [1] * 7 + [2] * 9 + [0] * 3 + [2] * 12 + [0] * 2, [1] * 34])
    y, _ = zoo.apply(mixer)(variables, x.astype(np.float32), zoo.context(segments))
    for document in (1, 2):
        there = segments[0] == document
        assert zoo.far(y[0, there], definition(mixer, wide, x[0, there], sees)) < 1e-5


@DIRECTIONS
def test_longformer_is_its_papers_definition(causal):
    """The first tokens by projections of their own, the others by the first ones; of each document in a packed row."""
    first, near = 3, 4
    mixer = MIXERS["longformer"](width=zoo.WIDTH, causal=causal, near=near, global_tokens=first)
    x, variables = np.asarray(zoo.inputs(1, 30), np.float64), zoo.params(mixer)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    own = p | {name: p[f"global_{name}"] for name in "qkv"}

    def truth(x):
        whole = definition(mixer, own, x, lambda h, i, j: True)
        others = definition(mixer, p, x, lambda h, i, j: j < first or abs(i - j) < near)
        return np.concatenate([whole[:first], others[first:]])

    y, _ = zoo.apply(mixer)(variables, x.astype(np.float32), Context())
    assert zoo.far(y[0], truth(x[0])) < 1e-5
    segments = np.asarray([[0] + [1] * 10 + [2] * 2 + [0] * 2 + [3] * 9 + [0] + [3] * 5])
    y, _ = zoo.apply(mixer)(variables, x.astype(np.float32), zoo.context(segments))
    for document in (1, 2, 3):
        assert zoo.far(y[segments == document], truth(x[segments == document])) < 1e-5


@pytest.mark.scale
@pytest.mark.parametrize("name", ["dilated", "strided", "fixed"])
def test_a_position_bias_is_that_of_true_distances(name):
    """Though tokens are moved together: as of all pairs, in packed rows."""
    mixer = zoo.make((name, DEFINITIONS[name][0], "alibi"))
    segments = np.asarray([[0, 1, 0] + [1] * 15 + [2] * 10 + [0] * 3 + [2] * 3])
    x, variables, ctx = zoo.inputs(1, 34), zoo.params(mixer), zoo.context(segments)
    y, want = (zoo.apply(one)(variables, x, ctx)[0] for one in (mixer, mixer.clone(implementation="reference")))
    assert zoo.far(y[segments > 0], want[segments > 0]) < 1e-5


# Cost


def multiply_adds(jaxpr) -> int:
    """Of all matrix products of a program, those in a loop as often as it turns; of branches, the dearest."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            size = np.prod([eqn.invars[0].aval.shape[axis] for axis in contracted])
            total += int(np.prod(eqn.outvars[0].aval.shape) * size)
        within = [multiply_adds(program) for program in inner(eqn)]
        if eqn.primitive.name == "cond":
            within = [max(within)]
        total += sum(within) * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else sum(within)
    return total


def traced(mixer, L: int, segments=None):
    """The program of a training step."""
    ctx = Context() if segments is None else zoo.context(segments)

    def objective(variables, x):
        return jnp.sum(mixer.apply(variables, x, ctx)[0] ** 2)

    return jax.jit(jax.grad(objective, argnums=(0, 1))).trace(zoo.params(mixer), zoo.inputs(1, L))


def work(*call) -> int:
    return multiply_adds(traced(*call).jaxpr.jaxpr)


def memory(*call) -> int:
    return traced(*call).lower().compile().memory_analysis().temp_size_in_bytes


COSTS = {  # settings at a length
    "local": lambda L: dict(block=32),
    "dilated": lambda L: dict(seen=16, dilation=4),
    "strided": lambda L: dict(stride=int(L**0.5)),
    "fixed": lambda L: dict(stride=int(L**0.5), summary=4),
    "block_sparse": lambda L: dict(block=32),
    "bigbird": lambda L: dict(block=16),
    "longformer": lambda L: dict(near=32),
}


def sized(name: str, L: int, causal: bool = True):
    return MIXERS[name](width=zoo.WIDTH, causal=causal, **COSTS[name](L))


def most(name: str) -> float:
    """How many times as much at four times the length."""
    return 9 if MIXERS[name].work == 1.5 else 4.6


@DIRECTIONS
@pytest.mark.few(5)
@pytest.mark.parametrize("name", COSTS)
def test_work_is_that_of_the_pattern(name, causal):
    """From L to 4 L: a mask over all pairs would have 16 times the work."""
    few, many = (work(sized(name, L, causal), L) for L in (4096, 16384))
    assert many < most(name) * few, many / few


@pytest.mark.scale
@DIRECTIONS
@pytest.mark.parametrize("name", COSTS)
def test_memory_is_that_of_the_pattern(name, causal):
    few, many = (memory(sized(name, L, causal), L) for L in (4096, 16384))
    assert many < most(name) * few, many / few


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["local", "dilated", "strided", "fixed", "block_sparse"])
def test_packed_rows_cost_no_more(name):
    """Where it is known how far a pattern reaches; less than twice as much as where documents are not packed."""
    few, many = (work(sized(name, L), L, np.ones((1, L), int)) for L in (1024, 4096))
    assert many < most(name) * few and many < 2 * work(sized(name, 4096), 4096)


def test_the_count_tells_a_mask_over_all_pairs_from_a_pattern():
    """What the laws above are to catch: the same attention by masking."""
    few, many = (work(sized("local", L).clone(implementation="xla"), L) for L in (1024, 4096))
    assert many > 12 * few


def test_a_window_with_gaps_may_reach_farther_than_a_number_of_32_bits():
    mixer, x = zoo.make(("dilated", dict(seen=10**5, dilation=10**5), "none")), zoo.inputs(1, 6)
    variables = zoo.params(mixer)
    y, _ = zoo.apply(mixer)(variables, x, zoo.context(L=6), mixer.init_state(1, 6))
    alone, _ = zoo.apply(mixer)(variables, x[:, 5:], Context())
    np.testing.assert_allclose(y[:, 5:], alone, atol=1e-6)


# Refusals


REFUSED = {
    "one head for two patterns": ("strided", dict(n_heads=1), "n_heads 1 is too few for 2 patterns .* closest: 2"),
    "a summary of more than there is": ("fixed", dict(stride=4, summary=5), "summary 5 is more than .* closest: 4"),
    "a table that is no square": ("block_sparse", dict(pattern="10;111"), "'10;111' is no square of 0 and 1"),
    "a table that sees ahead": ("block_sparse", dict(pattern="11;01"), "lets block 0 see block 1, which comes later"),
    "a block that is hidden from itself": ("block_sparse", dict(pattern="10;10"), "hides block 1 from itself"),
    "a block of nothing": ("local", dict(block=0), "block is 0; allowed: a whole number from 1 .* closest: 1"),
}


@pytest.mark.quick
@pytest.mark.parametrize(("name", "settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_mistakes_are_told_by_name(name, settings, message):
    with pytest.raises(UserError, match=message):
        zoo.params(MIXERS[name](width=zoo.WIDTH, **settings))
