"""The names in a config's model section: what each stands for, and the sections that they bring."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from model import batchnorm, seq2seq
from model.contract import Mixer
from model.errors import choose
from model.mixers import MIXERS
from model.mlps import MLPS
from model.mlps.experts import Experts
from model.mlps.mlp import MLP
from model.positions import POSITIONS, Position
from model.settings import Section, defaults, section

# Sections that a model's kind and norm bring.
BROUGHT = {"kind": {"seq2seq": seq2seq.Settings}, "norm": {"batchnorm": batchnorm.Settings}}
BROUGHT_SECTIONS = [name for choices in BROUGHT.values() for name in choices]

INSIDE = [name for name, position in POSITIONS.items() if position.needs_attention]


@dataclass(frozen=True)
class Entry:
    """What a name in `model.mixers` stands for; a name of the user's own has these in its section, and its mixer's."""

    mixer: Literal[*MIXERS] = "attention"
    position: Literal["none", *INSIDE] | None = None  # acts inside this mixer alone; None: `model.position` does
    mlp: Literal[*MLPS] | None = None  # behind this mixer; None: `model.mlp`


def entry(c: Mapping[str, Any], name: str) -> Entry:
    if name not in c or "mixer" not in c[name]:  # by a ConfigDict's `get` it would look for close keys
        return Entry(name)
    return Entry(**{field.name: c[name].get(field.name) for field in fields(Entry)})


def used(mixers: tuple[str, ...], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Every name whose section a model reads: those of `mixers`, and what its kind has besides."""
    if given.get("kind") == "encoder_decoder":
        return (*mixers, *given["encoder_mixers"], "cross_attention")
    return tuple(mixers)


def declared(mixers: tuple[str, ...], position: str, given: Mapping[str, Any] = MappingProxyType({})) -> Section:
    """The config sections that these choices bring; `given` has the model's kind and norm, and the sections of
    the user's own names, with their choices."""
    found = {}
    for name in used(mixers, given):
        one = entry(given, name)
        found[name] = section(choose("mixer", one.mixer, MIXERS), without=Mixer)
        if one.mixer != name:
            found[name] = section(Entry) | found[name] | of_position(one.position or "none")
    if "experts" in mlps(given, used(mixers, given)):
        found["experts"] = section(Experts, without=MLP)
    for key, choices in BROUGHT.items():
        if (chosen := given.get(key)) in choices:
            found[chosen] = section(choices[chosen])
    return found | of_position(position)


def mlps(c: Mapping[str, Any], mixers: tuple[str, ...]) -> list[str]:
    """The MLP behind each mixer."""
    return [entry(c, name).mlp or c.get("mlp", "none") for name in mixers]


def of_position(name: str) -> Section:
    own = section(choose("position", name, POSITIONS), without=Position)
    return {name: own} if own else {}


def sections(
    mixers: tuple[str, ...], position: str, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """The same with their defaults."""
    found = defaults(declared(mixers, position, given))
    for name in used(mixers, given):
        found[name] |= {key: value for key, value in asdict(entry(given, name)).items() if key in found[name]}
    return found
