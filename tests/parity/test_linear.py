"""xLSTM's matrix memory against transformers: same weights, outputs and gradients."""

import pytest
from transformers import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMLayer

from model.mixers.mlstm import MLSTM
from tests.parity.agreement import agree
from tests.parity.test_recurrent import B, D, L, apply, call, kernels, small


@pytest.mark.parametrize("form", ["whole", "carried"])
def test_mlstm(form):
    """Theirs adds 1e-6 to what it divides by."""
    H, K, V = 2, 4, 8
    config = xLSTMConfig(
        hidden_size=D,
        num_heads=H,
        num_hidden_layers=1,
        qk_dim_factor=0.5,
        chunk_size=8,
        autocast_kernel_dtype="float32",
        eps=1e-12,
    )
    module = xLSTMLayer(config)

    def theirs(x, q, k, v, o, i, f, i_bias, f_bias, scale, out):
        weights = {f"{name}.weight": value.reshape(D, -1).T for name, value in dict(q=q, k=k, v=v).items()}
        weights |= {f"{name}gate_preact.weight": value.reshape(D, -1).T for name, value in dict(o=o, i=i, f=f).items()}
        weights |= {"igate_preact.bias": i_bias, "fgate_preact.bias": f_bias, "multihead_norm.weight": scale.flatten()}
        return call(module, weights | {"out_proj.weight": out.reshape(D, D).T}, x)

    mixer = MLSTM(width=D, n_heads=H)

    def ours(x, i_bias, f_bias, scale, **arrays):
        tree = kernels(**arrays) | dict(norm=dict(scale=scale), i_bias=i_bias, f_bias=f_bias)
        return apply(mixer, x, tree, form)

    shapes = dict(x=(B, L, D), q=(D, H, K), k=(D, H, K), v=(D, H, V), o=(D, H, V), i=(D, H), f=(D, H))
    shapes |= dict(i_bias=(H,), f_bias=(H,), scale=(H, V), out=(H, V, D))
    agree(theirs, ours, small(shapes, f_bias=3, scale=1), within=5e-5)
