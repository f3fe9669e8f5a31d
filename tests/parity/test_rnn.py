"""Recurrent mixers against torch.nn: the same weights, the same outputs, states and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model.contract import Context
from model.mixers.recurrent import GRU, LSTM, RNN
from tests.parity.agreement import agree, normal

B, L, D, E = 2, 21, 12, 16
PAIRS = {"rnn": (RNN, torch.nn.RNN), "lstm": (LSTM, torch.nn.LSTM), "gru": (GRU, torch.nn.GRU)}


def weights(cls, n: int) -> dict:
    G = cls.gates
    shapes = dict(W=(D, n, G, E), U=(n, E, G, E), bias=(n, 2, G, E))
    return {name: 0.4 * value for name, value in normal(**shapes).items()}


def torch_names(cls, W: torch.Tensor, U: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Our parameters under torch's names. Its update gate is one minus ours: the sigmoid of minus the sum."""
    if cls is GRU:
        sign = torch.tensor([1.0, -1, 1])[:, None]
        W, U, bias = W * sign, U * sign, bias * sign
    named = {}
    for i, way in zip(range(len(U)), ("", "_reverse"), strict=False):
        named[f"weight_ih_l0{way}"], named[f"weight_hh_l0{way}"] = W[:, i].reshape(D, -1).T, U[i].reshape(E, -1).T
        named[f"bias_ih_l0{way}"], named[f"bias_hh_l0{way}"] = bias[i, 0].ravel(), bias[i, 1].ravel()
    return named


def variables(W, U, bias) -> dict:
    return {"params": dict(W={"kernel": W}, U=U, bias=bias)}


@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", PAIRS)
def test_outputs(name, bidirectional):
    cls, module = PAIRS[name]
    n = 2 if bidirectional else 1
    other = module(D, E, batch_first=True, bidirectional=bidirectional)
    # As wide as the directions side by side, so that no projection follows.
    mixer = cls(width=n * E, hidden=E, causal=not bidirectional)

    def theirs(x, **params):
        return torch.func.functional_call(other, torch_names(cls, **params), (x,))[0]

    def ours(x, **params):
        return mixer.apply(variables(**params), x, Context())[0]

    agree(theirs, ours, normal(seed=1, x=(B, L, D)) | weights(cls, n))


@pytest.mark.parametrize("name", PAIRS)
def test_from_a_state_to_a_state(name):
    cls, module = PAIRS[name]
    other, mixer = module(D, E, batch_first=True), cls(width=E)

    def theirs(x, W, U, bias, **start):
        given = tuple(start[name][None] for name in mixer.kept)
        named = torch_names(cls, W, U, bias)
        _, last = torch.func.functional_call(other, named, (x, given if cls is LSTM else given[0]))
        return torch.cat([last] if cls is not LSTM else list(last))

    def ours(x, W, U, bias, **start):
        ctx = Context(positions=jnp.arange(7, 7 + L)[None])
        _, last = mixer.apply(variables(W, U, bias), x, ctx, start)
        return jnp.stack([last[name] for name in mixer.kept])

    start = normal(seed=2, **dict.fromkeys(mixer.kept, (B, E)))
    # Small weights: larger ones saturate tanh over these steps, and what is left of the gradient is rounding.
    params = {name: value * np.float32(E**-0.5) for name, value in weights(cls, 1).items()}
    agree(theirs, ours, normal(seed=1, x=(B, L, D)) | params | start)
