"""What attention maps and layer outputs say, in numbers: from arrays alone, without a model.

A map is the weights `[L, L]` of one head over one document: row i is what query i gives to each key.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

SCORES = {
    "first_token": "weight on the first token",
    "previous_token": "weight on the previous token",
    "induction": "induction score",
}


def row_entropy(weights: np.ndarray) -> np.ndarray:
    """Nats, `[...]` of weights `[..., M]`: 0 with all weight on one key, log n with equal weight on n.

    Of the weights' shares in their sum, which is below 1 where a learned sink takes a part; NaN of no weight at all.
    """
    total = weights.sum(-1, dtype=np.float64)
    terms = weights * np.log(np.where(weights > 0, weights, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.maximum(np.log(total) - terms.sum(-1, dtype=np.float64) / total, 0)


def first_token_share(weights: np.ndarray) -> np.ndarray:
    """Mean weight, `[...]` of maps `[..., L, L]`, that the queries after the first token give to it."""
    return along(np.mean, weights[..., 1:, 0])


def previous_token_score(weights: np.ndarray) -> np.ndarray:
    """Mean weight, `[...]` of maps `[..., L, L]`, of a query on the token before it."""
    return along(np.mean, np.diagonal(weights, -1, -2, -1))


def induction_score(weights: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Mean weight, `[...]` of maps `[..., L, L]`, of a query on what followed its token `[L]` earlier on.

    Over the queries whose token came before; NaN if none did (https://arxiv.org/abs/2209.11895).
    """
    followed = np.tri(len(tokens), dtype=bool)
    followed[:, 1:] &= tokens[:, None] == tokens[:-1]
    followed[:, 0] = False
    found = np.einsum("...lm,lm->...l", weights, followed)
    return along(np.mean, found[..., followed.any(-1)])


def effective_rank(matrix: np.ndarray) -> float:
    """exp of the entropy of the singular values' shares in their sum (Roy and Vetterli, EUSIPCO 2007).

    Of the vectors `[L, D]` that a layer leaves in the residual stream it is how many directions they take up: from 1,
    all along one line, to min(L, D).
    """
    return float(np.exp(row_entropy(np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False))))


def seen(weights: np.ndarray) -> np.ndarray:
    """The keys that each query can see, `[L, L]`: those that some head of a layer `[H, L, L]` gives weight to."""
    return (weights > 0).any(0)


def equal_weights(mask: np.ndarray) -> np.ndarray:
    """The map `[L, L]` of a head that gives the same weight to every key it sees."""
    return mask / np.maximum(mask.sum(-1, keepdims=True), 1)


def scores(weights: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """Every number of one map `[L, L]`; entropies are of the queries that have a choice, of two keys or more."""
    n = mask.sum(-1)
    entropy = row_entropy(weights[n > 1])
    return {
        "entropy": {"mean": along(np.mean, entropy), "min": along(np.min, entropy), "max": along(np.max, entropy)},
        "uniform": along(np.mean, np.log(n[n > 1])),
        "first_token": first_token_share(weights),
        "previous_token": previous_token_score(weights),
        "induction": induction_score(weights, tokens),
        "no_token": np.maximum(1 - along(np.mean, weights.sum(-1)), 0),  # what a learned sink takes
    }


def along(reduce: Callable[..., np.ndarray], values: np.ndarray) -> np.ndarray:
    """`reduce` over the last axis; NaN if that is empty."""
    return reduce(values, axis=-1) if values.shape[-1] else np.full(values.shape[:-1], np.nan)
