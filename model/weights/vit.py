"""ViT (https://arxiv.org/abs/2010.11929), a classifier of pictures."""

from typing import Any

import numpy as np

from model.asked import Asked, Image
from model.weights.family import Config, Family, Model, Settings, activation_from, activation_name, fixed, need
from model.weights.names import TRANSPOSED, Form, Row, each, into_heads, out_of_heads, row, shaped


def settings(config: Config) -> Settings:
    fixed(config, qkv_bias=True)
    width, layers, heads, hidden = need(
        config, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    )
    size, patch = config.get("image_size", 224), config.get("patch_size", 16)
    return {
        "width": width,
        "layers": layers,
        "mixers": ("attention",),
        "causal": False,
        "pool": "cls",
        "patch": patch,
        "position": "learned",
        "learned.max_len": (size // patch) ** 2 + 1,
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "mlp": activation_from(config, "hidden_act", "gelu"),
        "mlp_width": hidden,
        "attention.n_heads": heads,
        "attention.bias": "all",
    }


def asked(config: Config) -> Asked:
    size = config.get("image_size", 224)
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    return Asked(0, n_classes=labels, inputs=Image(size, size, config.get("num_channels", 3)))


def config(model: Model) -> dict[str, Any]:
    image, labels = model.asked.inputs, model.asked.n_classes
    return {
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model.every("n_heads") or 1,
        "intermediate_size": model.every("mlp_width") or 1,
        "hidden_act": activation_name(model),
        "layer_norm_eps": model["norm_eps"],
        "image_size": getattr(image, "height", 224),
        "patch_size": model.shared.get("patch", 16),
        "num_channels": getattr(image, "channels", 3),
        "id2label": {str(i): f"LABEL_{i}" for i in range(labels)},
        "label2id": {f"LABEL_{i}": i for i in range(labels)},
    }


def patch_kernel(side: int) -> Form:
    """A convolution's weight `[D, C, side, side]`, as the kernel of patches whose pixels lie line by line."""

    def take(x: np.ndarray) -> np.ndarray:
        return x.transpose(2, 3, 1, 0).reshape(-1, x.shape[0])

    def give(x: np.ndarray) -> np.ndarray:
        return x.reshape(side, side, -1, x.shape[-1]).transpose(3, 2, 0, 1)

    return each(take, give)


def rows(s: Settings) -> list[Row]:
    heads, width, at = s["attention.n_heads"], s["width"], "vit.encoder.layer.{layer}"
    into, places = into_heads(heads), (s["learned.max_len"], width)
    maps = {
        "layer/mixer/q": (f"{at}.attention.attention.query", into, into),
        "layer/mixer/k": (f"{at}.attention.attention.key", into, into),
        "layer/mixer/v": (f"{at}.attention.attention.value", into, into),
        "layer/mixer/out": (f"{at}.attention.output.dense", out_of_heads(heads), None),
        "layer/mlp/up": (f"{at}.intermediate.dense", TRANSPOSED, None),
        "layer/mlp/down": (f"{at}.output.dense", TRANSPOSED, None),
        "embed": ("vit.embeddings.patch_embeddings.projection", patch_kernel(s["patch"]), None),
        "classes": ("classifier", TRANSPOSED, None),
    }
    norms = {
        "layer/mixer_norm": f"{at}.layernorm_before",
        "layer/mlp_norm": f"{at}.layernorm_after",
        "norm": "vit.layernorm",
    }
    found = [
        row("cls", "vit.embeddings.cls_token", shaped((1, 1, width), (width,))),
        row("position/table", "vit.embeddings.position_embeddings", shaped((1, *places), places)),
    ]
    for ours, (theirs, kernel, bias) in maps.items():
        found.append(row(f"{ours}/kernel", f"{theirs}.weight", kernel))
        found.append(row(f"{ours}/bias", f"{theirs}.bias", *([bias] if bias else [])))
    for ours, theirs in norms.items():
        found += [row(f"{ours}/scale", f"{theirs}.weight"), row(f"{ours}/bias", f"{theirs}.bias")]
    return found


FAMILY = Family(
    "vit",
    "ViTForImageClassification",
    "vit.",
    settings,
    config,
    rows,
    ignored=(r".*pooler\..*", r".*embeddings\.mask_token"),
    asked=asked,
)
