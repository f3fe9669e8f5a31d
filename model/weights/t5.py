"""T5 (https://arxiv.org/abs/1910.10683), and 1.1 of it with gated MLPs and an unembedding of its own.

It begins to write at token 0: a prompt is the source and, behind it, that token.
"""

from typing import Any

from model.asked import Asked
from model.errors import UserError
from model.weights.family import Config, Family, Model, Settings, need
from model.weights.names import TRANSPOSED, Row, into_heads, out_of_heads, row

MLPS = {"relu": "relu", "gated-gelu": "geglu"}


def settings(config: Config) -> Settings:
    width, layers, heads, head_dim, hidden = need(config, "d_model", "num_layers", "num_heads", "d_kv", "d_ff")
    kind, tied = config.get("feed_forward_proj", "relu"), config.get("tie_word_embeddings", True)
    if kind not in MLPS:
        raise UserError(f"config.json of a t5 has feed_forward_proj {kind!r}; allowed: {', '.join(MLPS)}")
    found = {
        "kind": "encoder_decoder",
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": config.get("num_decoder_layers") or layers,
        "encoder_layers": layers,
        "mixers": ("attention",),
        "position": "t5",
        "t5.shared": True,
        "t5.buckets": config.get("relative_attention_num_buckets", 32),
        "t5.max_distance": config.get("relative_attention_max_distance", 128),
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "mlp": MLPS[kind],
        "mlp_width": hidden,
        "mlp_bias": False,
        "tied": tied,
        "logit_scale": width**-0.5 if config.get("scale_decoder_outputs", tied) else 1.0,
    }
    for mixer in ("attention", "cross_attention"):
        found |= {f"{mixer}.n_heads": heads, f"{mixer}.head_dim": head_dim, f"{mixer}.scale": 1.0}
    return found


def config(model: Model) -> dict[str, Any]:
    return {
        "d_model": model["width"],
        "num_layers": len(model.encoder),
        "num_decoder_layers": model["layers"],
        "num_heads": model.every("n_heads") or 1,
        "d_kv": model.every("head_dim") or 1,
        "d_ff": model.every("mlp_width") or 1,
        "feed_forward_proj": next((kind for kind, ours in MLPS.items() if ours == model.every("mlp")), "relu"),
        "relative_attention_num_buckets": model.every("t5.buckets") or 32,
        "relative_attention_max_distance": model.every("t5.max_distance") or 128,
        "layer_norm_epsilon": model["norm_eps"],
        "tie_word_embeddings": model["tied"],
        "scale_decoder_outputs": model["logit_scale"] != 1,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }


def rows(s: Settings) -> list[Row]:
    heads = s["attention.n_heads"]
    found = [
        row("embed/embedding", "shared.weight"),
        row("encoder_norm/scale", "encoder.final_layer_norm.weight"),
        row("norm/scale", "decoder.final_layer_norm.weight"),
    ]
    wide = {"up": "wi_0", "gate": "wi_1", "down": "wo"} if s["mlp"] == "geglu" else {"up": "wi", "down": "wo"}
    sides = {
        "encoder": {"mixer": "SelfAttention", "mlp": "DenseReluDense"},
        "decoder": {"mixer": "SelfAttention", "cross_attention": "EncDecAttention", "mlp": "DenseReluDense"},
    }
    for side, parts in sides.items():
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found.append(row(f"{side}/position/table", table))
        for i, (ours, theirs) in enumerate(parts.items()):
            own, at = f"{side}/layer/{ours}", f"{side}.block.{{layer}}.layer.{i}"
            found.append(row(f"{own}_norm/scale", f"{at}.layer_norm.weight"))
            if ours == "mlp":
                found += [row(f"{own}/{a}/kernel", f"{at}.{theirs}.{b}.weight", TRANSPOSED) for a, b in wide.items()]
            else:
                found += [row(f"{own}/{x}/kernel", f"{at}.{theirs}.{x}.weight", into_heads(heads)) for x in "qkv"]
                found.append(row(f"{own}/out/kernel", f"{at}.{theirs}.o.weight", out_of_heads(heads)))
    return found if s["tied"] else [*found, row("unembed/kernel", "lm_head.weight", TRANSPOSED)]


FAMILY = Family(
    "t5",
    "T5ForConditionalGeneration",
    "",
    settings,
    config,
    rows,
    ignored=(r"(encoder|decoder)\.embed_tokens\.weight",),
    asked=lambda config: Asked(config.get("vocab_size"), tail=1),
)
