"""What a family of models elsewhere is: its `config.json`, our settings that say the same, and its table of names."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.asked import Asked, Image
from model.entries import entry
from model.errors import UserError
from model.mlps.mlp import FORMS, mlp_width
from model.positions import POSITIONS
from model.settings import Dim, Kind, Positive, check
from model.weights.names import Row

Config = Mapping[str, Any]  # theirs
Settings = dict[str, Any]  # ours: of the model section, by dotted key; what is not named has its default


@dataclass(frozen=True)
class Model:
    """A model section with each layer's settings beside those of all, whatever its entries are called."""

    shared: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]  # `mixer`, its settings, `position`, and `rope.theta`
    encoder: tuple[Mapping[str, Any], ...]  # its layers, where there is one
    asked: Asked

    def __getitem__(self, key: str) -> Any:
        return self.shared[key]

    def every(self, key: str) -> Any:
        """A setting of a mixer, where all layers share it; of the first where they do not."""
        return self.layers[0].get(key)


@dataclass(frozen=True)
class Family:
    model_type: str  # as in config.json
    architecture: str  # the class that transformers reads it with
    prefix: str  # of names; files of the bare backbone leave it out
    settings: Callable[[Config], Settings]
    config: Callable[[Model], dict[str, Any]]  # what it cannot say is told by `settings`, which then says otherwise
    rows: Callable[[Settings], list[Row]]
    ignored: tuple[str, ...] = ()  # patterns of tensors that are no parameters of the model
    asked: Callable[[Config], Asked] = lambda config: Asked(config.get("vocab_size"))  # what it takes and answers


# What 0 or None stands for, by the key of a layer's setting.
DERIVED: dict[tuple[str, str], Callable[[Mapping[str, Any], int], Any]] = {
    ("attention", "n_kv_heads"): lambda own, width: own["n_heads"],
    ("attention", "head_dim"): lambda own, width: width // own["n_heads"],
    ("attention", "scale"): lambda own, width: own["head_dim"] ** -0.5,
    ("cross_attention", "n_kv_heads"): lambda own, width: own["n_heads"],
    ("cross_attention", "head_dim"): lambda own, width: width // own["n_heads"],
    ("cross_attention", "scale"): lambda own, width: own["head_dim"] ** -0.5,
    ("mamba", "dt_rank"): lambda own, width: -(-width // 16),
    ("mamba2", "head_dim"): lambda own, width: min(64, max(1, own["expand"] * width // 4)),
}
# How it is computed, how it begins and how it is trained: nothing of what the model is.
ASIDE = ("scan", "kept", "dtype", "dropout", "pool", "implementation", "dt_min", "dt_max", "vocab_size", "depth_init")
ASIDE += ("embed_init", "jitter", "capacity", "balance", "router_z")
# Said by what the layers have.
OF_LAYERS = ("mixers", "mlp", "mlp_width", "mlp_multiple", "mlp_bias", "encoder_mixers", "encoder_layers")


def spelled_out(c: Mapping[str, Any], asked: Asked) -> Model:
    """A resolved model section, layer by layer."""
    placed = not POSITIONS[c["position"]].needs_attention
    shared = plain(c, (*ASIDE, *OF_LAYERS, *(() if isinstance(asked.inputs, Image) or asked.image else ("patch",))))
    shared |= {"position": c["position"] if placed else "none", "vocab_size": asked.vocab_size}
    if placed:
        shared |= {f"{c['position']}.{key}": value for key, value in c.get(c["position"], {}).items()}
    if asked.classifies:
        shared["pool"] = c["pool"]

    def side(mixers: tuple[str, ...], layers: int, attends: bool = False) -> tuple[dict[str, Any], ...]:
        return tuple(layer_of(c, mixers[n % len(mixers)], placed, attends) for n in range(layers))

    if c["kind"] != "encoder_decoder":
        return Model(shared, side(c["mixers"], c["layers"]), (), asked)
    reading = side(c["encoder_mixers"] or c["mixers"], c["encoder_layers"] or c["layers"])
    return Model(shared, side(c["mixers"], c["layers"], attends=True), reading, asked)


def layer_of(c: Mapping[str, Any], name: str, placed: bool, attends: bool) -> dict[str, Any]:
    """All that a layer has; `attends`: to a memory too."""
    one, own = entry(c, name), c.get(name, {})
    layer = mixer_of(own, one.mixer, c["width"])
    position = one.position or ("none" if placed else c["position"])
    given = own if one.position else c
    layer |= {"mixer": one.mixer, "position": position}
    layer |= {f"{position}.{key}": value for key, value in given.get(position, {}).items()}
    if attends:
        crossing = mixer_of(c["cross_attention"], "cross_attention", c["width"])
        layer |= {f"cross_attention.{key}": value for key, value in crossing.items()}
    return layer | mlp_of(c, one.mlp or c["mlp"])


def mixer_of(own: Mapping[str, Any], kind: str, width: int) -> dict[str, Any]:
    """A mixer's settings, with what 0 or None stands for."""
    found = plain(own, (*ASIDE, "mlp"))
    for (mixer, key), derive in DERIVED.items():
        if mixer == kind and key in found and not found[key]:
            found[key] = derive(found, width)
    if not found.get("qk_norm"):
        found.pop("qk_norm_eps", None)
    return found


def mlp_of(c: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What a layer has after its mixer."""
    if kind == "none":
        return {"mlp": kind}
    own = plain(c.get("experts", {}), ASIDE) if kind == "experts" else {}
    form = own.get("kind", kind)
    bias = c["mlp_bias"]
    if bias is None:
        bias = kind in FORMS and FORMS[kind].keywords.get("bias", True)
    width = mlp_width(form, c["width"], c["mlp_width"], c["mlp_multiple"])
    return {"mlp": kind, "mlp_width": width, "mlp_bias": bias, **{f"experts.{key}": x for key, x in own.items()}}


def plain(section: Mapping[str, Any], without: tuple[str, ...]) -> dict[str, Any]:
    """A section's own settings, less some."""
    return {key: value for key, value in section.items() if not isinstance(value, Mapping) and key not in without}


SIDES = {"layer": "layers", "encoder layer": "encoder"}


def differences(this: Model, other: Model) -> Iterator[tuple[str, Any, Any]]:
    """Every setting in which two models are not the same, and what it is in each; of layers in the first one."""
    pairs = [("model.", this.shared, other.shared)]
    for name, side in SIDES.items():
        layers = zip(*(getattr(model, side) for model in (this, other)), strict=False)
        pairs += [(f"{name} {n}'s ", *both) for n, both in enumerate(layers)]
    told = set()
    for where, a, b in pairs:
        for key in sorted(a.keys() | b.keys(), key=lambda key: ("." in key, key)):  # choices before their settings
            if not alike(a.get(key), b.get(key)) and key not in told:
                told.add(key)
                yield f"{where}{key}", a.get(key), b.get(key)


def alike(a: Any, b: Any) -> bool:
    """The same, but for the rounding of a number that was squared and back."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


# What stands at the keys that are reckoned with, or looked into, before a setting of ours is made of them.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "image_size", "patch_size")
SIZES += ("num_channels", "n_embd", "n_layer", "n_head", "n_positions", "max_position_embeddings", "d_model", "d_ff")
SIZES += ("num_layers", "num_heads", "state_size", "expand", "num_local_experts", "num_experts_per_tok", "num_labels")
TEXTS = ("hidden_act", "activation_function", "feed_forward_proj")
HELD: dict[str, Kind] = dict.fromkeys(SIZES, Dim) | dict.fromkeys(TEXTS, str)
HELD |= dict.fromkeys(("rope_parameters", "rope_scaling", "id2label"), dict | None)
HELD |= dict.fromkeys(("architectures", "layer_types", "time_step_limit"), list | None)
HELD |= {"head_dim": Dim | None, "query_pre_attn_scalar": Positive, "sliding_window_pattern": Dim | None}


def check_held(config: Config, file: Path) -> None:
    """Refuses a config.json that was harmed, or written by hand and wrong, before anything is made of it."""
    for key, kind in HELD.items():
        if key in config:
            check(key, config[key], kind, where=lambda: f" in {file}")


def need(config: Config, *keys: str) -> tuple[Any, ...]:
    """Values that a config.json must have."""
    for key in keys:
        if config.get(key) is None:
            raise UserError(f"config.json of a {config['model_type']} lacks {key!r}")
    return tuple(config[key] for key in keys)


def fixed(config: Config, **values: Any) -> None:
    """Refuses what we have no setting for."""
    for key, value in values.items():
        if config.get(key, value) != value:
            raise UserError(
                f"config.json of a {config['model_type']} has {key} {config[key]!r}; allowed: {value!r}, as the model "
                "has no such setting"
            )


ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "exact_gelu", "relu": "relu"}


def activation_from(config: Config, key: str, usual: str) -> str:
    """Our MLP with their activation."""
    given = config.get(key, usual)
    if given not in ACTIVATIONS:
        allowed = ", ".join(ACTIVATIONS)
        raise UserError(f"config.json of a {config['model_type']} has {key} {given!r}; allowed: {allowed}")
    return ACTIVATIONS[given]


def activation_name(model: Model) -> str:
    """Their activation of our MLP."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.every("mlp")), "gelu")
