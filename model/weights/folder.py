"""A folder of weights: what model it holds, whether that fits a model of ours, and its parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from model.asked import Asked
from model.errors import UserError, choose
from model.weights import FAMILIES
from model.weights.family import Family, Settings, check_held
from model.weights.names import Like, Link, Stacks, check_fit, links, load
from model.weights.safetensors import Stored, read_folder, read_json


@dataclass(frozen=True)
class Weights:
    """Headers only: of the numbers nothing is read yet."""

    folder: Path
    family: Family
    config: Mapping[str, Any]  # theirs
    settings: Settings  # ours, of the model section
    asked: Asked
    tensors: Mapping[str, Stored]


def open_weights(folder: str | Path) -> Weights:
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no weights in {folder}: it {'is a file' if folder.exists() else 'does not exist'}")
    tensors, config = read_folder(folder), read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'} has no model_type; choose from {', '.join(sorted(FAMILIES))}")
    family = choose("model_type", config["model_type"], FAMILIES)
    check_held(config, folder / "config.json")
    return Weights(folder, family, config, family.settings(config), family.asked(config), tensors)


@dataclass(frozen=True)
class Fitted:
    """Weights of which some, or all, are parameters of a model."""

    weights: Weights
    paths: list[str]  # of the parameters to be taken
    table: Sequence[Link]
    tensors: Mapping[str, Stored]  # by the names of the table

    def load(self, path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        return load(path, like, self.table, self.tensors)


def fit(weights: Weights, like: Like, stacks: Stacks, fresh: Sequence[str] | None = None) -> Fitted:
    """The parameters that a model of these stacks can take; raises UserError, naming the first that does not fit."""
    family = weights.family
    table = links(family.rows(weights.settings), stacks)
    tensors = named(weights, {name for link in table for name in link.theirs})
    there, here = {}, {path: words(x.shape) for path, x in like.items()}
    for link in table:
        asked = link.lay_out(like) if all(path in like for path, _ in link.ours) else None
        for path, _ in link.ours:
            odd = next((name for name in link.theirs if not same(name, tensors, asked)), None)
            if path not in like:
                there |= {} if odd else {path: link.theirs[0]}
            elif odd and odd in tensors:
                there[path], here[path] = f"{words(tensors[odd].shape)} ({odd})", words(asked[odd])
            elif odd:
                there[path] = f"absent (no {odd})"
            else:
                there.setdefault(path, here[path])
    known = {name for link in table for name in link.theirs}
    # Some files have the unembedding twice.
    ignored = "|".join([*family.ignored, *([r"lm_head\.weight"] if weights.settings.get("tied") else [])])
    for name in tensors:
        if name not in known and not re.fullmatch(ignored, name):
            there[name] = words(tensors[name].shape)
    return Fitted(weights, check_fit(str(weights.folder), there, here, fresh), table, tensors)


def named(weights: Weights, known: set[str]) -> dict[str, Stored]:
    """The tensors under the names of a table: files of a bare backbone leave out what these begin with."""
    prefix = weights.family.prefix
    if not prefix or any(name in known for name in weights.tensors if name.startswith(prefix)):
        return dict(weights.tensors)
    return {prefix + name if prefix + name in known else name: x for name, x in weights.tensors.items()}


def same(name: str, tensors: Mapping[str, Stored], asked: Mapping[str, tuple[int, ...]] | None) -> bool:
    """Whether a tensor is there, and in the shape that is asked for."""
    return name in tensors and (asked is None or tensors[name].shape == asked[name])


def words(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
