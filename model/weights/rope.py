"""Rotary positions as a config.json has them: `rope_parameters`, or in older files `rope_theta` and `rope_scaling`."""

from collections.abc import Mapping
from typing import Any

from model.errors import UserError, closest
from model.weights.family import Config, Settings

# Their names of what a scaling takes -> ours.
SCALINGS = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
        },
    ),
}


def parameters(config: Config, theta: str = "rope_theta", usual: float = 10_000.0) -> dict[str, Any]:
    """Their rotary parameters, in the present form, of the older key `theta` too."""
    found = dict(config.get("rope_parameters") or {})
    if not found:
        found = dict(config.get("rope_scaling") or {})
        found["rope_type"] = found.pop("rope_type", None) or found.pop("type", None) or "default"
    return {"rope_theta": config.get(theta, usual)} | found


def settings(given: Mapping[str, Any], section: str = "rope") -> Settings:
    """Our settings of a section."""
    kind = str(given.get("rope_type", "default"))
    if kind not in SCALINGS:
        raise UserError(f"config.json has rope_type {kind!r}; allowed: {', '.join(SCALINGS)}{closest(kind, SCALINGS)}")
    scaling, names = SCALINGS[kind]
    if missing := [name for name in names if name not in given]:
        raise UserError(f"config.json lacks {missing[0]!r} of rope_type {kind!r}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        fraction = {f"{section}.fraction": given["partial_rotary_factor"]}
    else:
        fraction = {}
    own = {f"{section}.{ours}": given[name] for name, ours in names.items()}
    return {f"{section}.theta": given["rope_theta"], f"{section}.scaling": scaling} | fraction | own


def given(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Their rotary parameters of a layer of ours."""
    scaling = layer.get("rope.scaling", "none")
    kind = next((kind for kind, (ours, _) in SCALINGS.items() if ours == scaling), "default")
    own = {name: layer[f"rope.{ours}"] for name, ours in SCALINGS[kind][1].items()}
    if "original_max_position_embeddings" in own:
        own["original_max_position_embeddings"] = int(own["original_max_position_embeddings"])
    return {"rope_type": kind, "rope_theta": layer.get("rope.theta", 10_000.0)} | own
