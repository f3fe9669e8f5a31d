"""Llama 1 to 3 (https://arxiv.org/abs/2407.21783)."""

from typing import Any

from model.weights import rope
from model.weights.family import Config, Family, Model, Settings, fixed, need
from model.weights.names import TRANSPOSED, Row, into_heads, out_of_heads, row


def settings(config: Config) -> Settings:
    fixed(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
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
        "attention.n_heads": heads,
        "attention.n_kv_heads": config.get("num_key_value_heads") or heads,
        **rope.settings(rope.parameters(config)),
    }


def config(model: Model) -> dict[str, Any]:
    first = model.layers[0]
    return {
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": first.get("n_heads", 1),
        "num_key_value_heads": first.get("n_kv_heads", 1),
        "intermediate_size": model["mlp_width"],
        "hidden_act": "silu",
        "rms_norm_eps": model["norm_eps"],
        "rope_parameters": rope.given(first),
        "tie_word_embeddings": model["tied"],
    }


def attention(heads: int, kv_heads: int) -> list[Row]:
    """What Llama and those after it call the maps of attention."""
    return [
        row("layer/mixer/q/kernel", "model.layers.{layer}.self_attn.q_proj.weight", into_heads(heads)),
        row("layer/mixer/k/kernel", "model.layers.{layer}.self_attn.k_proj.weight", into_heads(kv_heads)),
        row("layer/mixer/v/kernel", "model.layers.{layer}.self_attn.v_proj.weight", into_heads(kv_heads)),
        row("layer/mixer/out/kernel", "model.layers.{layer}.self_attn.o_proj.weight", out_of_heads(heads)),
    ]


def gated_mlp() -> list[Row]:
    """Their gate is what is activated; ours is the other one."""
    return [
        row("layer/mlp/up/kernel", "model.layers.{layer}.mlp.gate_proj.weight", TRANSPOSED),
        row("layer/mlp/gate/kernel", "model.layers.{layer}.mlp.up_proj.weight", TRANSPOSED),
        row("layer/mlp/down/kernel", "model.layers.{layer}.mlp.down_proj.weight", TRANSPOSED),
    ]


def rows(s: Settings) -> list[Row]:
    found = [
        row("embed/embedding", "model.embed_tokens.weight"),
        row("layer/mixer_norm/scale", "model.layers.{layer}.input_layernorm.weight"),
        *attention(s["attention.n_heads"], s["attention.n_kv_heads"]),
        row("layer/mlp_norm/scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        *gated_mlp(),
        row("norm/scale", "model.norm.weight"),
    ]
    return found if s["tied"] else [*found, row("unembed/kernel", "lm_head.weight", TRANSPOSED)]


FAMILY = Family("llama", "LlamaForCausalLM", "model.", settings, config, rows, (r".*rotary_emb\.inv_freq",))
