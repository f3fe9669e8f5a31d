"""Recurrent mixers against transformers, and RWKV-6 against its definition: same weights, outputs and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import FalconMambaConfig, JambaConfig, Mamba2Config, MambaConfig, RecurrentGemmaConfig, RwkvConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as recurrent_gemma
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from model.contract import Context
from model.mixers.mamba import Mamba
from model.mixers.mamba2 import Mamba2
from model.mixers.rglru import RGLRU, rg_lru
from model.mixers.rwkv import RWKV
from model.mixers.rwkv6 import RWKV6
from tests.parity.agreement import agree, normal

B, L, D, W = 2, 21, 16, 4


def call(module: torch.nn.Module, weights: dict[str, torch.Tensor], *args):
    out = torch.func.functional_call(module.eval(), weights, args)
    return out[0] if isinstance(out, tuple) else out


def apply(mixer, x, tree, form="whole"):
    """Our output, in one pass or in two with the state carried."""
    if form == "whole":
        return mixer.apply({"params": tree}, x, Context())[0]
    state, outputs = mixer.init_state(B, L), []
    for part in (slice(0, 8), slice(8, L)):
        ctx = Context(positions=jnp.arange(L)[None, part])
        y, state = mixer.apply({"params": tree}, x[:, part], ctx, state)
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1)


def kernels(**arrays):
    return {name: {"kernel": value} for name, value in arrays.items()}


def small(shapes: dict[str, tuple[int, ...]], **shift: float) -> dict[str, np.ndarray]:
    """Normal arrays, weights of a moderate size; `shift` moves some of them."""
    made = normal(**shapes)
    return {name: made[name] * (1 if name == "x" else 0.4) + np.float32(shift.get(name, 0)) for name in shapes}


def conv(weight: torch.Tensor) -> torch.Tensor:
    """Our `[W, E]` as their `[E, 1, W]`."""
    return weight.T[:, None]


def mamba_of(norm, N, R):
    """Theirs: Mamba's, Jamba's with learned norms of dt, B and C, Falcon's with plain ones."""
    inner = dict(hidden_size=D, num_hidden_layers=1)
    if norm == "learned":
        sizes = dict(mamba_d_state=N, mamba_expand=2, mamba_dt_rank=R, mamba_d_conv=W, rms_norm_eps=0.03)
        return JambaMambaMixer(JambaConfig(**inner, **sizes), 0)
    sizes = dict(state_size=N, expand=2, intermediate_size=2 * D, time_step_rank=R, conv_kernel=W)
    if norm == "plain":
        return FalconMambaMixer(
            FalconMambaConfig(**inner, **sizes, mixer_rms_eps=0.03), 0, initialize_mixer_weights=False
        )
    return MambaMixer(MambaConfig(**inner, **sizes), 0)


@pytest.mark.parametrize("form", ["whole", "carried"])
@pytest.mark.parametrize("norm", ["none", "learned", "plain"])
def test_mamba(norm, form):
    E, N, R = 2 * D, 5, 3
    module = mamba_of(norm, N, R)

    def theirs(x, into, kernel, conv_bias, low, dt, dt_bias, A_log, skip, out, **scales):
        weights = {"in_proj.weight": into.reshape(D, 2 * E).T, "conv1d.weight": conv(kernel), "conv1d.bias": conv_bias}
        weights |= {"x_proj.weight": low.T, "dt_proj.weight": dt.T, "dt_proj.bias": dt_bias}
        weights |= {f"{name.lower().replace('_', '_layer')}.weight": scale for name, scale in scales.items()}
        return call(module, weights | {"A_log": A_log, "D": skip, "out_proj.weight": out.T}, x)

    mixer = Mamba(width=D, state=N, dt_rank=R, conv=W, norm=norm, norm_eps=0.03)

    def ours(x, into, kernel, conv_bias, low, dt, dt_bias, A_log, skip, out, **scales):
        tree = kernels(x=low, out=out) | {"in": {"kernel": into}, "conv": kernel, "conv_bias": conv_bias}
        tree |= {name: {"scale": scale} for name, scale in scales.items()}
        return apply(mixer, x, tree | dict(dt=dt, dt_bias=dt_bias, A_log=A_log, D=skip), form)

    shapes = dict(x=(B, L, D), into=(D, 2, E), kernel=(W, E), conv_bias=(E,), low=(E, R + 2 * N), dt=(R, E))
    shapes |= dict(dt_bias=(E,), A_log=(E, N), skip=(E,), out=(E, D))
    shapes |= dict(dt_norm=(R,), B_norm=(N,), C_norm=(N,)) if norm == "learned" else {}
    agree(theirs, ours, small(shapes, dt_bias=-1))


@pytest.mark.parametrize("form", ["whole", "carried"])
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2(groups, form):
    E, N, P = 2 * D, 5, 8
    H, shared = E // P, 2 * groups * N
    config = Mamba2Config(
        hidden_size=D, state_size=N, expand=2, num_heads=H, head_dim=P, n_groups=groups, conv_kernel=W, chunk_size=8,
        layer_norm_epsilon=1e-5, num_hidden_layers=1, use_bias=False,
    )  # fmt: skip
    module = Mamba2Mixer(config, 0)
    if groups > 1:  # the authors' norm is of each group; this library's only in its later models
        module.norm = Zamba2RMSNormGated(E, E // groups, eps=1e-5)

    def theirs(x, z, u, BC, dt, conv_x, conv_x_bias, conv_BC, conv_BC_bias, dt_bias, A_log, skip, scale, out):
        weights = {"in_proj.weight": torch.cat([z, u, BC, dt], dim=1).T, "A_log": A_log, "D": skip, "dt_bias": dt_bias}
        weights |= {"conv1d.weight": conv(torch.cat([conv_x, conv_BC], dim=1))}
        weights |= {"conv1d.bias": torch.cat([conv_x_bias, conv_BC_bias]), "norm.weight": scale.reshape(-1)}
        return call(module, weights | {"out_proj.weight": out.T}, x)

    mixer = Mamba2(width=D, state=N, head_dim=P, n_groups=groups, conv=W)

    def ours(x, z, u, BC, dt, skip, scale, out, **direct):
        tree = kernels(z=z, x=u, BC=BC, dt=dt, out=out) | dict(D=skip, norm=dict(scale=scale))
        return apply(mixer, x, tree | direct, form)

    shapes = dict(x=(B, L, D), z=(D, E), u=(D, E), BC=(D, shared), dt=(D, H), dt_bias=(H,), A_log=(H,), skip=(H,))
    shapes |= dict(conv_x=(W, E), conv_x_bias=(E,), conv_BC=(W, shared), conv_BC_bias=(shared,))
    agree(theirs, ours, small(shapes | dict(scale=(groups, E // groups), out=(E, D)), scale=1))


@pytest.mark.parametrize("form", ["whole", "carried"])
def test_griffin_block(form):
    E, H = 24, 3
    config = RecurrentGemmaConfig(hidden_size=D, lru_width=E, num_attention_heads=H, num_hidden_layers=1)
    module = recurrent_gemma.RecurrentGemmaRecurrentBlock(config, 0)
    places = torch.arange(L)[None].expand(B, L)

    def theirs(x, y, y_bias, u, u_bias, kernel, conv_bias, gates, gates_bias, Lambda, out, out_bias):
        weights = {"linear_y.weight": y.T, "linear_y.bias": y_bias, "linear_x.weight": u.T, "linear_x.bias": u_bias}
        weights |= {"linear_out.weight": out.T, "linear_out.bias": out_bias}
        weights |= {"conv_1d.weight": conv(kernel), "conv_1d.bias": conv_bias, "rg_lru.recurrent_param": Lambda}
        for which, name in enumerate(("recurrent", "input")):
            weights |= {f"rg_lru.{name}_gate_weight": gates[which], f"rg_lru.{name}_gate_bias": gates_bias[which]}
        return call(module, weights, x, places, None, False)

    mixer = RGLRU(width=D, inner=E, n_heads=H, conv=W)

    def ours(x, y, y_bias, u, u_bias, kernel, out, out_bias, **direct):
        tree = dict(y=dict(kernel=y, bias=y_bias), x=dict(kernel=u, bias=u_bias), out=dict(kernel=out, bias=out_bias))
        return apply(mixer, x, tree | dict(conv=kernel) | direct, form)

    shapes = dict(x=(B, L, D), y=(D, E), y_bias=(E,), u=(D, E), u_bias=(E,), kernel=(W, E), conv_bias=(E,))
    shapes |= dict(gates=(2, H, E // H, E // H), gates_bias=(2, H, E // H), Lambda=(E,), out=(E, D), out_bias=(D,))
    agree(theirs, ours, small(shapes, Lambda=-3))


def test_griffin_recurrence_across_documents():
    H, K = 3, 5
    places = np.r_[np.arange(9), np.arange(L - 9)][None].repeat(B, axis=0)
    config = RecurrentGemmaConfig(hidden_size=H * K, num_attention_heads=H, num_hidden_layers=1)
    module = recurrent_gemma.RecurrentGemmaRglru(config)

    def theirs(x, gates, bias, Lambda):
        weights = {"recurrent_param": Lambda}
        for which, name in enumerate(("recurrent", "input")):
            weights |= {f"{name}_gate_weight": gates[which], f"{name}_gate_bias": bias[which]}
        module.recurrent_states = None
        return call(module, weights, x, torch.tensor(places))

    def ours(x, gates, bias, Lambda):
        logits = jnp.einsum("blhk,ohkj->oblhj", x.reshape(B, L, H, K), gates) + bias[:, None, None]
        r, i = (1 / (1 + jnp.exp(-logits))).reshape(2, *x.shape)
        return rg_lru(x, r, i, Lambda, jnp.ones((B, H * K)), jnp.asarray(places == 0), None, None)[0]

    shapes = dict(x=(B, L, H * K), gates=(2, H, K, K), bias=(2, H, K), Lambda=(H * K,))
    agree(theirs, ours, small(shapes, Lambda=-3))


@pytest.mark.parametrize("form", ["whole", "carried"])
def test_rwkv(form):
    module = RwkvSelfAttention(RwkvConfig(hidden_size=D, num_hidden_layers=1), 0)
    long = dict(k="key", v="value", r="receptance")

    def theirs(x, decay, bonus, out, **weights):
        given = {"time_decay": decay, "time_first": bonus, "output.weight": out.T}
        for short, name in long.items():
            given |= {f"{name}.weight": weights[short].T, f"time_mix_{name}": weights[f"mix_{short}"][None, None]}
        return call(module, given, x)

    mixer = RWKV(width=D)

    def ours(x, k, v, r, out, **direct):
        return apply(mixer, x, kernels(k=k, v=v, r=r, out=out) | direct, form)

    shapes = dict(x=(B, L, D), k=(D, D), v=(D, D), r=(D, D), out=(D, D), decay=(D,), bonus=(D,))
    shapes |= {f"mix_{name}": (D,) for name in long}
    agree(theirs, ours, small(shapes, decay=-1))


@pytest.mark.parametrize("form", ["whole", "carried"])
def test_rwkv6(form):
    """The definition in https://arxiv.org/abs/2404.05892, one token and one head at a time."""
    K, R, S = 4, 3, 5
    H = D // K

    def theirs(x, mix_base, mix, mix_down, mix_up, decay, decay_down, decay_up, bonus, r, k, v, g, scale, bias, out):
        before = torch.cat([torch.zeros(B, 1, D), x[:, :-1]], dim=1)

        def lerp(amount):
            return x + (before - x) * amount

        base = lerp(mix_base)
        mixes = [lerp(mix[o] + torch.tanh(base @ mix_down[:, o]) @ mix_up[o]) for o in range(5)]
        d = decay.reshape(-1) + torch.tanh(mixes[0] @ decay_down) @ decay_up.reshape(S, D)
        w = torch.exp(-torch.exp(d)).reshape(B, L, H, K)
        maps = [mixes[i] @ matrix.reshape(D, D) for i, matrix in enumerate((k, v, r, g), start=1)]
        keys, values, queries, gate = (leaf.reshape(B, L, H, K) for leaf in maps)
        heads = []
        for head in range(H):
            state, outputs = torch.zeros(B, K, K), []
            for t in range(L):
                new = keys[:, t, head, :, None] * values[:, t, head, None]
                read = state + bonus[head][:, None] * new
                outputs.append((queries[:, t, head, None] @ read)[:, 0])
                state = w[:, t, head, :, None] * state + new
            heads.append(torch.stack(outputs, dim=1))
        y = torch.nn.functional.group_norm(torch.cat(heads, dim=2).reshape(B * L, D), H, eps=64e-5)
        y = (y * scale.reshape(-1) + bias.reshape(-1)).reshape(gate.shape) * torch.nn.functional.silu(gate)
        return y.reshape(B, L, D) @ out.reshape(D, D)

    mixer = RWKV6(width=D, head_dim=K, mix_rank=R, decay_rank=S)

    def ours(x, mix_down, decay_down, decay_up, r, k, v, g, scale, bias, out, **direct):
        tree = kernels(mix_down=mix_down, decay_down=decay_down, decay_up=decay_up, r=r, k=k, v=v, g=g, out=out)
        return apply(mixer, x, tree | dict(norm=dict(scale=scale, bias=bias)) | direct, form)

    heads = dict.fromkeys("rkvg", (D, H, K))
    shapes = dict(x=(B, L, D), mix_base=(D,), mix=(5, D), mix_down=(D, 5, R), mix_up=(5, R, D), decay=(H, K))
    shapes |= dict(decay_down=(D, S), decay_up=(S, H, K), bonus=(H, K), scale=(H, K), bias=(H, K), out=(H, K, D))
    agree(theirs, ours, small(shapes | heads, decay=-1, scale=1))
