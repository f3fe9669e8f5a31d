"""Attention to blocks that the content chooses, against loops that follow the papers' definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from tests import zoo

H, L = 4, 23


def made(name: str, **settings):
    """A mixer in float64, its parameters and inputs, and what comes out; call with x64 enabled."""
    mixer = zoo.make((name, settings, "none"), dtype=jnp.float64)
    variables = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), zoo.params(mixer))
    x = np.random.default_rng(0).normal(size=(1, L, zoo.WIDTH))
    y, _ = mixer.apply(variables, x, Context())
    return variables["params"], x[0], np.asarray(y[0])


def projected(params, name: str, x: np.ndarray) -> np.ndarray:
    """`[L, H, K]`."""
    return np.einsum("ld,dhk->lhk", x, params[name]["kernel"])


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def out(params, heads: np.ndarray) -> np.ndarray:
    return np.einsum("lhk,hkd->ld", heads, params["out"]["kernel"])


@pytest.mark.parametrize(("block", "top", "groups"), [(4, 2, 4), (5, 1, 2), (3, 0, 1), (64, 3, 4)])
def test_moba_is_the_papers(block, top, groups):
    with jax.enable_x64(True):
        params, x, y = made("moba", block=block, top=top, n_kv_heads=groups)
    q, k, v = (projected(params, name, x) for name in "qkv")
    heads = np.zeros_like(q)
    for t in range(L):
        for h in range(H):
            keys, values = k[:, h // (H // groups)], v[:, h // (H // groups)]
            own = t // block
            gate = [q[t, h] @ keys[i * block : (i + 1) * block].mean(0) for i in range(own)]
            blocks = [*np.argsort(gate)[::-1][:top], own]
            seen = [s for i in blocks for s in range(i * block, (i + 1) * block) if s <= t]
            weights = softmax(np.array([q[t, h] @ keys[s] for s in seen]) / np.sqrt(q.shape[-1]))
            heads[t, h] = sum(w * values[s] for w, s in zip(weights, seen, strict=True))
    np.testing.assert_allclose(y, out(params, heads), atol=1e-10)


@pytest.mark.parametrize("name", ["moba"])
def test_they_look_back_only(name):
    with pytest.raises(UserError, match=f"{name} .* forward only.*causal is False; allowed: True"):
        zoo.shapes(MIXERS[name](width=16, causal=False))
