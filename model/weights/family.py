"""What a family of models elsewhere is: its `config.json`, our settings that say the same, and its table of names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from model.build import entry
from model.errors import UserError
from model.mlp import mlp_width
from model.positions import POSITIONS
from model.weights.names import Row

Config = Mapping[str, Any]  # theirs
Settings = dict[str, Any]  # ours: of the model section, by dotted key; what is not named has its default


@dataclass(frozen=True)
class Model:
    """A model section with each layer's settings beside those of all, whatever its entries are called."""

    shared: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]  # `mixer`, its settings, `position`, and `rope.theta`

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


# What 0 stands for, by the key of a layer's setting.
DERIVED: dict[tuple[str, str], Callable[[Mapping[str, Any], int], int]] = {
    ("attention", "n_kv_heads"): lambda own, width: own["n_heads"],
    ("mamba", "dt_rank"): lambda own, width: -(-width // 16),
    ("mamba2", "head_dim"): lambda own, width: min(64, max(1, own["expand"] * width // 4)),
}
# How it is computed, how it begins and how it is trained: nothing of what the model is.
ASIDE = ("scan", "remat", "dtype", "dropout", "pool", "implementation", "dt_min", "dt_max", "vocab_size")


def spelled_out(c: Mapping[str, Any], vocab_size: int) -> Model:
    """A resolved model section, layer by layer."""
    names = c["mixers"]
    placed = not POSITIONS[c["position"]].needs_attention
    shared = {key: value for key, value in c.items() if not isinstance(value, Mapping) and key not in ASIDE}
    shared |= {"mixers": (), "position": c["position"] if placed else "none", "vocab_size": vocab_size}
    shared["mlp_width"] = 0 if c["mlp"] == "none" else mlp_width(c["mlp"], c["width"], c["mlp_width"])
    if placed:
        shared |= {f"{c['position']}.{key}": value for key, value in c.get(c["position"], {}).items()}
    layers = []
    for n in range(c["layers"]):
        name = names[n % len(names)]
        one, own = entry(c, name), c.get(name, {})
        layer = {key: value for key, value in own.items() if not isinstance(value, Mapping) and key not in ASIDE}
        for (mixer, key), derive in DERIVED.items():
            if mixer == one.mixer and layer.get(key) == 0:
                layer[key] = derive(layer, c["width"])
        position = one.position or ("none" if placed else c["position"])
        given = own if one.position else c
        layer |= {"mixer": one.mixer, "position": position}
        layer |= {f"{position}.{key}": value for key, value in given.get(position, {}).items()}
        layers.append(layer)
    return Model(shared, tuple(layers))


def differences(this: Model, other: Model) -> Iterator[tuple[str, Any, Any]]:
    """Every setting in which two models are not the same, and what it is in each; of layers in the first one."""
    pairs = [("model.", this.shared, other.shared)]
    pairs += [(f"layer {n}'s ", *both) for n, both in enumerate(zip(this.layers, other.layers, strict=False))]
    told = set()
    for where, a, b in pairs:
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key) and key not in told:
                told.add(key)
                yield f"{where}{key}", a.get(key), b.get(key)


def need(config: Config, *keys: str) -> tuple[Any, ...]:
    """Values that a config.json must have."""
    for key in keys:
        if key not in config:
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
