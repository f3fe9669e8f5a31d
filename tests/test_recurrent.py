"""Recurrent networks: the formulas on small numbers, both directions, resets, and a state that does not grow."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers.recurrent import GRU, LSTM, RNN, gru, lstm, rnn
from model.mixers.slstm import SLSTM, slstm
from tests import zoo
from tests.differences import check_slopes

pytestmark = pytest.mark.quick
MIXERS = {"rnn": RNN, "lstm": LSTM, "gru": GRU}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def one(*values):
    """A row of gates, one channel wide."""
    return jnp.asarray(values, jnp.float32).reshape(1, -1, 1)


def past(**values):
    return {name: jnp.full((1, 1), value) for name, value in values.items()}


# The cells


def test_rnn_cell():
    np.testing.assert_allclose(rnn(past(h=9.0), one(0.3), one(0.2))["h"], math.tanh(0.5), rtol=1e-6)


def test_lstm_cell():
    """C_t = f C_{t-1} + i C~; h_t = o tanh(C_t)."""
    i, f, new, o = sigmoid(0.5), sigmoid(1.0), math.tanh(-0.4), sigmoid(-0.2)
    after = lstm(past(h=9.0, c=2.0), one(0.3, 0.7, -0.5, 0.1), one(0.2, 0.3, 0.1, -0.3))
    c = f * 2 + i * new
    np.testing.assert_allclose([after["c"].item(), after["h"].item()], [c, o * math.tanh(c)], rtol=1e-6)
    kept = lstm(past(h=0.0, c=2.0), one(-99, 99, 1, 99), one(0, 0, 0, 0))
    np.testing.assert_allclose([kept["c"].item(), kept["h"].item()], [2, math.tanh(2)], rtol=1e-6)


def test_gru_cell():
    """h_t = (1 - z) h_{t-1} + z h~, where r weighs what the past says to h~ and nothing that the token does."""
    r, z = sigmoid(0.4), sigmoid(-0.3)
    new = math.tanh(0.6 + r * 0.8)
    after = gru(past(h=0.5), one(0.3, -0.5, 0.6), one(0.1, 0.2, 0.8))
    np.testing.assert_allclose(after["h"].item(), (1 - z) * 0.5 + z * new, rtol=1e-6)
    closed, open_ = (gru(past(h=0.5), one(0, z, 0.6), one(0, 0, 0))["h"].item() for z in (-99, 99))
    np.testing.assert_allclose([closed, open_], [0.5, math.tanh(0.6)], rtol=1e-6)


def test_slstm_cell():
    """The sums as they are, which would overflow; the first token finds nothing, whatever the exponent beside it."""
    i, f, z, o = (np.asarray(gate) for gate in ([3.0, 500.0, -500.0], [0.2, -1.0, 2.0], [0.3, -0.7, 2.0], [0.1, 1, 2]))
    state, log_n, c_over_n = past(h=0.0, c=0.0, n=0.0, m=77.0), -math.inf, 0.0
    for t in range(3):
        state = slstm(state, one(i[t], f[t], z[t], 0), one(0, 0, 0, o[t]))
        held = log_n + math.log(sigmoid(f[t]))
        log_n = np.logaddexp(held, i[t])
        c_over_n = math.exp(held - log_n) * c_over_n + math.exp(i[t] - log_n) * math.tanh(z[t])
        np.testing.assert_allclose(state["h"].item(), sigmoid(o[t]) * c_over_n, rtol=1e-5)
        np.testing.assert_allclose(math.log(state["n"].item()) + state["m"].item(), log_n, rtol=1e-6)


# The mixers


def test_slstm_is_its_papers_definition():
    """In float64, its sums as they are, and by differences its gradients.

    Gates i and f see the convolved input, z and o the plain one, and each head its own past.
    """
    B, L, D, H, W = 2, 5, zoo.WIDTH, 2, 3
    mixer = SLSTM(width=D, n_heads=H, conv=W)
    variables, x, weight = zoo.params(mixer), zoo.inputs(B, L), zoo.inputs(B, L, 1)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (variables["params"], x))

    def squash(x):
        return 1 / (1 + np.exp(-x))

    def by_heads(rows, kernel):
        parts = [np.einsum("bk,kgj->bgj", part, w) for part, w in zip(np.split(rows, H, axis=1), kernel, strict=True)]
        return np.concatenate(parts, axis=-1)

    def definition(p, x):
        rows = np.pad(x, [(0, 0), (W - 1, 0), (0, 0)])
        smooth = sum(rows[:, i : i + L] * p["conv"][i] for i in range(W)) + p["conv_bias"]
        smooth = smooth * squash(smooth)
        (h, c, n), outputs = np.zeros((3, B, D)), []
        for t in range(L):
            u = by_heads(h, p["U"]) + p["bias"]
            i, f = (by_heads(smooth[:, t], p["W"])[:, gate] + u[:, gate] for gate in (0, 1))
            z, o = (by_heads(x[:, t], p["W"])[:, gate] + u[:, gate] for gate in (2, 3))
            c, n = squash(f) * c + np.exp(i) * np.tanh(z), squash(f) * n + np.exp(i)
            h = squash(o) * c / n
            head = h.reshape(B, H, -1)
            normed = (head - head.mean(-1, keepdims=True)) / np.sqrt(head.var(-1, keepdims=True) + 1e-5)
            outputs.append((normed * p["norm"]["scale"]).reshape(B, D))
        return np.stack(outputs, axis=1), h

    want, last = definition(*wide)
    y, after = zoo.apply(mixer)(variables, x, zoo.context(L=L), mixer.init_state(B, 0))
    np.testing.assert_allclose(y, want, atol=1e-4)
    np.testing.assert_allclose(after["h"], last, atol=1e-5)
    (grads, pull), _ = zoo.gradient(mixer)(variables, x, Context(), weight)
    heard = np.asarray(weight, np.float64)
    check_slopes(lambda at: np.sum(heard * definition(*at)[0]), wide, (grads["params"], pull))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_is_its_cell_token_by_token(name):
    mixer = MIXERS[name](width=zoo.WIDTH, hidden=5)
    variables, x = zoo.params(mixer), zoo.inputs(2, 4)
    p = variables["params"]
    W, U, bias = p["W"]["kernel"][:, 0], p["U"][0], p["bias"][0]
    state, outputs = mixer.init_state(2, 0), []
    for t in range(4):
        u = jnp.einsum("be,egf->bgf", state["h"], U) + bias[1]
        state = type(mixer).cell(state, jnp.einsum("bd,dge->bge", x[:, t], W) + bias[0], u)
        outputs.append(state["h"] @ p["out"]["kernel"])
    y, last = zoo.apply(mixer)(variables, x, zoo.context(L=4), mixer.init_state(2, 0))
    np.testing.assert_allclose(y, jnp.stack(outputs, axis=1), atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), last, state)


def one_way(variables, i: int):
    """The parameters of one direction of a mixer that has two."""
    W, U, bias = (variables["params"][name] for name in ("W", "U", "bias"))
    return {"params": dict(W={"kernel": W["kernel"][:, i : i + 1]}, U=U[i : i + 1], bias=bias[i : i + 1])}


@pytest.mark.parametrize("name", MIXERS)
def test_bidirectional_is_one_forward_and_one_backward(name):
    cls, half = MIXERS[name], zoo.WIDTH // 2
    both, alone = cls(width=zoo.WIDTH, hidden=half, causal=False), cls(width=half)
    variables, x = zoo.params(both), zoo.inputs(2, 7)
    assert "out" not in variables["params"]  # side by side they have the width already
    y, _ = zoo.apply(both)(variables, x, Context())
    ahead, _ = zoo.apply(alone)(one_way(variables, 0), x, Context())
    back, _ = zoo.apply(alone)(one_way(variables, 1), x[:, ::-1], Context())
    np.testing.assert_allclose(y, jnp.concatenate([ahead, back[:, ::-1]], axis=-1), atol=1e-6)


@pytest.mark.parametrize("name", MIXERS)
def test_documents_begin_with_nothing_and_padding_passes_the_state_on(name):
    mixer = MIXERS[name](width=zoo.WIDTH)
    variables, x = zoo.params(mixer), zoo.inputs(1, 8)
    run = zoo.apply(mixer)
    full = jax.tree.map(lambda leaf: leaf + 0.5, mixer.init_state(1, 8))
    ctx = zoo.context([[0, 0, 1, 1, 0, 2, 2, 0]])
    _, packed = run(variables, x, ctx, full)
    _, alone = run(variables, x[:, 5:7], zoo.context(L=2), mixer.init_state(1, 8))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), packed, alone)
    y, padded = run(variables, x[:, :2], Context(ctx.positions[:, :2], ctx.segments[:, :2]), full)
    jax.tree.map(np.testing.assert_array_equal, padded, full)
    np.testing.assert_array_equal(y, np.full((1, 2, zoo.WIDTH), 0.5))


@pytest.mark.parametrize("name", MIXERS)
def test_the_state_does_not_grow(name):
    mixer = MIXERS[name](width=zoo.WIDTH, hidden=24, dtype=jnp.bfloat16)
    assert mixer.state_bytes(1) == mixer.state_bytes(10**9) == (2 if name == "lstm" else 1) * 24 * 4
    variables, state = zoo.params(mixer), mixer.init_state(1, 10**9)
    step = jax.jit(mixer.apply).lower(variables, zoo.inputs(1, 1), zoo.context(L=1), state).compile()
    for t in range(3):
        _, state = step(variables, zoo.inputs(1, 1, seed=t), zoo.context(L=1), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MIXERS)
def test_first_values(name):
    """Every gate's map of the past is orthogonal, biases are 0, and an LSTM begins by remembering."""
    mixer = MIXERS[name](width=zoo.WIDTH, causal=False)
    params = nn.unbox(mixer.init(jax.random.key(0), zoo.inputs(1, 2), Context()))["params"]
    U, bias, W = np.asarray(params["U"]), np.asarray(params["bias"]), np.asarray(params["W"]["kernel"])
    gram = np.einsum("negf,negh->ngfh", U, U)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(zoo.WIDTH), gram.shape), atol=1e-5)
    assert (name == "lstm") == bool(bias.any())
    if name == "lstm":
        assert (bias[:, 0, 1] == 1).all() and bias.sum() == 2 * zoo.WIDTH
    np.testing.assert_allclose(W.std(), zoo.WIDTH**-0.5, rtol=0.1)
    assert np.abs(U[0] - U[1]).max() > 0.1


def test_mistakes_are_told_by_name():
    with pytest.raises(UserError, match=r"LSTM.hidden is -1; allowed: 0, or a whole number from 1 .*closest: 0"):
        zoo.params(LSTM(width=zoo.WIDTH, hidden=-1))
    with pytest.raises(UserError, match=r"model.slstm.n_heads 3 does not divide the width 16; closest that does: 2"):
        zoo.params(SLSTM(width=zoo.WIDTH, n_heads=3))
    mixer = GRU(width=zoo.WIDTH, causal=False)
    with pytest.raises(UserError, match="a bidirectional model cannot carry a state"):
        mixer.apply(zoo.params(mixer), zoo.inputs(1, 2), zoo.context(L=2), mixer.init_state(1, 2))
