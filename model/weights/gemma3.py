"""Gemma 3, its text (https://arxiv.org/abs/2503.19786): norms around a branch, windows in five layers of six."""

import math
from typing import Any

from model.errors import choose
from model.settings import check
from model.weights import rope
from model.weights.family import Config, Family, Model, Settings, fixed, need
from model.weights.llama import attention, gated_mlp
from model.weights.names import ABOVE_ONE, Row, row

KINDS = {"sliding_attention": "near", "full_attention": "full"}
BASES = {"near": ("rope_local_base_freq", 10_000.0), "full": ("rope_theta", 1_000_000.0)}


def settings(config: Config) -> Settings:
    fixed(
        config,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    width, layers, heads, hidden = need(
        config, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    )
    kinds, head_dim = cycle(layer_kinds(config, layers)), config.get("head_dim", 256)
    found = {
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": layers,
        "mixers": kinds,
        "position": "none",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "norm_order": "sandwich",
        "mlp": "geglu",
        "mlp_width": hidden,
        "tied": config.get("tie_word_embeddings", True),
        "embed_scale": math.sqrt(width),
        "logit_cap": config.get("final_logit_softcapping") or 0.0,
    }
    for kind in dict.fromkeys(kinds):
        found |= {
            f"{kind}.mixer": "attention",
            f"{kind}.position": "rope",
            f"{kind}.n_heads": heads,
            f"{kind}.n_kv_heads": config.get("num_key_value_heads") or heads,
            f"{kind}.head_dim": head_dim,
            f"{kind}.scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
            f"{kind}.qk_norm": True,
            f"{kind}.qk_norm_eps": config.get("rms_norm_eps", 1e-6),
            f"{kind}.window": config.get("sliding_window") if kind == "near" else None,
            **rope.settings(rotary(config, kind), f"{kind}.rope"),
        }
    return found


def layer_kinds(config: Config, layers: int) -> tuple[str, ...]:
    """Each layer's; of older files, every sixth sees all, or what they say instead of six."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    usual = ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)]
    return tuple(choose("layer type", str(kind), KINDS) for kind in config.get("layer_types") or usual)


def cycle(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest beginning that the rest repeats."""
    for n in range(1, len(kinds)):
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds)):
            return kinds[:n]
    return kinds


def rotary(config: Config, kind: str) -> dict[str, Any]:
    """Their rotary parameters of a kind of layer. Older files scale those that see all."""
    key = next(key for key, name in KINDS.items() if name == kind)
    now = (config.get("rope_parameters") or {}).get(key)
    check(f"rope_parameters.{key} of config.json", now, dict | None)
    if now:
        return rope.parameters({"rope_parameters": now})
    older = {key: value for key, value in config.items() if kind == "full" or key != "rope_scaling"}
    return rope.parameters({**older, "rope_parameters": None}, *BASES[kind])


def config(model: Model) -> dict[str, Any]:
    kinds = ["full_attention" if layer.get("window") is None else "sliding_attention" for layer in model.layers]
    found = {
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model.every("n_heads") or 1,
        "num_key_value_heads": model.every("n_kv_heads") or 1,
        "head_dim": model.every("head_dim") or 1,
        "query_pre_attn_scalar": whole((model.every("scale") or 1.0) ** -2),
        "intermediate_size": model.every("mlp_width") or 1,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": model["norm_eps"],
        "layer_types": kinds,
        "sliding_window": next((layer["window"] for layer in model.layers if layer.get("window")), 4096),
        "final_logit_softcapping": model["logit_cap"] or None,
        "rope_parameters": {
            kind: rope.given(layer) for kind, layer in reversed([*zip(kinds, model.layers, strict=True)])
        },
        "tie_word_embeddings": model["tied"],
    }
    for kind, name in KINDS.items():
        found["rope_parameters"].setdefault(kind, {"rope_type": "default", "rope_theta": BASES[name][1]})
    return found


def whole(x: float) -> int | float:
    """A whole number, where only rounding keeps it from being one."""
    return round(x) if abs(x - round(x)) < 1e-6 * x else x


def rows(s: Settings) -> list[Row]:
    kind, layer = s["mixers"][0], "model.layers.{layer}"
    norms = {
        "mixer_norm": "input_layernorm",
        "mixer_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "mixer/q_norm": "self_attn.q_norm",
        "mixer/k_norm": "self_attn.k_norm",
    }
    return [
        row("embed/embedding", "model.embed_tokens.weight"),
        *attention(s[f"{kind}.n_heads"], s[f"{kind}.n_kv_heads"]),
        *gated_mlp(),
        *(row(f"layer/{ours}/scale", f"{layer}.{theirs}.weight", ABOVE_ONE) for ours, theirs in norms.items()),
        row("norm/scale", "model.norm.weight", ABOVE_ONE),
    ]


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", "model.", settings, config, rows)
