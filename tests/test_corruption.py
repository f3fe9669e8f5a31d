"""Corrupted rows: pure in their key, of static shape, at the rates asked for, with nothing of the text lost."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, poisson

from train import corruption

pytestmark = pytest.mark.quick

L, V = 64, 256
MASK = V
ROWS = 512


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(V, size=(ROWS, L), dtype=np.int32)


@pytest.fixture(scope="module")
def keys(tokens):
    return corruption.row_keys(jax.random.key(0), tokens)


def likely(hits: int, tries: int, chance: float) -> bool:
    """Whether a count lies where a binomial one lies but once in a million times."""
    low, high = binom.interval(1 - 1e-6, tries, chance)
    return low <= hits <= high


def masked(keys, tokens, real=None, rate=0.15, mask_share=0.8, random_share=0.1):
    call = partial(corruption.mask, rate=rate, mask_token=MASK, mask_share=mask_share, random_share=random_share)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(call))(keys, tokens, real))


def test_a_rows_draws_follow_from_the_key_and_its_content(tokens, keys):
    again = corruption.row_keys(jax.random.key(0), tokens[::-1])[::-1]
    assert (jax.random.key_data(keys) == jax.random.key_data(again)).all(), "in whatever batch it stands"
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == ROWS
    swapped = tokens[0].copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    assert corruption.content(jnp.array(swapped)) != corruption.content(jnp.array(tokens[0]))
    other = corruption.row_keys(jax.random.key(1), tokens)
    assert not (jax.random.key_data(keys) == jax.random.key_data(other)).all(1).any(), "another key, other draws"
    for a, b in zip(masked(keys, tokens), masked(keys, tokens), strict=True):
        assert (a == b).all()


def test_masks_change_the_chosen_and_nothing_else(tokens, keys):
    inputs, at, counts = masked(keys, tokens)
    assert at.shape == counts.shape == (ROWS, 10) and counts.all(), "round(0.15 x 64) of each row"
    assert all(len(set(row)) == 10 for row in at), "each a token of its own"
    chosen = np.zeros_like(tokens, bool)
    np.put_along_axis(chosen, at, True, axis=1)
    assert (inputs == tokens)[~chosen].all()
    places = Counter(at.ravel().tolist())
    assert all(likely(places[i], ROWS, 10 / L) for i in range(L)), "every place alike"


@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)])
def test_shares_of_masked_random_and_kept(tokens, keys, shares):
    inputs, at, _ = masked(keys, tokens, mask_share=shares[0], random_share=shares[1])
    new, old = np.take_along_axis(inputs, at, 1), np.take_along_axis(tokens, at, 1)
    n = new.size
    assert likely((new == MASK).sum(), n, shares[0])
    assert new.max() <= MASK
    drawn = new[(new != MASK) & (new != old)]
    assert likely(drawn.size, n, shares[1] * (1 - 1 / V)), "a token drawn is the true one once in V times"
    assert likely((new == old).sum(), n, 1 - sum(shares) + shares[1] / V)
    if shares[1] == 1:  # any id is drawn, the last one too
        counts = np.bincount(drawn, minlength=V)
        assert len(counts) == V and all(likely(count, drawn.size, 1 / V) for count in counts)


def test_padding_is_never_chosen_and_takes_no_share(tokens, keys):
    real = np.ones_like(tokens, bool)
    lengths = np.arange(ROWS) % (L + 1)
    for row, n in zip(real, lengths, strict=True):
        row[n // 2 : n // 2 + L - n] = False  # in the middle of the row
    inputs, at, counts = masked(keys, tokens, real)
    assert (inputs == tokens)[~real].all()
    assert (np.take_along_axis(real, at, 1) | ~counts).all()
    chosen = counts.sum(1)
    assert (np.abs(chosen - 0.15 * lengths) <= 0.5 + 1e-6)[lengths > 3].all()
    assert chosen[lengths <= 3].tolist() == np.minimum(lengths, 1)[lengths <= 3].tolist()


def restored(source: list[int], target: list[int]) -> list[int]:
    """The text that a source and a target were made of, by reading them."""
    hidden: dict[int, list[int]] = {}
    for token in target:
        if token >= V:
            assert token not in hidden, "a sentinel stands once"
            mark = token
            hidden[mark] = []
        else:
            hidden[mark].append(token)
    assert all(hidden.values()), "no sentinel stands for nothing"
    out = []
    for token in source:
        out += hidden.pop(token) if token >= V else [token]
    assert not hidden, "both have the same sentinels"
    return out


@pytest.mark.parametrize("density, mean", [(0.15, 3.0), (0.5, 3.0), (0.15, 8.0), (0.9, 1.0), (0.001, 3.0)])
def test_source_and_target_of_span_corruption_make_the_text(tokens, keys, density, mean):
    spans = jax.jit(jax.vmap(partial(corruption.spans, density=density, mean_span=mean, first_sentinel=V + 99)))
    source, target = map(np.asarray, spans(keys, tokens))
    noise, n = corruption.span_counts(L, density, mean)
    assert source.shape == (ROWS, L - noise + n) and target.shape == (ROWS, noise + n)
    for row, s, t in zip(tokens, source.tolist(), target.tolist(), strict=True):
        assert restored(s, t) == row.tolist()
        down = list(range(V + 99, V + 99 - n, -1))
        assert [x for x in s if x >= V] == [x for x in t if x >= V] == down, "sentinels count down"
        assert s[0] < V and s[-1] == down[-1], "text first, noise last"


def test_span_counts_are_those_of_t5():
    """568 tokens make a source of 512 and a target of 114, each with its end."""
    noise, n = corruption.span_counts(568, 0.15, 3.0)
    assert (568 - noise + n + 1, noise + n + 1) == (512, 114)


def test_every_segmentation_is_equally_likely():
    draws = jax.jit(jax.vmap(lambda key: corruption.segmentation(key, 6, 3)))
    found = Counter(map(tuple, np.asarray(draws(jax.random.split(jax.random.key(2), 4000))).tolist()))
    assert len(found) == 10 and all(min(way) > 0 and sum(way) == 6 for way in found)  # 5 choose 2
    assert all(likely(count, 4000, 1 / 10) for count in found.values())
    assert corruption.segmentation(jax.random.key(0), 1, 1).tolist() == [1]


def infilled(keys, tokens, rate=0.3, mean=3.0):
    call = jax.vmap(partial(corruption.infill, rate=rate, mean_span=mean, mask_token=MASK))
    return map(np.asarray, jax.jit(call)(keys, tokens))


@pytest.mark.parametrize("rate, mean", [(0.3, 3.0), (1.0, 3.0), (0.01, 3.0), (0.3, 1.0), (0.5, 20.0)])
def test_infilling_hides_its_share_and_keeps_the_rest_in_order(keys, rate, mean):
    text = np.tile(np.arange(L, dtype=np.int32), (ROWS, 1))  # each token tells where it stood
    noise = min(max(round(rate * L), 1), L)
    for row, real in zip(*infilled(keys, text, rate, mean), strict=True):
        size = int(real.sum())
        assert real.tolist() == [1] * size + [0] * (L - size) and not row[size:].any()
        shown = row[:size][row[:size] != MASK]
        assert len(shown) == L - noise and (np.diff(shown) > 0).all()
        assert 1 <= size - len(shown) <= noise
        # What is gone between two neighbours has a mask in its place.
        edges = np.concatenate([[-1], shown, [L]])
        for gap in np.flatnonzero(np.diff(edges) > 1):
            begin = 0 if gap == 0 else int(np.flatnonzero(row[:size] == edges[gap])[0]) + 1
            assert begin < size and row[begin] == MASK


def test_spans_have_poisson_lengths_and_stand_anywhere(keys):
    """Told where spans cannot touch: a mask between tokens that stay, and of those one in each row, at random."""
    text = np.tile(np.arange(L, dtype=np.int32), (ROWS, 1))
    lengths, masks_at = [], Counter()
    for row, real in zip(*infilled(keys, text), strict=True):
        row = row[: int(real.sum())].tolist()
        for i, token in enumerate(row):
            if token != MASK:
                continue
            masks_at[i * 4 // len(row)] += 1
            if 0 < i < len(row) - 1 and MASK not in (row[i - 1], row[i + 1]):
                lengths.append(row[i + 1] - row[i - 1] - 1)
    total = sum(masks_at.values())
    assert all(likely(masks_at[quarter], total, 1 / 4) for quarter in range(4))
    # The last span of a row is cut to fit, one in seven or so: zeros are a little rarer than the law, short ones not.
    assert 0.5 * poisson.pmf(0, 3) < np.mean(np.array(lengths) == 0) < 1.5 * poisson.pmf(0, 3)
    assert 2.5 < np.mean(lengths) < 3.1 and max(lengths) > 6


def test_the_poisson_table_is_the_law():
    np.testing.assert_allclose(corruption.poisson(3.0, 20), poisson.cdf(np.arange(20), 3.0), rtol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_short_rows(length):
    row = jnp.arange(length, dtype=jnp.int32)
    inputs, at, counts = corruption.mask(jax.random.key(0), row, None, 0.15, MASK, 1.0, 0.0)
    assert (np.asarray(inputs) == MASK).sum() == 1 and at.shape == counts.shape == (1,)
    source, real = corruption.infill(jax.random.key(0), row, 0.3, 3.0, MASK)
    assert (np.asarray(source) == MASK).sum() >= 1 and int(real.sum()) <= length
    if length > 1:
        made = corruption.spans(jax.random.key(0), row, 0.15, 3.0, V + 99)
        assert restored(*(np.asarray(x).tolist() for x in made)) == row.tolist()
