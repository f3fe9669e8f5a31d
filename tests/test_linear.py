"""Linear attention and its kin by their papers' definitions, a score for every pair of tokens, in float64."""

import jax
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.ops.features import FEATURES, directions
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


def test_retention_is_its_papers_definition():
    """`gamma^(i-j)` times the real part of products of complex numbers that are turned by their distance."""
    mixer = MIXERS["retention"](width=zoo.WIDTH)
    K = zoo.WIDTH // mixer.n_heads
    theta = 10000.0 ** (-2 * np.arange(K // 2) / K)

    def score(h, i, j, q, k):
        q, k = (x[: K // 2] + 1j * x[K // 2 :] for x in (q, k))
        gamma = 1 - 2.0 ** (-5 - h)
        return gamma ** (i - j) * np.sum(q * np.conj(k) * np.exp(1j * (i - j) * theta)).real / np.sqrt(K)

    def definition(p, x):
        q, k, v, gate = heads(p, x, "q", "k", "v", "gate")
        y = pairs(score, q, k, v, normalised=False)
        return layer_norm(y, p["norm"]["scale"], p["norm"]["bias"], 1e-5) * silu(gate)

    close(mixer, definition)


def recurrence(q, k, v, f):
    """`h = diag(f) h + k v^T`, read by q, of every head: q, k and f `[H, L, K]`, v `[H, L, V]`."""
    y = np.zeros(v.shape)
    for head in range(len(q)):
        h = np.zeros((k.shape[-1], v.shape[-1]))
        for t in range(q.shape[1]):
            h = f[head, t][:, None] * h + np.outer(k[head, t], v[head, t])
            y[head, t] = q[head, t] @ h
    return y


def test_gla_is_its_papers_recurrence():
    def definition(p, x):
        q, k, v, gate = heads(p, x, "q", "k", "v", "gate")
        low = x @ p["decay_down"]["kernel"]
        alpha = np.einsum("lr,rhk->hlk", low, p["decay_up"]["kernel"]) + p["decay_up"]["bias"][:, None]
        y = recurrence(q / np.sqrt(q.shape[-1]), k, v, sigmoid(alpha) ** (1 / 16))
        gate = gate + p["gate"]["bias"][:, None]
        return layer_norm(y, p["norm"]["scale"], p["norm"]["bias"], 1e-5) * silu(gate)

    close(MIXERS["gla"](width=zoo.WIDTH), definition)


@pytest.mark.parametrize("bound", [0.0, 0.7])
def test_hgrn2_is_its_papers_recurrence(bound):
    def definition(p, x):
        q, gate, v = heads(p, x, "q", "forget", "v")
        f = bound + (1 - bound) * sigmoid(gate)
        y = recurrence(silu(q), 1 - f, v, f)
        return y / np.sqrt(np.mean(y**2, axis=(0, 2), keepdims=True) + 1e-5) * p["norm"]["scale"][:, None]

    close(MIXERS["hgrn2"](width=zoo.WIDTH, lower_bound=bound), definition)


def memory(p, x, bias, cap, log_forget):
    """The mLSTM's recurrence by its paper, m and all, of each head: outputs `[H, L, V]`."""
    q, k, v, o = heads(p, x, "q", "k", "v", "o")
    i, f = (x @ p[name]["kernel"] + p[f"{name}_bias"] + shift for name, shift in (("i", bias), ("f", 0)))
    i, f = (gate if cap is None else cap * np.tanh(gate / cap) for gate in (i, f))
    H, _, K = q.shape
    y = np.zeros(v.shape)
    for h in range(H):
        C, n, m = np.zeros((K, v.shape[-1])), np.zeros(K), -np.inf
        for t in range(len(x)):
            faded = log_forget(f[t, h]) + m
            m = max(faded, i[t, h])
            kept, taken = np.exp(faded - m), np.exp(i[t, h] - m)
            C = kept * C + taken * np.outer(k[h, t], v[h, t])
            n = kept * n + taken * k[h, t]
            read = q[h, t] / np.sqrt(K)
            y[h, t] = read @ C / max(abs(read @ n), np.exp(-m))
    return layer_norm(y, p["norm"]["scale"], np.zeros_like(p["norm"]["scale"]), 1e-6) * sigmoid(o)


@pytest.mark.parametrize(
    ("bias", "cap", "forget"), [(0, 15.0, "sigmoid"), (300, None, "sigmoid"), (1, None, "exp")], ids=str
)
def test_mlstm_is_its_papers_recurrence(bias, cap, forget):
    """Also where input gates are e^300, which float32 does not hold."""
    log_forget = {"sigmoid": lambda x: -np.log1p(np.exp(-x)), "exp": lambda x: x}[forget]
    mixer, x = MIXERS["mlstm"](width=zoo.WIDTH, gate_cap=cap, forget=forget), zoo.inputs(2, L)
    params = jax.device_get(zoo.params(mixer))["params"]
    loud = {"params": params | {"i_bias": params["i_bias"] + np.float32(bias)}}
    y, _ = zoo.apply(mixer)(loud, x, Context())
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for row in range(2):
        out = memory(wide, np.asarray(x[row], np.float64), bias, cap, log_forget)
        assert zoo.far(y[row], np.einsum("hlv,hvd->ld", out, wide["out"]["kernel"])) < 1e-4


def test_mlstm_reads_nothing_by_a_query_of_zeros():
    """Exponential forget gates make m larger than float32's e^-m, and there is nothing else to divide by."""
    L = 60
    x = zoo.inputs(1, L).at[0, 50].set(0)
    mixer = MIXERS["mlstm"](width=zoo.WIDTH, forget="exp")
    (grads, pulled), y = zoo.gradient(mixer)(zoo.params(mixer), x, Context(), np.ones(x.shape, np.float32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, pulled, y)))
    assert (y[0, 50] == 0).all()


@pytest.mark.parametrize("name", ["mlstm", "performer"])
def test_padding_of_any_size_has_no_gradient(name):
    """Exponentials of what stands there may be no numbers."""
    options = dict(gate_cap=None) if name == "mlstm" else {}
    segments = np.asarray([[0, 1, 1, 0, 1, 2, 2, 0]])
    x = np.asarray(zoo.inputs(1, 8)) * np.where(segments > 0, 1, 1e4)[..., None]
    for causal in [True] if name == "mlstm" else [True, False]:
        mixer = MIXERS[name](width=zoo.WIDTH, causal=causal, **options)
        weight = np.where(segments > 0, 1, 0)[..., None] * np.ones(zoo.WIDTH)
        pull, _ = zoo.run(mixer, x, weight, zoo.context(segments))
        assert np.isfinite(pull).all() and (pull[segments == 0] == 0).all()


@pytest.mark.parametrize("name", ["retention", "gla", "hgrn2", "mlstm"])
def test_what_fades_runs_forward_only(name):
    with pytest.raises(UserError, match=f"{name} runs forward only; set model.causal=True"):
        zoo.shapes(MIXERS[name](width=16, causal=False))


def test_retention_turns_pairs():
    with pytest.raises(UserError, match=r"width / n_heads must be even, not 1; closest: 2"):
        zoo.shapes(MIXERS["retention"](width=16, n_heads=16))


def test_taylor_features_are_of_pairs():
    """Half as many as there are ordered pairs."""
    assert [FEATURES["taylor"].size(n) for n in (1, 2, 16)] == [3, 6, 153]
    mixer = MIXERS["linear"](width=64, feature="taylor")
    assert mixer.init_state(2, 0).shape == (2, 4, 153, 17)


def test_no_state_is_carried_both_ways():
    mixer = MIXERS["linear"](width=zoo.WIDTH, causal=False)
    with pytest.raises(UserError, match=r"cannot carry a state; set model.causal=True"):
        mixer.apply(zoo.params(mixer), zoo.inputs(1, 4), Context(), mixer.init_state(1, 4))


@pytest.mark.quick
@pytest.mark.parametrize("name", ["linear", "performer", "cosformer", "luna"])
def test_kernels_of_a_recurrence_are_refused_where_none_runs(name):
    """Asked for by name, in rows that are seen whole; and in packed ones, where they serve, by what they lack here."""
    mixer = MIXERS[name](width=zoo.WIDTH, causal=False)
    variables, fused = zoo.params(mixer), mixer.clone(implementation="fused")
    with pytest.raises(UserError, match=r"'fused' cannot serve a row .*causal=False.*; leave it unset, or use 'chunk"):
        fused.apply(variables, zoo.inputs(1, 4), Context())
    with pytest.raises(UserError, match="a row .*causal=False" if name == "luna" else "the platform cpu"):
        fused.apply(variables, zoo.inputs(1, 4), zoo.context([[1, 1, 2, 2]]))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"model.linear.n_heads 3 does not divide the width 16; closest that does: 2"):
        zoo.shapes(MIXERS["linear"](width=16, n_heads=3))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_cosformer_is_weighted_by_the_cosine_of_the_distance(causal):
    longest = 15  # past which positions are as one

    def definition(p, x):
        def score(h, i, j, q, k):
            angle = np.pi / 2 * (min(i, longest) - min(j, longest)) / longest
            return KERNELS["relu"](q, k) * np.cos(angle)

        return pairs(score, *heads(p, x, "q", "k", "v"), causal)

    close(MIXERS["cosformer"](width=zoo.WIDTH, longest=longest, causal=causal), definition)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_performer_is_the_mean_over_its_directions(causal):
    mixer = MIXERS["performer"](width=zoo.WIDTH, n_features=9, seed=3, causal=causal)
    random = directions(3, 9, zoo.WIDTH // mixer.n_heads)

    def score(h, i, j, q, k):
        q, k = (x / len(x) ** 0.25 for x in (q, k))
        return np.mean(np.exp(random @ (q + k) - (q @ q + k @ k) / 2))

    close(mixer, lambda p, x: pairs(score, *heads(p, x, "q", "k", "v"), causal))


def test_performers_features_may_be_of_any_size():
    """Keys twenty times as large, whose features are far from 1: still an average of values."""
    mixer, x = MIXERS["performer"](width=zoo.WIDTH), zoo.inputs(2, L)
    params = jax.device_get(zoo.params(mixer))["params"]
    loud = {"params": params | {"k": {"kernel": 20 * params["k"]["kernel"]}}}
    (_, pull), y = zoo.gradient(mixer)(loud, x, Context(), np.ones(x.shape, np.float32))
    values = np.einsum("bld,dhk->blhk", x, loud["params"]["v"]["kernel"])
    first = np.einsum("bhk,hkd->bd", values[:, 0], loud["params"]["out"]["kernel"])
    np.testing.assert_allclose(y[:, 0], first, atol=1e-5)
    assert np.isfinite(y).all() and np.isfinite(pull).all()
