"""Sweep notation: grids, zips and lists of settings multiplied into runs.

    grid   optim.lr=1e-3,3e-3                              each value; several grids give every combination
    zip    optim.lr=1e-3,3e-3;model.width=64,32            first with first, second with second
    list   optim.lr=1e-3,model.width=64;optim.lr=3e-3      each setting as written

A key is a dotted config key, or with a colon before it an argument of the config file: `:arch=mamba,s4d`. Of the runs
of a table, `arch=mamba,s4d;task=image` picks those whose labels have one of these values each.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from experiments.running.runs import RunSpec, Value, names, read_value, with_argument
from model.errors import UserError, choose

Setting = dict[str, Value]

MOST = 100_000  # runs of a sweep


def expand(
    config: str,
    grids: Sequence[str] = (),
    zips: Sequence[str] = (),
    lists: Sequence[str] = (),
    seeds: int = 1,
    common: Mapping[str, Value] = MappingProxyType({}),
) -> list[RunSpec]:
    """Every combination of the grids', zips' and lists' settings, each with seeds 0, 1, ...

    The common settings hold for all.
    """
    if seeds < 1:
        raise UserError(f"--seeds={seeds} asks for no run; it counts seeds, from 1 up")
    factors = [factor for text in grids for factor in read_grid(text)]
    factors += [read_zip(text) for text in zips] + [read_list(text) for text in lists]
    _refuse_repeats([[dict(common)], *factors])
    by_hand = any("seed" in setting for factor in [[common], *factors] for setting in factor)
    count = math.prod(map(len, factors)) * (1 if by_hand else seeds)
    if count > MOST:
        raise UserError(f"this sweep has {count:,} runs; allowed: up to {MOST:,}")
    if not by_hand:
        factors.append([{"seed": seed} for seed in range(seeds)])
    elif seeds > 1:
        raise UserError(f"seed is set by hand and by --seeds={seeds}; use one of the two")
    return [_run(config, common, _merge(choice)) for choice in itertools.product(*factors)]


def read_grid(text: str) -> list[list[Setting]]:
    return [[{key: value} for value in values] for key, values in axes("grid", text)]


def read_zip(text: str) -> list[Setting]:
    zipped = axes("zip", text)
    lengths = {key: len(values) for key, values in zipped}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {n}" for key, n in lengths.items())
        raise UserError(f"--zip={text} pairs values one to one, so each key needs as many as the others; {counts}")
    keys = [key for key, _ in zipped]
    return [dict(zip(keys, values, strict=True)) for values in zip(*(values for _, values in zipped), strict=True)]


def read_list(text: str) -> list[Setting]:
    settings = [[_pair("list", item) for item in split(part, ",")] for part in split(text, ";")]
    for pairs in settings:
        _refuse_repeats([[pair] for pair in pairs])
    return [_merge(pairs) for pairs in settings]


def pick(runs: Sequence[RunSpec], text: str) -> list[RunSpec]:
    """Of these runs those with the labels or seeds that the text asks for, and those that they begin with."""
    kept = list(runs)
    for key, values in axes("only", text, example="arch=attention,mamba"):
        there = {str(run.coordinates[key]): run.coordinates[key] for run in runs if key in run.coordinates}
        choose("label", key, {name: None for run in runs for name in run.coordinates})
        wanted = [choose(key, str(value), there) for value in values]
        kept = [run for run in kept if key in run.coordinates and run.coordinates[key] in wanted]
    if not kept:
        raise UserError(f"--only={text} leaves no run; each value is there, but no run has all of them")
    begun = {run.source_name for run in kept}
    return [run for run, name in zip(runs, names(runs), strict=True) if run in kept or name in begun]


def split(text: str, separator: str) -> list[str]:
    """Splits where the separator stands outside brackets and quotes, so that values may be tuples."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote or char in "'\"":
            quote = "" if char == quote else quote or char
        depth += 0 if quote else (char in "([{") - (char in ")]}")
        if char == separator and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def axes(flag: str, text: str, example: str = "optim.lr=1e-3,3e-3") -> list[tuple[str, list[Value]]]:
    """`KEY=VALUE,VALUE;KEY=VALUE` as keys and their values."""
    found = []
    for part in split(text, ";"):
        key, values = _key_and_text(flag, part, example)
        texts = split(values, ",")
        if not all(texts):
            raise UserError(f"--{flag}={text} has an empty value for {key}; write KEY=VALUE,VALUE")
        found.append((key, [read_value(item) for item in texts]))
    _refuse_repeats([[{key: None}] for key, _ in found])
    return found


def _pair(flag: str, text: str) -> Setting:
    key, value = _key_and_text(flag, text)
    return {key: read_value(value)}


def _key_and_text(flag: str, text: str, example: str = "optim.lr=1e-3,3e-3") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip(": ") and value.strip()):
        raise UserError(f"--{flag} cannot read {text!r}; write KEY=VALUE,VALUE, for example {example}")
    return key.strip(), value


def _merge(settings: Iterable[Setting]) -> Setting:
    return {key: value for setting in settings for key, value in setting.items()}


def _refuse_repeats(factors: Sequence[list[Setting]]) -> None:
    seen: set[str] = set()
    for factor in factors:
        keys = {key for setting in factor for key in setting}
        if seen & keys:
            raise UserError(f"{min(seen & keys)} is given twice; give all its values at one place")
        seen |= keys


def _run(config: str, common: Mapping[str, Value], setting: Setting) -> RunSpec:
    arguments = {key[1:]: value for key, value in setting.items() if key.startswith(":")}
    overrides = {key: value for key, value in setting.items() if not key.startswith(":")}
    labels = {key.removeprefix(":"): value for key, value in setting.items() if key != "seed"}
    return RunSpec(with_argument(config, arguments), {**common, **overrides}, labels)
