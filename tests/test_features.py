"""Random features of softmax's kernel: how close their products come to it."""

import jax.numpy as jnp
import numpy as np

from model.ops.features import directions, log_positive

K = 8


def error(F: int, seeds: int = 30) -> float:
    """Of attention with F features, relative, over several draws of directions."""
    rng = np.random.default_rng(0)
    q, k, v = (size * rng.normal(size=(32, K)) for size in (0.5, 0.5, 1))  # the spread grows with e^(|q + k|^2)

    def attended(scores):
        return scores @ v / scores.sum(-1, keepdims=True)

    true = attended(np.exp(q @ k.T / np.sqrt(K)))
    gaps = []
    for seed in range(seeds):
        left, right = (np.exp(log_positive(jnp.asarray(x), directions(seed, F, K))) for x in (q, k))
        gaps.append(np.linalg.norm(attended(left @ right.T) - true))
    return float(np.sqrt(np.mean(np.square(gaps))) / np.linalg.norm(true))


def test_more_features_come_closer_to_softmax():
    """By about the root of four for four times as many."""
    errors = [error(F) for F in (8, 32, 128, 512)]
    ratios = np.asarray(errors[:-1]) / np.asarray(errors[1:])
    assert (ratios > 1.4).all() and errors[-1] < 0.15, errors


def test_directions_are_orthogonal_and_as_long_as_normal_vectors():
    drawn = directions(0, 20, K)  # two whole sets and a part
    assert drawn.shape == (20, K)
    for one in (drawn[:K], drawn[K : 2 * K], drawn[2 * K :]):
        gram = one @ one.T
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-12)
    many = directions(1, 4096, K)
    np.testing.assert_allclose(np.mean(np.sum(many**2, axis=-1)), K, rtol=0.05)
    np.testing.assert_allclose(many.T @ many / 4096, np.eye(K), atol=0.1)


def test_directions_are_a_function_of_the_seed():
    np.testing.assert_array_equal(directions(5, 9, K), directions(5, 9, K))
    assert np.abs(directions(5, 9, K) - directions(6, 9, K)).max() > 0.1
