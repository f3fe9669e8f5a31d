"""Mega by its paper's definition, token by token; its attention function, its chunks, and what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers.mega import Mega, ema_system
from model.ops.laplace_attention import laplace_attention
from model.ops.mask import CAUSAL, FULL
from model.ops.patterns import Chunk
from tests import zoo

N = 23


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def averages(p, x, i):
    """The damped moving average of one direction, dimension by dimension."""
    alpha, delta = sigmoid(p["alpha"][i]), sigmoid(p["delta"][i])
    h, rows = np.zeros_like(alpha), []
    for token in x:
        h = alpha * (p["beta"][i] * token[:, None]) + (1 - alpha * delta) * h
        rows.append((p["eta"][i] * h).sum(-1))
    return np.asarray(rows)


def turned(x, position):
    """Pairs of dims, a half apart, as complex numbers."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def definition(p, x, mixer):
    """One row in float64, from the paper's equations."""
    K = mixer.qk_dim
    y = averages(p, x, 0)
    if not mixer.causal:
        y = y + averages(p, x[::-1], 1)[::-1]
    averaged = silu(y + p["omega"] * x)

    def map_of(name, x):
        return x @ p[name]["kernel"] + p[name]["bias"]

    z, v = silu(map_of("z", averaged)), silu(map_of("v", x))
    q, k = (z * p["kappa"][i] + p["mu"][i] for i in range(2))
    reset, update = silu(map_of("reset", averaged)), sigmoid(map_of("update", averaged))
    c, found = mixer.chunk or len(x), np.zeros_like(v)
    for i in range(len(x)):
        seen = [j for j in range(len(x)) if j // c == i // c and (j <= i or not mixer.causal)]
        bias = np.zeros(len(seen))
        if mixer.bias == "simple":
            n = len(p["bias_table"]) // 2
            bias = np.asarray([p["bias_table"][n + np.clip(i - j, -n, n)] for j in seen])
        if mixer.bias == "rotary":
            bias = np.asarray([turned(p["bias_ends"][0], i) @ turned(p["bias_ends"][1], j) for j in seen])
        if mixer.attend == "softmax":
            weights = np.exp(k[seen] @ q[i] / np.sqrt(K) + bias)
            weights = weights / weights.sum()
        else:
            scores = k[seen] @ q[i] / len(seen) + bias
            weights = [0.5 * (1 + math.erf((s - 0.5**0.5) / (2 * 0.25 / np.pi) ** 0.5)) for s in scores]
        found[i] = np.asarray(weights) @ v[seen]
    h = silu(map_of("h", averaged) + map_of("out", found * reset))
    return update * (h - x)


SETTINGS = [
    {},
    dict(attend="laplace", bias="simple", reach=4),
    dict(chunk=8, bias="simple", v_dim=20),
    dict(chunk=5, attend="laplace", bias="none", ema=3, qk_dim=8),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_mega_is_its_papers_definition(settings, causal):
    """Its layer, residual stream aside: what is added to the input is `update (h - x)`."""
    mixer, x = Mega(width=zoo.WIDTH, causal=causal, **settings), zoo.inputs(2, N)
    variables = zoo.params(mixer)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    y, _ = zoo.apply(mixer)(variables, x, Context())
    for row in range(2):
        assert zoo.far(y[row], definition(p, np.asarray(x[row], np.float64), mixer)) < 1e-5


@pytest.mark.parametrize("mask", [CAUSAL, FULL, CAUSAL & Chunk(100)], ids=str)
def test_tiles_of_laplace_attention_are_the_whole(mask):
    """Values and gradients, in rows and in documents, at lengths that tiles do not divide."""
    rng, segments = np.random.default_rng(0), np.repeat([[1, 2, 0]], [300, 250, 50], axis=1)
    q, k, v, weight = (jnp.asarray(rng.normal(size=(2, 600, 2, 8)), jnp.float32) for _ in range(4))

    @jax.jit
    def slopes(q, k, v):
        def objective(form, places, q, k, v):
            return jnp.sum(laplace_attention(q, k, v, mask=mask, implementation=form, **places) * weight)

        documents = dict(q_segments=segments, k_segments=segments)
        grad = jax.value_and_grad(objective, argnums=(2, 3, 4))
        return [[grad(form, places, q, k, v) for form in ("tiled", "reference")] for places in ({}, documents)]

    for tiled, whole in slopes(q, k, v):
        for one, other in zip(jax.tree.leaves(tiled), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max())


@pytest.mark.scale
@pytest.mark.parametrize(
    "settings", [dict(chunk=128), dict(chunk=128, attend="laplace"), dict(attend="laplace")], ids=str
)
def test_memory_grows_with_the_length(settings):
    mixer = Mega(width=zoo.WIDTH, **settings)
    variables = zoo.params(mixer)

    def memory(L):
        def objective(variables, x):
            return jnp.sum(mixer.apply(variables, x, Context())[0] ** 2)

        step = jax.jit(jax.grad(objective, argnums=(0, 1)))
        return step.lower(variables, zoo.inputs(1, L)).compile().memory_analysis().temp_size_in_bytes

    assert np.log2(memory(8192) / memory(4096)) < 1.25


def test_chunks_take_work_that_grows_with_the_length():
    mixer = Mega(width=zoo.WIDTH, chunk=64)
    variables = zoo.params(mixer)

    def work(L):
        step = jax.jit(lambda x: mixer.apply(variables, x, Context())[0]).lower(zoo.inputs(1, L))
        return step.compile().cost_analysis()["flops"]

    assert work(4096) < 2.3 * work(2048)


def test_an_average_that_forgets_all_is_the_token_itself():
    """Gates that float32 rounds to 1 leave nothing of the past."""
    one = jnp.ones((2, 3))

    def sums(alpha):
        system = ema_system(alpha, alpha, one, one)
        return jnp.sum(system.kernel[0](*system.kernel[1], 8))

    total, slope = jax.value_and_grad(sums)(jax.nn.sigmoid(20 * one))
    assert np.isclose(total, 6) and np.isfinite(slope).all()


def test_a_cache_of_chunks_is_no_longer_than_one():
    mixer = Mega(width=zoo.WIDTH, chunk=32)
    assert mixer.state_bytes(100) == mixer.state_bytes(10**6) < Mega(width=zoo.WIDTH).state_bytes(100)


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(qk_dim=7), "qk_dim 7 is odd, and the rotary bias turns pairs; closest: 8"),
        (dict(attend="laplac"), "attend is 'laplac'; allowed: softmax, laplace; closest: laplace"),
        (dict(attend="laplace", implementation="cudnn"), "'cudnn' cannot serve laplace attention; allowed: None, ref"),
        (dict(chunk=0), "chunk is 0; allowed: .*; closest: 1"),
    ],
)
def test_mistakes_are_told_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(Mega(width=zoo.WIDTH, **settings).init, jax.random.key(0), zoo.inputs(1, 4), Context())
