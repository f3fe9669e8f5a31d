"""Delta rules against transformers: same weights, outputs and gradients."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from model.mixers.gated_deltanet import GatedDeltaNet
from model.mixers.kda import KDA
from tests.parity.agreement import agree
from tests.parity.test_recurrent import apply, call, conv, kernels, small

B, L, D, W, K = 2, 21, 16, 4, 4
H = D // K
CONVS = ("conv_q", "conv_k", "conv_v")


@pytest.mark.parametrize("form", ["whole", "carried"])
def test_gated_deltanet(form):
    P = 2 * K
    config = Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=H, linear_num_value_heads=H, linear_key_head_dim=K, linear_value_head_dim=P,
        linear_conv_kernel_dim=W, rms_norm_eps=1e-5, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    module = Qwen3NextGatedDeltaNet(config, 0)

    def theirs(x, q, k, v, gate, beta, dt, A_log, dt_bias, scale, out, **convs):
        heads = torch.cat([leaf.reshape(D, H, -1) for leaf in (q, k, v, gate)], dim=2)
        rates = torch.stack([beta, dt], dim=2)
        weights = {"in_proj_qkvz.weight": heads.reshape(D, -1).T, "in_proj_ba.weight": rates.reshape(D, -1).T}
        weights |= {"conv1d.weight": conv(torch.cat([convs[name] for name in CONVS], dim=1)), "A_log": A_log}
        weights |= {"dt_bias": dt_bias, "norm.weight": scale, "out_proj.weight": out.reshape(-1, D).T}
        return call(module, weights, x)

    mixer = GatedDeltaNet(width=D, head_dim=K, expand=2, conv=W)

    def ours(x, scale, A_log, dt_bias, conv_q, conv_k, conv_v, **maps):
        tree = dict(A_log=A_log, dt_bias=dt_bias, conv_q=conv_q, conv_k=conv_k, conv_v=conv_v, norm=dict(scale=scale))
        return apply(mixer, x, kernels(**maps) | tree, form)

    shapes = dict(x=(B, L, D), q=(D, D), k=(D, D), v=(D, 2 * D), gate=(D, H, P), beta=(D, H), dt=(D, H), A_log=(H,))
    shapes |= dict(dt_bias=(H,), scale=(P,), out=(H, P, D), conv_q=(W, D), conv_k=(W, D), conv_v=(W, 2 * D))
    agree(theirs, ours, small(shapes, scale=1))


@pytest.mark.parametrize("form", ["whole", "carried"])
def test_kda(form):
    config = KimiLinearConfig(
        hidden_size=D, linear_num_heads=H, linear_head_dim=K, linear_conv_kernel_dim=W, rms_norm_eps=1e-5,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    module = KimiLinearDeltaAttention(config, 0)

    def theirs(x, q, k, v, beta, decay_down, decay_up, gate_down, gate_up, A_log, dt_bias, scale, out, **convs):
        weights = {"q_proj.weight": q.T, "k_proj.weight": k.T, "v_proj.weight": v.T, "b_proj.weight": beta.T}
        weights |= {"conv1d.weight": conv(torch.cat([convs[name] for name in CONVS], dim=1))}
        weights |= {"forget_gate.f_a_proj.weight": decay_down.T, "g_a_proj.weight": gate_down.T}
        weights |= {"forget_gate.f_b_proj.weight": decay_up.reshape(K, D).T, "g_b_proj.weight": gate_up.reshape(K, D).T}
        weights |= {"forget_gate.A_log": A_log.reshape(1, 1, H, 1), "forget_gate.dt_bias": dt_bias.reshape(D)}
        return call(module, weights | {"o_norm.weight": scale, "o_proj.weight": out.reshape(D, D).T}, x)

    mixer = KDA(width=D, head_dim=K, conv=W)

    def ours(x, scale, A_log, dt_bias, conv_q, conv_k, conv_v, **maps):
        tree = dict(A_log=A_log, dt_bias=dt_bias, conv_q=conv_q, conv_k=conv_k, conv_v=conv_v, norm=dict(scale=scale))
        return apply(mixer, x, kernels(**maps) | tree, form)

    low = dict(decay_down=(D, K), decay_up=(K, H, K), gate_down=(D, K), gate_up=(K, H, K))
    shapes = dict(x=(B, L, D), q=(D, D), k=(D, D), v=(D, D), beta=(D, H), A_log=(H,), dt_bias=(H, K), scale=(K,))
    shapes |= dict(out=(H, K, D), conv_q=(W, D), conv_k=(W, D), conv_v=(W, D))
    agree(theirs, ours, small(shapes | low, scale=1))
