"""Mamba-2 (https://arxiv.org/abs/2405.21060).

transformers normalises all inner channels together, whatever `n_groups` says; only one group means the same here.
"""

import math
from typing import Any

from model.errors import UserError
from model.weights.family import Config, Family, Model, Settings, fixed, need
from model.weights.mamba import around
from model.weights.names import DEPTHWISE, TRANSPOSED, Row, row, shaped, split

EPS = 1e-5  # of the norm inside the mixer
NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # of the time step; JSON has no infinity of its own


def settings(config: Config) -> Settings:
    fixed(config, hidden_act="silu", use_bias=False, use_conv_bias=True, n_groups=1, layer_norm_epsilon=EPS)
    width, layers, state = need(config, "hidden_size", "num_hidden_layers", "state_size")
    expand, heads, head_dim = config.get("expand", 2), *need(config, "num_heads", "head_dim")
    if heads * head_dim != expand * width:
        raise UserError(
            f"config.json of a mamba2 has num_heads {heads} of head_dim {head_dim}; allowed: expand times hidden_size, "
            f"{expand * width}, in all"
        )
    limit = config.get("time_step_limit") or NO_LIMITS[0]
    if [*limit] not in NO_LIMITS:
        raise UserError(f"config.json of a mamba2 has time_step_limit {limit!r}; allowed: from 0 to infinity")
    return {
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": layers,
        "mixers": ("mamba2",),
        "position": "none",
        "norm_eps": config.get("layer_norm_epsilon", EPS),
        "mlp": "none",
        "tied": config.get("tie_word_embeddings", False),
        "mamba2.state": state,
        "mamba2.head_dim": head_dim,
        "mamba2.n_groups": 1,
        "mamba2.conv": config.get("conv_kernel", 4),
        "mamba2.expand": expand,
    }


def config(model: Model) -> dict[str, Any]:
    first = model.layers[0]
    expand, head_dim = first.get("expand", 2), first.get("head_dim") or 1
    return {
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "state_size": first.get("state", 128),
        "conv_kernel": first.get("conv", 4),
        "expand": expand,
        "head_dim": head_dim,
        "num_heads": expand * model["width"] // head_dim,
        "n_groups": 1,
        "layer_norm_epsilon": EPS,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": model["tied"],
    }


def rows(s: Settings) -> list[Row]:
    inner, shared = s["mamba2.expand"] * s["width"], 2 * s["mamba2.n_groups"] * s["mamba2.state"]
    heads = inner // s["mamba2.head_dim"]
    at, theirs = "layer/mixer", "backbone.layers.{layer}.mixer"
    fused = tuple(f"{at}/{name}/kernel" for name in ("z", "x", "BC", "dt"))
    biases = (f"{at}/conv_x_bias", f"{at}/conv_BC_bias")
    return [
        *around(s["tied"]),
        row(fused, f"{theirs}.in_proj.weight", split(inner, inner, shared, heads) >> TRANSPOSED),
        row((f"{at}/conv_x", f"{at}/conv_BC"), f"{theirs}.conv1d.weight", split(inner, shared) >> DEPTHWISE),
        row(biases, f"{theirs}.conv1d.bias", split(inner, shared)),
        *(row(f"{at}/{name}", f"{theirs}.{name}") for name in ("A_log", "D", "dt_bias")),
        row(f"{at}/norm/scale", f"{theirs}.norm.weight", shaped((inner,), (1, inner))),
        row(f"{at}/out/kernel", f"{theirs}.out_proj.weight", TRANSPOSED),
    ]


FAMILY = Family("mamba2", "Mamba2ForCausalLM", "backbone.", settings, config, rows)
