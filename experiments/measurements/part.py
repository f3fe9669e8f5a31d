"""A part of what a bench measures, by what names its rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.running.expand import axes
from model.errors import choose


@dataclass(frozen=True)
class Part:
    """Keys of rows -> the values that are asked for; of other keys, any."""

    wanted: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __call__(self, named: Mapping[str, Any]) -> bool:
        """Whether a row may be in it, by as much of its name as is known."""
        return all(str(named[key]) in values for key, values in self.wanted.items() if key in named)


ALL = Part()


def read(text: str, names: Mapping[str, str], settings: Iterable[Mapping[str, Any]]) -> Part:
    """Of `case=fire;batch=1,8`. names: the keys that rows have; who contends is not known before that is made ready."""
    wanted, settings = {}, list(settings)
    for key, values in axes("only", text):
        choose("key", key, dict.fromkeys(names))
        known = {str(setting[key]): None for setting in settings if key in setting}
        for value in values if known else ():
            choose(key, str(value), known)
        wanted[key] = frozenset(map(str, values))
    return Part(wanted)
