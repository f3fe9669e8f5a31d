"""BERT (https://arxiv.org/abs/1810.04805), with its head for masked tokens or without one.

Every token is of type 0: the vector of that type is part of the positions' table, and written as zeros.
"""

from typing import Any

import numpy as np

from model.errors import UserError
from model.weights.family import Config, Family, Model, Settings, activation_from, activation_name, fixed, need
from model.weights.names import TRANSPOSED, Arrays, Form, Row, into_heads, out_of_heads, row

HEADS = {"BertForMaskedLM": True, "BertForPreTraining": True, "BertModel": False}


def settings(config: Config) -> Settings:
    fixed(config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    width, layers, heads, hidden, length = need(
        config,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    )
    activation = activation_from(config, "hidden_act", "gelu")
    return {
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": layers,
        "mixers": ("attention",),
        "causal": False,
        "position": "learned",
        "learned.max_len": length,
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "norm_order": "post",
        "embed_norm": "after",
        "mlp": activation,
        "mlp_width": hidden,
        "tied": config.get("tie_word_embeddings", True),
        "attention.n_heads": heads,
        "attention.bias": "all",
        **head(config, activation),
    }


def head(config: Config, activation: str) -> Settings:
    """What reads the vectors: a map, a norm, and the embeddings with a bias, or the embeddings alone."""
    asked = (config.get("architectures") or ["BertModel"])[0]
    if asked not in HEADS:
        raise UserError(f"config.json of a bert has the architecture {asked!r}; allowed: {', '.join(HEADS)}")
    if HEADS[asked]:
        return {"head_map": activation, "final_norm": True, "unembed_bias": True}
    return {"head_map": "none", "final_norm": False, "unembed_bias": False}


def config(model: Model) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM" if model["unembed_bias"] else "BertModel"],
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model.every("n_heads") or 1,
        "intermediate_size": model.every("mlp_width") or 1,
        "hidden_act": activation_name(model),
        "max_position_embeddings": model.shared.get("learned.max_len", 512),
        "type_vocab_size": 2,
        "layer_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tied"],
    }


def typed() -> Form:
    """The tables of positions and of the two types of tokens, as the one of positions."""

    def take(arrays: Arrays) -> Arrays:
        places, types = arrays
        return (places.astype(np.float32) + types[0].astype(np.float32),)

    def give(arrays: Arrays) -> Arrays:
        return arrays[0], np.zeros((2, arrays[0].shape[-1]), np.float32)

    return Form(take, give)


def rows(s: Settings) -> list[Row]:
    heads, at, tables = s["attention.n_heads"], "bert.encoder.layer.{layer}", "bert.embeddings"
    into, out = into_heads(heads), out_of_heads(heads)
    maps = {
        "layer/mixer/q": (f"{at}.attention.self.query", into, into),
        "layer/mixer/k": (f"{at}.attention.self.key", into, into),
        "layer/mixer/v": (f"{at}.attention.self.value", into, into),
        "layer/mixer/out": (f"{at}.attention.output.dense", out, None),
        "layer/mlp/up": (f"{at}.intermediate.dense", TRANSPOSED, None),
        "layer/mlp/down": (f"{at}.output.dense", TRANSPOSED, None),
    }
    norms = {
        "embed_norm": f"{tables}.LayerNorm",
        "layer/mixer_norm": f"{at}.attention.output.LayerNorm",
        "layer/mlp_norm": f"{at}.output.LayerNorm",
    }
    if s["unembed_bias"]:
        maps["map"] = ("cls.predictions.transform.dense", TRANSPOSED, None)
        norms["norm"] = "cls.predictions.transform.LayerNorm"
    places = tuple(f"{tables}.{name}_embeddings.weight" for name in ("position", "token_type"))
    found = [row("embed/embedding", f"{tables}.word_embeddings.weight"), row("position/table", places, typed())]
    for ours, (theirs, kernel, bias) in maps.items():
        found.append(row(f"{ours}/kernel", f"{theirs}.weight", kernel))
        found.append(row(f"{ours}/bias", f"{theirs}.bias", *([bias] if bias else [])))
    for ours, theirs in norms.items():
        found += [row(f"{ours}/scale", f"{theirs}.weight"), row(f"{ours}/bias", f"{theirs}.bias")]
    if s["unembed_bias"]:
        found.append(row("unembed_bias", "cls.predictions.bias"))
    return found if s["tied"] else [*found, row("unembed/kernel", "cls.predictions.decoder.weight", TRANSPOSED)]


# Read by heads that are not ours, a buffer, and what is there twice.
ASIDE = (r".*pooler\..*", r"cls\.seq_relationship\..*", r".*embeddings\.position_ids", r"cls\.predictions\.decoder\..*")

FAMILY = Family("bert", "BertForMaskedLM", "bert.", settings, config, rows, ASIDE)
