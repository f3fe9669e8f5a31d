"""GPT-2 (Radford et al. 2019). Its linear maps are `[in, out]`, as ours are."""

from typing import Any

from model.weights.family import Config, Family, Model, Settings, activation_from, activation_name, fixed, need
from model.weights.names import SAME, TRANSPOSED, Row, into_heads, out_of_heads, row, split


def settings(config: Config) -> Settings:
    fixed(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width, layers, heads, length = need(config, "n_embd", "n_layer", "n_head", "n_positions")
    return {
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": layers,
        "mixers": ("attention",),
        "position": "learned",
        "learned.max_len": length,
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "mlp": activation_from(config, "activation_function", "gelu_new"),
        "mlp_width": config.get("n_inner") or 4 * width,
        "tied": config.get("tie_word_embeddings", True),
        "attention.n_heads": heads,
        "attention.bias": "all",
    }


def config(model: Model) -> dict[str, Any]:
    return {
        "n_embd": model["width"],
        "n_layer": model["layers"],
        "n_head": model.every("n_heads") or 1,
        "n_positions": model.shared.get("learned.max_len", 1024),
        "n_inner": model.every("mlp_width"),
        "activation_function": activation_name(model),
        "layer_norm_epsilon": model["norm_eps"],
        "tie_word_embeddings": model["tied"],
    }


def rows(s: Settings) -> list[Row]:
    width, heads, at = s["width"], s["attention.n_heads"], "transformer.h.{layer}"
    kernels, biases = (tuple(f"layer/mixer/{name}/{part}" for name in "qkv") for part in ("kernel", "bias"))
    thirds, norms = (width, width, width), {"layer/mixer_norm": f"{at}.ln_1", "layer/mlp_norm": f"{at}.ln_2"}
    found = [
        row("embed/embedding", "transformer.wte.weight"),
        row("position/table", "transformer.wpe.weight"),
        row(kernels, f"{at}.attn.c_attn.weight", split(*thirds, axis=1) >> TRANSPOSED >> into_heads(heads)),
        row(biases, f"{at}.attn.c_attn.bias", split(*thirds) >> into_heads(heads)),
        row("layer/mixer/out/kernel", f"{at}.attn.c_proj.weight", TRANSPOSED >> out_of_heads(heads)),
        row("layer/mixer/out/bias", f"{at}.attn.c_proj.bias"),
    ]
    for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items():
        found.append(row(f"layer/mlp/{ours}/kernel", f"{at}.mlp.{theirs}.weight", SAME))
        found.append(row(f"layer/mlp/{ours}/bias", f"{at}.mlp.{theirs}.bias"))
    for ours, theirs in (norms | {"norm": "transformer.ln_f"}).items():
        found += [row(f"{ours}/scale", f"{theirs}.weight"), row(f"{ours}/bias", f"{theirs}.bias")]
    return found if s["tied"] else [*found, row("unembed/kernel", "lm_head.weight", TRANSPOSED)]


# Its files may keep the causal mask as a buffer.
FAMILY = Family("gpt2", "GPT2LMHeadModel", "transformer.", settings, config, rows, (r".*\.attn\.(masked_)?bias",))
