"""What a traced program is made of."""

from collections.abc import Iterator
from typing import Any


def inner(eqn: Any) -> list[Any]:
    """The programs within an equation: those of loops, branches, calls and kernels."""
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else [value])]
    return [program for x in values if hasattr(program := getattr(x, "jaxpr", x), "eqns")]


def equations(jaxpr: Any, primitive: str) -> Iterator[Any]:
    """All those of a primitive, wherever they are; of what turns in a loop, once."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            yield eqn
        for program in inner(eqn):
            yield from equations(program, primitive)
