"""From logits to a token: filters keep what they should, and tokens come as often as they should."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.sample import Sampling, filter_top_k, filter_top_p, sample
from model.errors import UserError

KEY = jax.random.key(7)
pytestmark = pytest.mark.usefixtures("quickly_compiled")
PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 3.0


def chances(logits) -> np.ndarray:
    return np.asarray(jax.nn.softmax(logits))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("filtered", "want"),
    [
        (filter_top_k(LOGITS, 0), PROBABILITIES),
        (filter_top_k(LOGITS, 5), PROBABILITIES),
        (filter_top_k(LOGITS, 9), PROBABILITIES),
        (filter_top_k(LOGITS, 1), [0, 1, 0, 0, 0]),
        (filter_top_k(LOGITS, 2), [0, 4 / 7, 0, 3 / 7, 0]),
        (filter_top_p(LOGITS, 1.0), PROBABILITIES),
        (filter_top_p(LOGITS, 0.01), [0, 1, 0, 0, 0]),
        (filter_top_p(LOGITS, 0.39), [0, 1, 0, 0, 0]),
        (filter_top_p(LOGITS, 0.41), [0, 4 / 7, 0, 3 / 7, 0]),
        (filter_top_p(LOGITS, 0.84), [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (filter_top_p(LOGITS, 0.86), [2 / 19, 8 / 19, 0, 6 / 19, 3 / 19]),
        (filter_top_p(filter_top_k(LOGITS, 2), 0.5), [0, 1, 0, 0, 0]),  # 4/7 alone is enough
    ],
)
def test_filters_keep_what_they_should(filtered, want):
    np.testing.assert_allclose(chances(filtered), want, atol=1e-6)


@pytest.mark.quick
def test_filters_that_keep_all_change_nothing_and_ties_go_by_id():
    uneven = jnp.asarray([[40.0, 0.0, -40.0, -80.0]])  # in float32 the first alone already sums to 1
    np.testing.assert_array_equal(filter_top_p(uneven, 1.0), uneven)
    np.testing.assert_array_equal(filter_top_k(uneven, 0), uneven)
    equal = jnp.zeros((2, 4))
    np.testing.assert_array_equal(np.isfinite(filter_top_k(equal, 3)), [[1, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(np.isfinite(filter_top_p(equal, 0.5)), [[1, 1, 0, 0]] * 2)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2 / np.sum(PROBABILITIES**2)),
        ({"top_k": 3}, np.array([0, 8, 0, 6, 3]) / 17),
        ({"top_p": 0.5}, np.array([0, 4, 0, 3, 0]) / 7),
        # The squares are as 16, 9, 2.25, 1, 0.25 of 28.5: cooled first, two of them reach 0.85.
        ({"temperature": 0.5, "top_p": 0.85}, np.array([0, 16, 0, 9, 0]) / 25),
    ],
)
def test_frequencies_are_the_probabilities(options, want):
    n = 20_000
    drawn = sample(jax.random.key(1), jnp.broadcast_to(LOGITS, (n, 5)), **options)
    seen = np.bincount(drawn, minlength=5) / n
    assert np.all(np.abs(seen - want) <= 4 * np.sqrt(want * (1 - want) / n))


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-30, 1e-4])
def test_without_heat_sampling_is_greedy(temperature):
    logits = jax.random.normal(jax.random.key(2), (64, 17)) * 30
    for options in ({}, {"top_k": 3, "top_p": 0.9}):
        np.testing.assert_array_equal(sample(KEY, logits, temperature, **options), jnp.argmax(logits, -1))


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_impossible_sampling_is_refused(wrong):
    (key,) = wrong
    with pytest.raises(UserError, match=f"{key} is .*allowed: .*(closest|usual): "):
        Sampling(**wrong)
