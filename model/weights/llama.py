"""Llama 1 to 3 (https://arxiv.org/abs/2407.21783)."""

from typing import Any

from model.weights import rope
from model.weights.family import Config, Family, Model, Settings, fixed, need
from model.weights.names import TRANSPOSED, Row, into_heads, out_of_heads, row


def settings(config: Config) -> Settings:
    fixed(config, hidden_act="silu")
    width, heads, layers, hidden = need(
        config, "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"
    )
    return {
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": layers,
        "mixers": ("attention",),
        "position": "rope",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "mlp": "swiglu",
        "mlp_width": hidden,
        "tied": config.get("tie_word_embeddings", False),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "attention.n_heads": heads,
        "attention.n_kv_heads": config.get("num_key_value_heads") or heads,
        "attention.head_dim": config.get("head_dim") or width // heads,
        "attention.bias": "all" if config.get("attention_bias") else "none",
        **rope.settings(rope.parameters(config)),
    }


def config(model: Model) -> dict[str, Any]:
    return {
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model.every("n_heads") or 1,
        "num_key_value_heads": model.every("n_kv_heads") or 1,
        "head_dim": model.every("head_dim") or 1,
        "intermediate_size": model.every("mlp_width") or 1,
        "hidden_act": "silu",
        "attention_bias": model.every("bias") == "all",
        "mlp_bias": bool(model.every("mlp_bias")),
        "rms_norm_eps": model["norm_eps"],
        "rope_parameters": rope.given(model.layers[0]),
        "tie_word_embeddings": model["tied"],
    }


def attention(heads: int, kv_heads: int, bias: bool = False) -> list[Row]:
    """What Llama and those after it call the maps of attention."""
    at = "model.layers.{layer}.self_attn"
    found = [row("layer/mixer/out/kernel", f"{at}.o_proj.weight", out_of_heads(heads))]
    found += [row("layer/mixer/out/bias", f"{at}.o_proj.bias")] if bias else []
    for name, n in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
        found.append(row(f"layer/mixer/{name}/kernel", f"{at}.{name}_proj.weight", into_heads(n)))
        found += [row(f"layer/mixer/{name}/bias", f"{at}.{name}_proj.bias", into_heads(n))] if bias else []
    return found


def gated_mlp(bias: bool = False) -> list[Row]:
    """Their gate is what is activated; ours is the other one."""
    found = []
    for ours, theirs in {"up": "gate", "gate": "up", "down": "down"}.items():
        at = f"model.layers.{{layer}}.mlp.{theirs}_proj"
        found.append(row(f"layer/mlp/{ours}/kernel", f"{at}.weight", TRANSPOSED))
        found += [row(f"layer/mlp/{ours}/bias", f"{at}.bias")] if bias else []
    return found


def rows(s: Settings) -> list[Row]:
    found = [
        row("embed/embedding", "model.embed_tokens.weight"),
        row("layer/mixer_norm/scale", "model.layers.{layer}.input_layernorm.weight"),
        *attention(s["attention.n_heads"], s["attention.n_kv_heads"], s["attention.bias"] == "all"),
        row("layer/mlp_norm/scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        *gated_mlp(s["mlp_bias"]),
        row("norm/scale", "model.norm.weight"),
    ]
    return found if s["tied"] else [*found, row("unembed/kernel", "lm_head.weight", TRANSPOSED)]


FAMILY = Family("llama", "LlamaForCausalLM", "model.", settings, config, rows, (r".*rotary_emb\.inv_freq",))
