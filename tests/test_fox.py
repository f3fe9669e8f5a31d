"""Forgetting attention by its definition, and what it is where every gate is the same."""

import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context
from model.mixers.attention import Attention
from model.mixers.fox import Fox
from model.positions import POSITIONS
from tests import zoo

H, K = 4, zoo.WIDTH // 4


def definition(p, x):
    """The paper's recurrence of one row: every older key has its weight multiplied by each gate since."""
    heads = {name: np.einsum("ld,dhk->lhk", x, p[name]["kernel"]) for name in "qkv"}
    gates = 1 / (1 + np.exp(-(x @ p["forget"]["kernel"] + p["forget"]["bias"])))
    y = np.zeros_like(heads["v"])
    for h in range(H):
        for i in range(len(x)):
            weights = [
                np.exp(heads["q"][i, h] @ heads["k"][j, h] / np.sqrt(K)) * np.prod(gates[j + 1 : i + 1, h])
                for j in range(i + 1)
            ]
            y[i, h] = np.asarray(weights) @ heads["v"][: i + 1, h] / np.sum(weights)
    return np.einsum("lhk,hkd->ld", y, p["out"]["kernel"])


def test_fox_is_its_papers_definition():
    mixer, x = Fox(width=zoo.WIDTH), zoo.inputs(2, 20)
    variables = zoo.params(mixer)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    y, _ = mixer.apply(variables, x, Context())
    for row in range(2):
        assert zoo.far(y[row], definition(wide, np.asarray(x[row], np.float64))) < 1e-5


def test_gates_that_are_all_alike_are_alibi():
    """One slope a head: -log f."""
    x = zoo.inputs(2, 20)
    alibi = Attention(width=zoo.WIDTH, position=POSITIONS["alibi"])
    variables = jax.device_get(zoo.params(alibi))
    slopes = 2.0 ** (-8 * np.arange(1, H + 1) / H)
    constant = dict(kernel=np.zeros((zoo.WIDTH, H), np.float32), bias=np.log(1 / np.expm1(slopes)).astype(np.float32))
    fox = dict(params={**{name: variables["params"][name] for name in ("q", "k", "v", "out")}, "forget": constant})
    want, _ = alibi.apply(variables, x, zoo.context(L=20))
    got, _ = Fox(width=zoo.WIDTH).apply(jax.tree.map(jnp.asarray, fox), x, Context())
    np.testing.assert_allclose(got, want, atol=2e-5)
