"""Linear attention and its kin by their papers' definitions, a score for every pair of tokens, in float64."""

import jax
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.ops.features import FEATURES
from tests import zoo

L = 20


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def heads(p, x, *names):
    return [np.einsum("ld,dhk->hlk", x, p[name]["kernel"]) for name in names]


def layer_norm(y, scale, bias, eps):
    """Of the last axis; y: [H, L, V], scale and bias: [H, V]."""
    centred = y - y.mean(-1, keepdims=True)
    normed = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps)
    return normed * scale[:, None] + bias[:, None]


def pairs(score, q, k, v, causal=True, normalised=True):
    """Outputs `[H, L, V]` by a weight for each pair of tokens, `score(head, i, j)`."""
    H, n, y = len(q), len(q[0]), np.zeros(v.shape)
    for h in range(H):
        for i in range(n):
            seen = range(i + 1) if causal else range(n)
            weights = np.asarray([score(h, i, j, q[h, i], k[h, j]) for j in seen])
            y[h, i] = weights @ v[h, seen] / (max(weights.sum(), 1e-6) if normalised else 1)  # none may be seen
    return y


def close(mixer, definition, within=1e-5):
    """Whether a mixer's outputs are what a definition makes of each row, `[H, L, V]`, before the last map."""
    variables, x = zoo.params(mixer), zoo.inputs(2, L)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    y, _ = zoo.apply(mixer)(variables, x, Context())
    for row in range(2):
        out = definition(wide, np.asarray(x[row], np.float64))
        assert zoo.far(y[row], np.einsum("hlv,hvd->ld", out, wide["out"]["kernel"])) < within


KERNELS = {
    "elu": lambda q, k: np.where(q > 0, q + 1, np.exp(q)) @ np.where(k > 0, k + 1, np.exp(k)),
    "identity": lambda q, k: q @ k,
    "relu": lambda q, k: np.maximum(q, 0) @ np.maximum(k, 0),
    "squared": lambda q, k: np.maximum(q, 0) ** 2 @ np.maximum(k, 0) ** 2,
    "taylor": lambda q, k: 1 + (s := q @ k / np.sqrt(len(q))) + s**2 / 2,
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("feature", FEATURES)
def test_linear_is_a_product_of_features(feature, causal):
    mixer = MIXERS["linear"](width=zoo.WIDTH, causal=causal, feature=feature, head_dim=6)

    def definition(p, x):
        def score(h, i, j, q, k):
            return KERNELS[feature](q, k)

        return pairs(score, *heads(p, x, "q", "k", "v"), causal, normalised=feature != "identity")

    close(mixer, definition)


def test_taylor_features_are_of_pairs():
    """Half as many as there are ordered pairs."""
    assert [FEATURES["taylor"].size(n) for n in (1, 2, 16)] == [3, 6, 153]
    mixer = MIXERS["linear"](width=64, feature="taylor")
    assert mixer.init_state(2, 0).shape == (2, 4, 153, 17)


def test_no_state_is_carried_both_ways():
    mixer = MIXERS["linear"](width=zoo.WIDTH, causal=False)
    with pytest.raises(UserError, match=r"cannot carry a state; set model.causal=True"):
        mixer.apply(zoo.params(mixer), zoo.inputs(1, 4), Context(), mixer.init_state(1, 4))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"model.linear.n_heads 3 does not divide the width 16; closest that does: 2"):
        zoo.shapes(MIXERS["linear"](width=16, n_heads=3))
