"""Small worked numbers that every implementation must hit, and what models cost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from configs import base
from model import build, entries
from model.asked import Asked
from model.contract import Context
from model.layers import norm
from model.mixers import MIXERS
from model.mixers.attention import Attention
from model.ops.attention import attention, attention_weights
from model.ops.conv import fft_conv
from model.ops.mask import CAUSAL, FULL, window
from model.ops.scan import linear_scan
from model.ops.scores import Form
from model.ops.tiled_attention import candidates
from model.positions import Rope, Sinusoidal
from tests.places import at, embed, queries

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("quickly_compiled")]
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
    for d, sd in ((4, 2), (16, 4), (64, 8), (128, 11.3), (256, 16)):
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
        assert np.diag(jacobian).max() <= 0.25 + 1e-6
        np.testing.assert_allclose(jax.nn.softmax(logits + 5), a, atol=1e-6)
    two_atoms = jnp.asarray([0.0, 0.0, -50.0])
    np.testing.assert_allclose(np.linalg.norm(jax.jacobian(jax.nn.softmax)(two_atoms), 2), 0.5, atol=1e-6)


@pytest.mark.parametrize("implementation", HERE)
def test_three_tokens_that_are_the_axes(implementation):
    axes = jnp.eye(3)[None, :, None]
    v = jnp.asarray([[1.0, 0], [0, 1], [2, 2]])[None, :, None]
    y = attention(axes, axes, v, mask=FULL, implementation=implementation)
    np.testing.assert_allclose(y[0, 0, 0], [1.000, 0.793], atol=5e-4)


def test_heads_side_by_side_and_a_map_are_the_sum_of_each_heads_own_map():
    D, H, K = 8, 4, 2
    mixer, x = Attention(width=D, n_heads=H), normal(1, 6, D)
    params = nn.unbox(mixer.init(jax.random.key(0), x, Context()))["params"]
    whole, _ = mixer.apply({"params": params}, x, Context())
    one = Attention(width=D, n_heads=1, head_dim=K)
    parts = []
    for h in range(H):
        of_head = {name: {"kernel": params[name]["kernel"][:, h : h + 1]} for name in "qkv"}
        of_head["out"] = {"kernel": params["out"]["kernel"][h : h + 1]}
        parts.append(one.apply({"params": of_head}, x, Context())[0])
    np.testing.assert_allclose(sum(parts), whole, atol=1e-5)

    alike = {name: {"kernel": jnp.repeat(params[name]["kernel"][:, :1], H, axis=1)} for name in "qkv"}
    out = jnp.repeat(params["out"]["kernel"][:1], H, axis=0)
    many, _ = mixer.apply({"params": alike | {"out": {"kernel": out}}}, x, Context())
    np.testing.assert_allclose(many, H * parts[0], atol=1e-5)


@pytest.mark.few(1)
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


# Positions, norms, recurrences


def test_positions():
    waves = embed(Sinusoidal(amplitude=1.0), np.zeros((1, 1, 16), np.float32), at(12))[0, 0]
    np.testing.assert_allclose(waves[jnp.asarray([0, 4, 10])], [-0.54, 0.93, 0.04], atol=0.005)
    # A pair that turns by half a radian a token: 1.00 and 2.50 at positions 2 and 5.
    half = Rope(scaling="linear", factor=2.0)
    q, k = (queries(half, np.asarray([1, 0], np.float32).reshape(1, 1, 1, 2), at(p)).ravel() for p in (2, 5))
    np.testing.assert_allclose([np.arctan2(*v[::-1]) for v in (q, k)], [1.0, 2.5], atol=1e-5)
    np.testing.assert_allclose(q @ k, np.cos(1.5), atol=1e-5)
    np.testing.assert_allclose(q @ k, 0.07, atol=0.005)


def test_layernorm():
    x = jnp.asarray([-0.7, 1.5, 0.2, -1.1])
    np.testing.assert_allclose([x.mean(), x.std()], [-0.03, 1.00], atol=0.0051)
    layer = norm("layernorm", jnp.float32, None, eps=1e-12)
    y = layer.apply(layer.init(jax.random.key(0), x), x)
    np.testing.assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-6)
    np.testing.assert_allclose(y, (x - x.mean()) / x.std(), atol=1e-6)


@pytest.mark.parametrize("implementation", ["sequential", "associative", "chunked"])
def test_an_impulse_by_recurrence_and_by_convolution(implementation):
    """x_t = .9 x_{t-1} + .5 u_t."""
    response = [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245]
    u = jnp.zeros((1, 6, 1)).at[0, 0].set(1.0)
    h, _ = linear_scan(jnp.full((1, 6, 1), 0.9), 0.5 * u, jnp.zeros((1, 1)), implementation=implementation)
    np.testing.assert_allclose(h[0, :, 0], response, atol=1e-6)
    np.testing.assert_allclose(fft_conv(u, jnp.asarray(response)[:, None])[0, :, 0], response, atol=1e-6)


def test_from_step_50_to_step_1_is_49_factors_in_a_recurrence_and_one_step_in_attention():
    def last(b):
        return linear_scan(jnp.full((1, 50, 1), 0.9), b, jnp.zeros((1, 1)))[0][0, -1, 0]

    np.testing.assert_allclose(jax.grad(last)(normal(1, 50, 1))[0, 0, 0], 0.9**49, rtol=1e-4)
    flat = jnp.zeros((1, 50, 1, 1))
    pull = jax.grad(lambda v: attention(flat, flat, v)[0, -1, 0, 0])(normal(1, 50, 1, 1))
    np.testing.assert_allclose(pull[0, 0, 0, 0], 1 / 50, rtol=1e-5)


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
    np.testing.assert_allclose(cache_bytes(131_072), 42.9e9, rtol=0.005)
    np.testing.assert_allclose(13 * cache_bytes(8192) / 2**30, 32.5, rtol=0.005)
    whole = cache_bytes(4096, kv_heads=8, heads=8)
    np.testing.assert_allclose(cache_bytes(4096, kv_heads=2, heads=8) / whole, 1 / 4, rtol=0.02)
    np.testing.assert_allclose(cache_bytes(4096, kv_heads=1, heads=8) / whole, 1 / 8, rtol=0.03)


@pytest.mark.parametrize("layers, reach", [(1, 4), (3, 4), (4, 2)])
def test_a_window_reaches_further_with_every_layer(layers, reach):
    """By gradient: a token that sees itself and w - 1 before it reaches n (w - 1) + 1 after n layers.

    32 layers of a window that sees 4,096 before it reach 131,072.
    """
    L, D = 24, 8
    blocks = [Attention(width=D, n_heads=2, window=reach) for _ in range(layers)]
    made = [block.init(jax.random.key(i), jnp.zeros((1, L, D)), Context()) for i, block in enumerate(blocks)]

    def last(x):
        for block, params in zip(blocks, made, strict=True):
            x = x + block.apply(params, x, Context())[0]
        return x[0, -1].sum()

    felt = np.abs(jax.grad(last)(normal(1, L, D))).sum(-1)[0] > 0
    assert felt.sum() == layers * (reach - 1) + 1 and felt[-felt.sum() :].all()


def test_a_window_costs_what_it_sees():
    n, l, m = 100_000, 256, 512
    form = dict(scale=1.0, soft_cap=0.0, bias=None, right_padded=False, stretches=1)
    blocks = (-(-n // l), -(-n // m), l, m)
    near = CAUSAL & window(4096)
    entries = {mask: len(candidates(Form(mask=mask, **form), *blocks)) * l * m for mask in (CAUSAL, near)}
    np.testing.assert_allclose(entries[CAUSAL], n * n / 2, rtol=0.02)
    np.testing.assert_allclose(entries[near], 4.1e8, rtol=0.2)


def parameters(**model):
    config = base.get_config().model.to_dict() | model
    config |= entries.sections(config["mixers"], config["position"]) | {k: v for k, v in model.items() if k in MIXERS}
    made = build.build(config, Asked(model.pop("vocab", 32_000)))
    shapes = jax.eval_shape(made.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))


def test_parameters():
    d, vocab = 64, 100

    def per_layer(d=d, **model):
        one, two = (parameters(width=d, layers=n, vocab=vocab, **model) for n in (1, 2))
        return two - one

    norms = 2 * d
    assert per_layer(mlp="none") == 4 * d * d + d
    assert per_layer(mlp="gelu", mlp_width=256) == 4 * d * d + 2 * d * 256 + norms + 256 + d  # two biases
    assert per_layer(mlp="swiglu", mlp_width=192) == 4 * d * d + 3 * d * 192 + norms
    # The original Transformer's: attention at 512, and 512 -> 2,048 -> 512 with its biases.
    assert per_layer(d=512, mlp="none") == 1_048_576 + 512
    assert per_layer(d=512, mlp="relu", mlp_width=2048) - per_layer(d=512, mlp="none") == 2_097_152 + 2_560 + 512
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


def test_a_mixture_of_experts_holds_more_than_a_token_uses():
    """Mixtral: 47e9 in all, 13e9 for each token."""
    shape = dict(width=4096, layers=32, mlp_width=14_336, tied=False, attention=dict(n_heads=32, n_kv_heads=8))
    every = parameters(**shape, mlp="experts")
    one = parameters(**shape, mlp="swiglu") - parameters(**shape, mlp="none")  # MLPs of one expert, and their norms
    norms = 32 * 4096
    np.testing.assert_allclose(every, 47e9, rtol=0.01)
    np.testing.assert_allclose(every - 6 * (one - norms), 13e9, rtol=0.01)


def test_a_fresh_language_model_loses_the_logarithm_of_its_vocabulary():
    config = base.get_config().model.to_dict() | dict(width=64, layers=2)
    model = build.build(config | entries.sections(("attention",), "none"), Asked(1000))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1000, (4, 65)))
    params = nn.unbox(model.init(jax.random.key(0), tokens[:, :-1]))
    logits, _ = model.apply(params, tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    np.testing.assert_allclose([loss, np.log(1000)], 6.9, atol=0.05)
