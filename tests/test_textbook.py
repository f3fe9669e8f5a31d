"""Small worked numbers that every implementation of attention must hit, and what models cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from model import build
from model.asked import Asked
from model.mixers.attention import Attention
from model.ops.attention import attention, attention_weights
from model.ops.mask import CAUSAL, FULL, window
from model.ops.scores import Form
from model.ops.tiled_attention import candidates

pytestmark = pytest.mark.quick
HERE = ("reference", "xla", "tiled")  # the implementations that run on any machine


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("implementation", HERE)
def test_attention_worked_example(implementation):
    q = jnp.asarray([1.0, 0]).reshape(1, 1, 1, 2)
    k = jnp.asarray([[1.0, 0], [0, 1], [1, 1]]).reshape(1, 3, 1, 2)
    v = jnp.asarray([10.0, 20, 30]).reshape(1, 3, 1, 1)
    y = attention(q, k, v, mask=FULL, implementation=implementation)
    np.testing.assert_allclose(y.ravel(), [20.0], atol=1e-5)
    weights = attention_weights(q, k, v, mask=FULL).ravel()
    np.testing.assert_allclose(weights, [0.40, 0.20, 0.40], atol=0.005)
    np.testing.assert_allclose(np.log(weights / weights[1]), [2**-0.5, 0, 2**-0.5], atol=1e-5)


def test_scaled_scores_have_unit_variance():
    for d, sd in ((4, 2), (16, 4), (64, 8), (256, 16)):
        q, k = normal(4096, d), normal(4096, d, seed=1)
        raw = np.std(np.einsum("nd,nd->n", q, k))
        np.testing.assert_allclose([raw, raw / d**0.5], [sd, 1], rtol=0.06)


def test_softmax_jacobian_is_bounded_and_a_gap_concentrates():
    for scale in (0.1, 1.0, 10.0):
        logits = scale * normal(8)
        jacobian, a = jax.jacobian(jax.nn.softmax)(logits), jax.nn.softmax(logits)
        np.testing.assert_allclose(jacobian, jnp.diag(a) - jnp.outer(a, a), atol=1e-6)
        assert np.linalg.norm(jacobian, 2) <= 0.5 + 1e-6
        top, second = np.sort(logits)[::-1][:2]
        assert 1 - a.max() <= 7 * np.exp(-(top - second)) + 1e-6


@pytest.mark.parametrize("implementation", HERE)
def test_backward_is_the_textbook_one(implementation):
    Q, K, V, G = (normal(5, 4, seed=i) for i in range(4))

    def loss(q, k, v):
        one = lambda x: x[None, :, None]  # noqa: E731
        return jnp.sum(attention(one(q), one(k), one(v), mask=FULL, implementation=implementation)[0, :, 0] * G)

    A = jax.nn.softmax(Q @ K.T / 2, axis=-1)
    dA = G @ V.T
    dS = A * (dA - jnp.sum(dA * A, axis=-1, keepdims=True))
    for got, want in zip(jax.grad(loss, argnums=(0, 1, 2))(Q, K, V), (dS @ K / 2, dS.T @ Q / 2, A.T @ G), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_weights_are_a_causal_distribution():
    q, k, v = (normal(1, 9, 2, 4, seed=i) for i in range(3))
    weights = np.asarray(attention_weights(q, k, v))[0]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert (np.triu(weights, 1) == 0).all()
    entropy = -np.sum(np.where(weights > 0, weights * np.log(np.maximum(weights, 1e-30)), 0), axis=-1)
    assert (entropy >= -1e-6).all() and (entropy <= np.log(np.arange(1, 10)) + 1e-6).all()
    for implementation in HERE:
        y = np.asarray(attention(q, k, v, implementation=implementation))
        assert (y >= np.asarray(v).min(1, keepdims=True) - 1e-6).all()
        assert (y <= np.asarray(v).max(1, keepdims=True) + 1e-6).all()


@pytest.mark.parametrize("implementation", HERE)
def test_without_positions_permuting_the_input_permutes_the_output(implementation):
    q, k, v = (normal(1, 9, 2, 4, seed=i) for i in range(3))
    order = np.random.default_rng(0).permutation(9)
    plain = attention(q, k, v, mask=FULL, implementation=implementation)
    moved = attention(q[:, order], k[:, order], v[:, order], mask=FULL, implementation=implementation)
    np.testing.assert_allclose(moved, plain[:, order], atol=1e-6)


def test_additive_score():
    q, k, w = normal(1, 3, 1, 4), normal(1, 3, 1, 4, seed=1), normal(1, 4, seed=2)
    weights = attention_weights(q, k, k, mask=FULL, additive=w)[0, 0]
    scores = np.asarray([[w[0] @ np.tanh(q[0, i, 0] + k[0, j, 0]) for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(weights, jax.nn.softmax(scores, axis=-1), atol=1e-6)


# Costs


def cache_bytes(length, kv_heads=8, heads=64, layers=80):
    return layers * Attention(width=heads * 128, n_heads=heads, n_kv_heads=kv_heads, dtype=jnp.float16).state_bytes(
        length
    )


def test_key_value_cache():
    # What the cache knows about each token besides keys and values is 8 bytes in 4,096.
    np.testing.assert_allclose(cache_bytes(4096), 1.34e9, rtol=0.005)
    np.testing.assert_allclose(cache_bytes(8192) / 2**30, 2.5, rtol=0.005)
    np.testing.assert_allclose(cache_bytes(100_000), 33e9, rtol=0.01)
    whole = cache_bytes(4096, kv_heads=8, heads=8)
    np.testing.assert_allclose(cache_bytes(4096, kv_heads=2, heads=8) / whole, 1 / 4, rtol=0.02)
    np.testing.assert_allclose(cache_bytes(4096, kv_heads=1, heads=8) / whole, 1 / 8, rtol=0.03)


def test_a_window_costs_what_it_sees():
    assert 32 * 4096 == 131_072  # tokens that 32 layers of it reach
    n, l, m = 100_000, 256, 512
    form = dict(scale=1.0, soft_cap=0.0, bias=None, stretches=1)
    blocks = (-(-n // l), -(-n // m), l, m)
    near = CAUSAL & window(4096)
    entries = {mask: len(candidates(Form(mask=mask, **form), *blocks)) * l * m for mask in (CAUSAL, near)}
    np.testing.assert_allclose(entries[CAUSAL], n * n / 2, rtol=0.02)
    np.testing.assert_allclose(entries[near], 4.1e8, rtol=0.2)


def parameters(**model):
    config = base.get_config().model.to_dict() | model
    config |= build.sections(config["mixers"], config["position"]) | {
        k: v for k, v in model.items() if k in build.MIXERS
    }
    made = build.build(config, Asked(model.pop("vocab", 32_000)))
    shapes = jax.eval_shape(made.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def test_parameters():
    d, vocab = 64, 100

    def per_layer(**model):
        one, two = (parameters(width=d, layers=n, vocab=vocab, **model) for n in (1, 2))
        return two - one

    norms = 2 * d
    assert per_layer(mlp="none") == 4 * d * d + d
    assert per_layer(mlp="gelu", mlp_width=256) == 4 * d * d + 2 * d * 256 + norms + 256 + d  # two biases
    assert per_layer(mlp="swiglu", mlp_width=192) == 4 * d * d + 3 * d * 192 + norms
    llama = parameters(width=4096, layers=32, mlp_width=11_008, tied=False, attention=dict(n_heads=32))
    np.testing.assert_allclose(llama, 6.7e9, rtol=0.01)
    bert = parameters(
        width=768,
        layers=12,
        mlp="gelu",
        norm="layernorm",
        position="learned",
        causal=False,
        vocab=30_522,
        attention=dict(n_heads=12),
    )
    np.testing.assert_allclose(bert, 110e6, rtol=0.015)
