"""Configs: read from a file, checked against every key that exists, overridden, resolved, compared."""

import contextlib
import copy
import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

from ml_collections import ConfigDict

import data
from configs import base
from model import entries, settings
from model.errors import UserError, choose
from model.mixers import MIXERS
from model.positions import POSITIONS
from model.refusals import over_batch
from train.config_file import place, read_config
from train.objective import Objective
from train.objectives import OBJECTIVES

CHOICES = (
    "model.kind",
    "model.mixers",
    "model.encoder_mixers",
    "model.position",
    "model.norm",
    "model.mlp",
    "data.task",
    "objective.kind",
)

Declared = dict[str, dataclasses.Field]  # by dotted key


def load(spec: str, overrides: Iterable[tuple[str, str]] = ()) -> ConfigDict:
    """The resolved, locked config of `FILE.py[:argument]` or `config.json`, with `(key, text)` overrides."""
    return resolve(read_config(spec), overrides, spec.partition(":")[0])


def resolve(values: Mapping[str, Any], overrides: Iterable[tuple[str, str]] = (), file: str = "") -> ConfigDict:
    """The same of what a file holds."""
    given = {key: tuples(value) for key, value in flatten(values).items()}
    asked = dict(overrides)
    config = base.get_config()
    config.model.update(own_entries(given, asked, file))
    known = declared(config)
    # The choices first: they decide which other keys exist.
    for key in CHOICES:
        if key in asked:
            put(config, known, key, settings.parsed(asked[key], known[key].type))
        elif key in given:
            put(config, known, key, given[key], file)
    complete(config)
    known = declared(config)
    for key, value in given.items():
        if key not in CHOICES and not unused_section(key, config, given):
            put(config, known, key, value, file)
    for key, text in asked.items():
        if key not in CHOICES:
            put(config, known, key, settings.parsed(text, known[key].type) if key in known else text)
    return config.lock()


def own_entries(given: Mapping[str, Any], asked: Mapping[str, str], file: str) -> dict[str, dict[str, Any]]:
    """What names of the user's own in `model.mixers` stand for, by the keys `model.NAME.mixer` and `.position`."""
    names = [
        key[len("model.") : -len(".mixer")] for key in (*given, *asked) if re.fullmatch(r"model\.[^.]+\.mixer", key)
    ]
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for name in names if name not in MIXERS):
        if name in POSITIONS or name in entries.BROUGHT_SECTIONS or name in settings.section(base.Model):
            raise UserError(f"model.{name} is another key of the model section, no mixer; choose another name")
        found[name] = {}
        for field in dataclasses.fields(entries.Entry):
            key = f"model.{name}.{field.name}"
            value = settings.parsed(asked[key], field.type) if key in asked else given.get(key)
            settings.check(key, value, field.type, where=partial(place, "" if key in asked else file, key))
            found[name][field.name] = value
    return found


def declared(config: ConfigDict) -> Declared:
    """Every key there is, given the choices made: its type, which says what is allowed, and its default."""
    task, model = config.data.task, config.model
    chosen = {
        "model": entries.declared(model.mixers, model.position, model),
        "data": {task: settings.section(choose("task", task, data.TASKS))},
        "objective": of_objective(config.objective.kind),
    }
    known = flatten(settings.section(base.Base)) | flatten(chosen)
    if own := own_names(model):
        for key in ("model.mixers", "model.encoder_mixers"):
            known[key] = copy.copy(known[key])
            known[key].type = tuple[Literal[*MIXERS, *own], ...]
    return known


def of_objective(kind: str) -> settings.Section:
    own = settings.section(choose("objective", kind, OBJECTIVES), without=Objective)
    return {kind: own} if own else {}


def own_names(model: ConfigDict) -> list[str]:
    return [name for name, section in model.items() if isinstance(section, ConfigDict) and "mixer" in section]


def complete(config: ConfigDict) -> None:
    """Adds the section that each choice brings, with its defaults."""
    for name in own_names(config.model):
        if name not in entries.used(config.model.mixers, config.model):
            del config.model[name]
    for name, defaults in entries.sections(config.model.mixers, config.model.position, config.model).items():
        config.model[name] = defaults
    task = config.data.task
    config.data[task] = settings.defaults(settings.section(data.TASKS[task]))
    config.objective.update(settings.defaults(of_objective(config.objective.kind)))


def unused_section(key: str, config: ConfigDict, given: Mapping[str, Any]) -> bool:
    """Whether a config file's key belongs to a choice that was not made in the end."""
    room, name, *rest = (*key.split("."), "")
    own = f"model.{name}.mixer" in given
    if chooser(room, name) or own:
        return name not in config[room] or (own and rest[0] in POSITIONS and rest[0] not in config[room][name])
    return False


def chooser(room: str, name: str) -> str:
    """The key whose value brings a section; "" where none does."""
    tables = {
        "data.task": data.TASKS,
        "objective.kind": OBJECTIVES,
        "model.mixers": MIXERS,
        "model.position": POSITIONS,
        "model.mlp": {"experts"},
        **{f"model.{key}": choices for key, choices in entries.BROUGHT.items()},
    }
    return next((key for key, table in tables.items() if key.startswith(f"{room}.") and name in table), "")


ARGUMENTS = ("arch", "task", "size")  # that most config files take


def put(config: ConfigDict, known: Declared, key: str, value: Any, file: str = "") -> None:
    """Sets a key that must exist to a value that it may have, as a config file or the command line asks."""
    if key not in known:
        room, name, *_ = (*key.split("."), "")
        if (brings := chooser(room, name)) and name not in config[room]:
            chosen = config[room][brings.partition(".")[2]]
            raise UserError(
                f"unknown config key {key!r}{place(file, key)}: {brings} is {chosen!r}, which has no section {name!r}; "
                f"closest: {brings}={name}"
            )
        if key in ARGUMENTS:
            raise UserError(
                f"unknown config key {key!r}{place(file, key)}: it is an argument of config files, given behind their "
                f"name; closest: --config=FILE.py:{key}={value}, in a sweep --grid=:{key}={value}"
            )
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        leaf = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = (leaf or near)[0]
        raise UserError(f"unknown config key {key!r}{place(file, key)}; {siblings(key, known)}; closest: {hint}")
    field = known[key]
    settings.check(key, value, field.type, field.default, where=partial(place, file, key))
    *rooms, leaf = key.split(".")
    for name in rooms:
        config = config[name]
    new = settings.fit(field.type, value)
    # A ConfigDict would hold a setting to the type of its default. (Not to do so takes time.)
    with config.ignore_type() if type(new) is not type(config[leaf]) else contextlib.nullcontext():
        config[leaf] = new


def siblings(key: str, known: Iterable[str]) -> str:
    """The keys of the section that a misspelt key was meant for, or the sections where that is unknown too."""
    room = key.rpartition(".")[0]
    names = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == room]
    if names:
        return f"{room or 'the top level'} has {', '.join(names)}"
    return f"sections are {', '.join(sorted({k.rpartition('.')[0] for k in known if '.' in k}))}"


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"optim.lr": 0.001, ...}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, (ConfigDict, dict)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
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


def noted(before: list[dict[str, Any]], old: dict[str, Any], new: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """The changes made to a run's config on the way, `[{step, key, old, new}]`, when it goes on from a step.

    `old` and `new` are flat. What was changed after that step is undone by going back to it.
    """
    if step == 0:
        return []
    for change in before:
        whole = isinstance(change, dict) and {"step", "key", "old", "new"} <= change.keys()
        if not (whole and isinstance(change["step"], int) and isinstance(change["key"], str)):
            raise UserError(f"the run's changes.json is damaged: {str(change)[:40]!r} is no change; remove the file")
    then = dict(old)
    for change in reversed(before):
        if change["step"] >= step:
            then[change["key"]] = tuples(change["old"])
    kept = [change for change in before if change["step"] < step]
    keys = [key for key in sorted(then.keys() | new.keys()) if then.get(key) != new.get(key)]
    return kept + [{"step": step, "key": key, "old": then.get(key), "new": new.get(key)} for key in keys]


def check(config: ConfigDict) -> None:
    """Refuses values that no run can use, before anything is built."""
    values = flatten(config)
    for key, field in declared(config).items():
        if key not in values:
            raise UserError(f"the config lacks {key}; train.config.load fills in what a config file leaves out")
        settings.check(key, values[key], field.type, field.default)
    c = config
    if c.batch_size % c.optim.accumulate:
        raise UserError(f"optim.accumulate {c.optim.accumulate} does not divide batch_size {c.batch_size}")
    if c.optim.accumulate > 1 and over_batch(c.model):
        raise UserError(
            f"optim.accumulate is {c.optim.accumulate}, and model.norm 'batchnorm' has statistics of a whole batch; "
            "allowed: 1"
        )
