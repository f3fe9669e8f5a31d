"""Configs: read from a file, checked against every key that exists, overridden, resolved, compared."""

import ast
import difflib
import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

import data
from configs import base
from model import build
from model.contract import section
from model.errors import UserError, choose
from model.mixers import MIXERS
from model.positions import POSITIONS
from train.workdir import read_json

CHOICES = ("model.mixers", "model.position", "data.task")


def load(spec: str, overrides: Iterable[tuple[str, str]] = ()) -> ConfigDict:
    """The resolved, locked config of `FILE.py[:argument]` or `config.json`, with `(key, text)` overrides."""
    given = flatten(read(spec))
    asked = dict(overrides)
    config = base.get_config()
    # The choices first: they decide which other keys exist.
    for key in CHOICES:
        if key in given:
            put(config, key, given[key], spec)
        if key in asked:
            put(config, key, parse(key, asked[key], flatten(config)[key]), "the command line")
    complete(config)
    known = flatten(config)
    for key, value in given.items():
        if key not in CHOICES and not unused_section(key, config):
            put(config, key, value, spec)
    for key, text in asked.items():
        if key not in CHOICES:
            put(config, key, parse(key, text, known.get(key)), "the command line")
    return config.lock()


def read(spec: str) -> ConfigDict | dict[str, Any]:
    """Runs a config file's `get_config(argument)`, or reads a run's `config.json`."""
    path, _, argument = spec.partition(":")
    file = pathlib.Path(path)
    if not file.is_file():
        near = difflib.get_close_matches(path, [str(p) for p in pathlib.Path("configs").glob("*.py")], n=1)
        raise UserError(f"no config file {path!r}" + (f"; closest: {near[0]}" if near else ""))
    if file.suffix == ".json":
        return tuples(read_json(file))
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    if module_spec is None:
        raise UserError(f"config {path!r} must be a .py file with get_config, or a .json file")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"config {path!r} defines no get_config()")
    return module.get_config(argument) if argument else module.get_config()


def complete(config: ConfigDict) -> None:
    """Adds the section that each choice brings, with its defaults."""
    for name, defaults in build.sections(config.model.mixers, config.model.position).items():
        config.model[name] = defaults
    config.data[config.data.task] = section(choose("task", config.data.task, data.TASKS), without=data.Task)


def unused_section(key: str, config: ConfigDict) -> bool:
    """Whether a config file's key belongs to a mixer, position or task that was not chosen in the end."""
    room, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    tables = {"model": {**MIXERS, **POSITIONS}, "data": data.TASKS}
    return name in tables.get(room, {}) and name not in config[room]


def put(config: ConfigDict, key: str, value: Any, source: str) -> None:
    """Sets a key that must exist, to a value of its type."""
    known = flatten(config)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        leaf = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = (leaf or near)[0]
        raise UserError(f"unknown config key {key!r} in {source}; {siblings(key, known)}; closest: {hint}")
    old = known[key]
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if old is not None and value is not None and type(value) is not type(old):
        raise UserError(f"config key {key!r} takes {type(old).__name__}, not {value!r}, in {source}")
    *parents, leaf = key.split(".")
    for name in parents:
        config = config[name]
    config[leaf] = value


def siblings(key: str, known: Iterable[str]) -> str:
    """The keys of the section that a misspelt key was meant for, or the sections where that is unknown too."""
    room = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == room]
    if names:
        return f"{room or 'the top level'} has {', '.join(names)}"
    return f"sections are {', '.join(sorted({k.rpartition('.')[0] for k in known if '.' in k}))}"


def parse(key: str, text: str, old: Any) -> Any:
    """An override's text as a value of the type it replaces."""
    if isinstance(old, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    if isinstance(old, tuple) and not isinstance(value, tuple):
        value = tuple(text.split(",")) if isinstance(value, str) else (value,)
    if isinstance(old, int) and isinstance(value, float) and value.is_integer() and not isinstance(old, bool):
        value = int(value)
    return value


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"optim.lr": 0.001, ...}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, (ConfigDict, dict)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def tuples(value: Any) -> Any:
    """JSON has no tuples; configs have no lists."""
    if isinstance(value, list):
        return tuple(tuples(v) for v in value)
    if isinstance(value, dict):
        return {k: tuples(v) for k, v in value.items()}
    return value


def digest(config: ConfigDict) -> str:
    """A short hash of everything in the config."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()[:12]


def changes(old: ConfigDict, new: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Keys that differ, with their values before and after."""
    a, b = flatten(old), flatten(new)
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


def check(config: ConfigDict) -> None:
    """Refuses values that no run can use, before anything is built."""
    c = config
    for key in ("steps", "batch_size", "log_every", "keep"):
        if c[key] < 1:
            raise UserError(f"{key} {c[key]} must be at least 1")
    for key in ("eval_every", "eval_batches", "checkpoint_every", "target", "max_rollbacks"):
        if c[key] < 0:
            raise UserError(f"{key} {c[key]} must not be negative; 0 switches it off")
    choose("nonfinite policy", c.nonfinite, {"stop", "skip", "rollback"})
    choose("best metric", c.best, {"accuracy", "loss"})
    choose("schedule", c.optim.schedule, {"constant", "cosine", "rsqrt"})
    if c.optim.accumulate < 1 or c.batch_size % c.optim.accumulate:
        raise UserError(f"optim.accumulate {c.optim.accumulate} does not divide batch_size {c.batch_size}")
