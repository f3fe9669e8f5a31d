"""Mamba (https://arxiv.org/abs/2312.00752), as in `state-spaces/mamba-130m-hf`."""

from typing import Any

from model.errors import UserError
from model.weights.family import Config, Family, Model, Settings, fixed, need
from model.weights.names import DEPTHWISE, SAME, TRANSPOSED, Form, Row, each, row

# The weight of two maps, `[2 E, D]`, as our kernel `[D, 2, E]`.
TWO: Form = TRANSPOSED >> each(lambda x: x.reshape(x.shape[0], 2, x.shape[1] // 2), lambda x: x.reshape(x.shape[0], -1))


def settings(config: Config) -> Settings:
    fixed(config, hidden_act="silu", use_bias=False, use_conv_bias=True)
    width, layers, state = need(config, "hidden_size", "num_hidden_layers", "state_size")
    expand, rank = config.get("expand", 2), config.get("time_step_rank", "auto")
    if config.get("intermediate_size", expand * width) != expand * width:
        raise UserError(
            f"config.json of a mamba has intermediate_size {config['intermediate_size']!r}; allowed: expand times "
            f"hidden_size, {expand * width}"
        )
    return {
        "vocab_size": config.get("vocab_size"),
        "width": width,
        "layers": layers,
        "mixers": ("mamba",),
        "position": "none",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "mlp": "none",
        "tied": config.get("tie_word_embeddings", True),
        "mamba.state": state,
        "mamba.conv": config.get("conv_kernel", 4),
        "mamba.expand": expand,
        "mamba.dt_rank": -(-width // 16) if rank == "auto" else rank,
    }


def config(model: Model) -> dict[str, Any]:
    first = model.layers[0]
    expand = first.get("expand", 2)
    return {
        "hidden_size": model["width"],
        "num_hidden_layers": model["layers"],
        "state_size": first.get("state", 16),
        "conv_kernel": first.get("conv", 4),
        "expand": expand,
        "intermediate_size": expand * model["width"],
        "time_step_rank": first.get("dt_rank") or 1,
        "layer_norm_epsilon": model["norm_eps"],
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": model["tied"],
    }


def around(tied: bool) -> list[Row]:
    """What stands around the mixers, in Mamba and Mamba-2."""
    found = [
        row("embed/embedding", "backbone.embeddings.weight"),
        row("layer/mixer_norm/scale", "backbone.layers.{layer}.norm.weight"),
        row("norm/scale", "backbone.norm_f.weight"),
    ]
    return found if tied else [*found, row("unembed/kernel", "lm_head.weight", TRANSPOSED)]


def rows(s: Settings) -> list[Row]:
    mixer = {
        "in/kernel": ("in_proj.weight", TWO),
        "conv": ("conv1d.weight", DEPTHWISE),
        "conv_bias": ("conv1d.bias", SAME),
        "x/kernel": ("x_proj.weight", TRANSPOSED),
        "dt": ("dt_proj.weight", TRANSPOSED),
        "dt_bias": ("dt_proj.bias", SAME),
        "A_log": ("A_log", SAME),
        "D": ("D", SAME),
        "out/kernel": ("out_proj.weight", TRANSPOSED),
    }
    own = [
        row(f"layer/mixer/{ours}", f"backbone.layers.{{layer}}.mixer.{theirs}", form)
        for ours, (theirs, form) in mixer.items()
    ]
    return around(s["tied"]) + own


FAMILY = Family("mamba", "MambaForCausalLM", "backbone.", settings, config, rows)
