"""Attention against torch and transformers: the same weights, the same outputs and gradients."""

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.granite.modeling_granite import GraniteAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from model.contract import Context
from model.mixers.attention import Attention
from model.mixers.cross_attention import CrossAttention
from model.mixers.mla import MLA
from model.ops import tiled_attention
from model.ops.attention import attention
from model.ops.mask import CAUSAL, FULL, window
from model.positions import POSITIONS
from tests.parity.agreement import agree, normal

B, L, D, H, G, K = 2, 21, 32, 4, 2, 8
HEADS = dict(q=(B, L, H, K), k=(B, L, G, K), v=(B, L, G, K))
AHEAD = torch.full((L, L), float("-inf")).triu(1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_attention, "tile_shape", lambda o: (8, 8))


@pytest.fixture(params=["xla", "tiled"])
def implementation(request):
    return request.param


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_grouped_queries(implementation, causal):
    def theirs(q, k, v):
        y = scaled_dot_product_attention(*map(heads_first, (q, k, v)), is_causal=causal, enable_gqa=True)
        return heads_first(y)

    agree(theirs, partial(attention, mask=CAUSAL if causal else FULL, implementation=implementation), normal(**HEADS))


def test_window(implementation):
    near = AHEAD + torch.full((L, L), float("-inf")).tril(-5)

    def theirs(q, k, v):
        return heads_first(scaled_dot_product_attention(*map(heads_first, (q, k, v)), attn_mask=near, enable_gqa=True))

    agree(theirs, partial(attention, mask=CAUSAL & window(5), implementation=implementation), normal(**HEADS))


def test_soft_cap(implementation):
    module = SimpleNamespace(num_key_value_groups=H // G, head_dim=K, training=False)

    def theirs(q, k, v):
        return gemma2.eager_attention_forward(module, *map(heads_first, (q, k, v)), AHEAD, softcap=1.5)[0]

    agree(theirs, partial(attention, soft_cap=1.5, implementation=implementation), normal(**HEADS))


def test_sinks(implementation):
    def theirs(q, k, v, sinks):
        module = SimpleNamespace(num_key_value_groups=H // G, sinks=sinks, training=False)
        return gpt_oss.eager_attention_forward(module, *map(heads_first, (q, k, v)), AHEAD, scaling=K**-0.5)[0]

    agree(theirs, partial(attention, implementation=implementation), normal(**HEADS, sinks=(H,)))


# Whole modules. Kernels of ours are [D, H, K] where theirs are [H * K, D].


def linear(weight: torch.Tensor) -> torch.Tensor:
    """Our kernel `[D, H, K]` as their weight `[H K, D]`."""
    return weight.reshape(weight.shape[0], -1).T


def call(module: torch.nn.Module, weights: dict[str, torch.Tensor], *args):
    return torch.func.functional_call(module, weights, args)[0]


def rotary(embedding, config):
    return embedding(config)(torch.zeros(1), torch.arange(L)[None])


PROJECTIONS = dict(q=(D, H, K), k=(D, G, K), v=(D, G, K), out=(H, K, D))


def test_llama_attention(implementation):
    config = LlamaConfig(hidden_size=D, num_attention_heads=H, num_key_value_heads=G, attn_implementation="eager")
    module, places = LlamaAttention(config, 0), rotary(LlamaRotaryEmbedding, config)

    def theirs(x, q, k, v, out):
        weights = {"q_proj.weight": linear(q), "k_proj.weight": linear(k), "v_proj.weight": linear(v)}
        return call(module, weights | {"o_proj.weight": out.reshape(-1, D).T}, x, places, AHEAD)

    mixer = Attention(width=D, position=POSITIONS["rope"], n_heads=H, n_kv_heads=G, implementation=implementation)

    def ours(x, **kernels):
        return mixer.apply({"params": {name: {"kernel": value} for name, value in kernels.items()}}, x, Context())[0]

    agree(theirs, ours, normal(x=(B, L, D), **PROJECTIONS))


def test_query_and_key_norms(implementation):
    config = Qwen3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=K, rms_norm_eps=1e-5,
        attn_implementation="eager",
    )  # fmt: skip
    module, places = Qwen3Attention(config, 0), rotary(LlamaRotaryEmbedding, config)

    def theirs(x, q, k, v, out, q_norm, k_norm):
        weights = {"q_proj.weight": linear(q), "k_proj.weight": linear(k), "v_proj.weight": linear(v)}
        weights |= {"o_proj.weight": out.reshape(-1, D).T, "q_norm.weight": q_norm, "k_norm.weight": k_norm}
        return call(module, weights, x, places, AHEAD)

    mixer = Attention(
        width=D, position=POSITIONS["rope"], n_heads=H, n_kv_heads=G, qk_norm=True, implementation=implementation
    )

    def ours(x, q_norm, k_norm, **kernels):
        params = {name: {"kernel": value} for name, value in kernels.items()}
        return mixer.apply(
            {"params": params | {"q_norm": {"scale": q_norm}, "k_norm": {"scale": k_norm}}}, x, Context()
        )[0]

    agree(theirs, ours, normal(x=(B, L, D), **PROJECTIONS, q_norm=(K,), k_norm=(K,)))


# Families whose attention differs from Llama's by a setting: their module, their setting, ours.
FAMILIES = {
    "biases of queries, keys and values": (Qwen2Attention, Qwen2Config, {}, dict(bias="qkv")),
    "biases": (LlamaAttention, LlamaConfig, dict(attention_bias=True), dict(bias="all")),
    "norms over all heads": (
        Olmo2Attention, Olmo2Config, dict(rms_norm_eps=0.03), dict(qk_norm="all", qk_norm_eps=0.03)
    ),
    "a scale": (GraniteAttention, GraniteConfig, dict(attention_multiplier=0.2), dict(scale=0.2)),
    "a head dim and a scale": (
        gemma2.Gemma2Attention,
        Gemma2Config,
        dict(head_dim=12, query_pre_attn_scalar=24, attn_logit_softcapping=None),
        dict(head_dim=12, scale=24**-0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families(implementation, family):
    module, config, theirs, settings = FAMILIES[family]
    config = config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, num_hidden_layers=1, attn_implementation="eager",
        **theirs,
    )  # fmt: skip
    module, places = module(config, 0), rotary(LlamaRotaryEmbedding, config)
    dim = settings.get("head_dim", K)
    shapes = dict(q=(D, H, dim), k=(D, G, dim), v=(D, G, dim), out=(H, dim, D))
    biased = {"none": "", "qkv": "qkv", "all": ("q", "k", "v", "out")}[settings.get("bias", "none")]
    shapes |= {f"{name}_bias": shapes[name][1:] if name != "out" else (D,) for name in biased}
    if "qk_norm" in settings:
        shapes |= dict(q_norm=(H, dim), k_norm=(G, dim))

    def theirs(x, out, **arrays):
        weights = {"o_proj.weight": out.reshape(-1, D).T}
        for name, value in arrays.items():
            short, _, part = name.partition("_")
            if not part:
                weights[f"{name}_proj.weight"] = linear(value)
            elif part == "bias":
                weights[f"{'o' if short == 'out' else short}_proj.bias"] = value.reshape(-1)
            else:
                weights[f"{name}.weight"] = value.reshape(-1)
        return call(module, weights, x, places, AHEAD)

    heads = dict(n_heads=H, n_kv_heads=G, implementation=implementation)
    mixer = Attention(width=D, position=POSITIONS["rope"], **heads, **settings)

    def ours(x, **arrays):
        params = {name: {"kernel": arrays[name]} for name in ("q", "k", "v", "out")}
        for name in biased:
            params[name]["bias"] = arrays[f"{name}_bias"]
        params |= {name: {"scale": arrays[name]} for name in ("q_norm", "k_norm") if name in arrays}
        return mixer.apply({"params": params}, x, Context())[0]

    arrays = normal(x=(B, L, D), **shapes)
    if "scale" not in settings and "qk_norm" not in settings:
        return agree(theirs, ours, arrays)
    # Queries of a size that keeps the softmax away from its corners, where rounding is magnified.
    agree(theirs, ours, arrays | {name: 0.3 * arrays[name] for name in ("q", "k")})


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
def test_gpt2_attention(implementation, scaled):
    config = GPT2Config(n_embd=D, n_head=H, n_layer=1, attn_implementation="eager", scale_attn_weights=scaled)
    module = GPT2Attention(config, layer_idx=0).eval()

    def theirs(x, kernel, bias, out, out_bias):
        weights = {"c_attn.weight": kernel.reshape(D, 3 * D), "c_attn.bias": bias.reshape(-1)}
        weights |= {"c_proj.weight": out.reshape(D, D), "c_proj.bias": out_bias}
        return call(module, weights, x, None, AHEAD)

    mixer = Attention(width=D, n_heads=H, bias="all", scale=None if scaled else 1.0, implementation=implementation)

    def ours(x, kernel, bias, out, out_bias):
        params = {name: {"kernel": kernel[:, i], "bias": bias[i]} for i, name in enumerate("qkv")}
        return mixer.apply({"params": params | {"out": {"kernel": out, "bias": out_bias}}}, x, Context())[0]

    arrays = normal(x=(B, L, D), kernel=(D, 3, H, K), bias=(3, H, K), out=(H, K, D), out_bias=(D,))
    agree(theirs, ours, arrays | {"kernel": 0.2 * arrays["kernel"]})


@pytest.mark.parametrize("bias", ["none", "all"])
def test_cross_attention(implementation, bias):
    M = 13
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[0, 9:] = True
    module = torch.nn.MultiheadAttention(D, H, bias=bias == "all", batch_first=True)

    def theirs(x, memory, q, k, v, out, **biases):
        weights = {
            "in_proj_weight": torch.cat([linear(q), linear(k), linear(v)]),
            "out_proj.weight": out.reshape(-1, D).T,
        }
        if biases:
            weights |= {"in_proj_bias": biases["bias"].reshape(-1), "out_proj.bias": biases["out_bias"]}
        return torch.func.functional_call(module, weights, (x, memory, memory), dict(key_padding_mask=padding))[0]

    mixer = CrossAttention(width=D, n_heads=H, bias=bias, implementation=implementation)
    segments = jnp.asarray((~padding).numpy(), jnp.int32)

    def ours(x, memory, **arrays):
        ctx = Context(memory=memory, memory_segments=segments)
        params = {name: {"kernel": arrays[name]} for name in full}
        if biases:
            for name, value in zip(full, (*arrays["bias"], arrays["out_bias"]), strict=True):
                params[name]["bias"] = value
        return mixer.apply({"params": params}, x, ctx)[0]

    full = dict(q=(D, H, K), k=(D, H, K), v=(D, H, K), out=(H, K, D))
    # Those of queries, keys and values in one: the keys' adds the same to all of a query's scores, so its gradient
    # is rounding.
    biases = dict(bias=(3, H, K), out_bias=(D,)) if bias == "all" else {}
    agree(theirs, ours, normal(x=(B, L, D), memory=(B, M, D), **full, **biases))


# DeepSeek's sharpness of rotated and of all dims, and the settings that say the same here.
DEEPSEEK = {
    "none": (None, {}),
    "yarn": ((1.0, 1.0), dict(mscale=1.0, mscale_all_dim=1.0)),
    "yarn by default": ((1.0, 1.0), {}),
    "yarn of two sizes": ((1.3, 0.4), dict(mscale=1.3, mscale_all_dim=0.4)),
}


@pytest.mark.parametrize("q_rank", [0, 12])
@pytest.mark.parametrize("form", ["whole", "cached"])
@pytest.mark.parametrize("scaling", DEEPSEEK)
def test_latent_attention(q_rank, form, scaling):
    rank, P = 10, 6
    nope, V = (K, K) if scaling == "none" else (12, 5)  # dims of a head by default, and others
    mscales, own = DEEPSEEK[scaling]
    given, settings = {}, {}
    if mscales:
        given = dict(rope_type="yarn", rope_theta=10_000.0, factor=40.0, original_max_position_embeddings=16)
        given = dict(rope_parameters=given | dict(zip(("mscale", "mscale_all_dim"), mscales, strict=True)))
        settings = dict(scaling="yarn", factor=40.0, original_length=16, **own)
    config = DeepseekV3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=q_rank or None, kv_lora_rank=rank,
        qk_nope_head_dim=nope, qk_rope_head_dim=P, v_head_dim=V, head_dim=P, attn_implementation="eager",
        **given,
    )  # fmt: skip
    module, places = DeepseekV3Attention(config, 0), rotary(DeepseekV3RotaryEmbedding, config)

    def theirs(x, q, kv_down, k_shared, kv_norm, k_up, v_up, out, q_down=None, q_norm=None):
        weights = {"kv_a_proj_with_mqa.weight": torch.cat([kv_down, k_shared[:, 0]], dim=1).T}
        weights |= {"kv_a_layernorm.weight": kv_norm, "kv_b_proj.weight": linear(torch.cat([k_up, v_up], dim=2))}
        weights |= {"o_proj.weight": out.reshape(-1, D).T}
        if q_rank:
            weights |= {"q_a_proj.weight": q_down.T, "q_a_layernorm.weight": q_norm, "q_b_proj.weight": linear(q)}
        else:
            weights |= {"q_proj.weight": linear(q)}
        return call(module, weights, x, places, AHEAD)

    position = partial(POSITIONS["rope"], layout="interleaved", **settings)
    dims = {} if scaling == "none" else dict(head_dim=nope, v_dim=V)
    mixer = MLA(width=D, position=position, n_heads=H, kv_rank=rank, q_rank=q_rank, shared_dim=P, norm_eps=1e-6, **dims)

    def ours(x, kv_norm, k_up, v_up, q_norm=None, **kernels):
        params = {name: {"kernel": value} for name, value in kernels.items()}
        params |= {"kv_norm": {"scale": kv_norm}, "k_up": k_up, "v_up": v_up}
        params |= {"q_norm": {"scale": q_norm}} if q_rank else {}
        if form == "whole":
            return mixer.apply({"params": params}, x, Context())[0]
        ctx = Context(positions=jnp.arange(L)[None])
        return mixer.apply({"params": params}, x, ctx, mixer.init_state(B, L))[0]

    shapes = dict(x=(B, L, D), q=(q_rank or D, H, nope + P), kv_down=(D, rank), k_shared=(D, 1, P), kv_norm=(rank,))
    shapes |= dict(k_up=(rank, H, nope), v_up=(rank, H, V), out=(H, V, D))
    shapes |= dict(q_down=(D, q_rank), q_norm=(q_rank,)) if q_rank else {}
    # Inputs of a size that keeps the softmax away from its corners, where rounding is magnified.
    arrays = {
        name: value * (1 if name in ("x", "kv_norm", "q_norm") else 0.3) for name, value in normal(**shapes).items()
    }
    agree(theirs, ours, arrays)
