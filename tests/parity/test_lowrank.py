"""Whole-row mixers against transformers: same weights, outputs and gradients."""

import jax.numpy as jnp
import pytest
import torch
from transformers import FNetConfig, NystromformerConfig
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from model.contract import Context
from model.mixers.fnet import FNet
from model.mixers.nystrom import Nystrom
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


def test_nystrom():
    """Theirs starts each inverse from the largest sum in the batch or, told so, from that of the matrix, as ours."""
    H, M, L, W = 4, 6, 24, 5
    sizes = dict(num_landmarks=M, segment_means_seq_len=L, conv_kernel_size=W, num_attention_heads=H)
    module = NystromformerSelfAttention(NystromformerConfig(hidden_size=D, **sizes)).eval()
    module.init_option = "exact"
    arrays = normal(x=(B, L, D), q=(D, D), k=(D, D), v=(D, D), conv=(W, H))

    def theirs(x, q, k, v, conv):
        weights = {"conv.weight": conv.T[:, None, :, None]}
        for name, kernel in [("query", q), ("key", k), ("value", v)]:
            weights |= {f"{name}.weight": kernel.T, f"{name}.bias": torch.zeros(D)}
        return torch.func.functional_call(module, weights, (x,))[0]

    def ours(x, q, k, v, conv):
        maps = {name: {"kernel": kernel.reshape(D, H, D // H)} for name, kernel in dict(q=q, k=k, v=v).items()}
        out = {"kernel": jnp.eye(D).reshape(H, D // H, D)}
        mixer = Nystrom(width=D, causal=False, n_heads=H, landmarks=M, conv=W)
        return mixer.apply({"params": maps | dict(conv=conv, out=out)}, x, Context())[0]

    agree(theirs, ours, {name: value * (1 if name == "x" else 0.3) for name, value in arrays.items()}, within=1e-4)
