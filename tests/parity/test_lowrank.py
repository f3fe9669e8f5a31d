"""Whole-row mixers against transformers: same weights, outputs and gradients."""

import jax.numpy as jnp
import pytest
from transformers import FNetConfig
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

from model.contract import Context
from model.mixers.fnet import FNet
from tests.parity.agreement import agree, normal

B, D = 2, 16


@pytest.mark.parametrize("padded", [False, True])
def test_fnet(padded):
    """Theirs of the whole row; ours too, or of its tokens before padding that theirs never sees."""
    L = 21
    module = FNetBasicFourierTransform(FNetConfig(hidden_size=D))
    ctx = Context(segments=jnp.ones((B, L + 3), jnp.int32).at[:, L:].set(0), right_padded=True) if padded else Context()

    def ours(x):
        x = jnp.pad(x, [(0, 0), (0, 3 * padded), (0, 0)])
        return FNet(width=D, causal=False).apply({}, x, ctx)[0][:, :L]

    agree(lambda x: module(x)[0], ours, normal(x=(B, L, D)))
