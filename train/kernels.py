"""What kernels written in Pallas multiply: a compiled program holds them sealed, the traced one still shows them.

A kernel's products count as often as its grid has places. Of a choice inside it every branch counts alike: blocks that
a causal mask may hide count half.
"""

import math
from collections.abc import Iterator
from typing import Any

Call = tuple[str, tuple[tuple[int, ...], ...]]  # a kernel's name, and the shapes that it makes


def told(jaxpr: Any) -> dict[Call, float]:
    """Operations of one call of each kernel in a traced program; the mean, of those that are alike by name and shapes.

    A grid whose size is known only when the program runs leaves its kernel out.
    """
    found: dict[Call, list[float]] = {}
    for each in calls(jaxpr):
        grid = each.params["grid_mapping"].grid
        if all(isinstance(n, int) for n in grid):
            call = each.params["name"], tuple(made.aval.shape for made in each.outvars)
            found.setdefault(call, []).append(math.prod(grid) * operations(each.params["jaxpr"]))
    return {call: sum(each) / len(each) for call, each in found.items()}


def calls(jaxpr: Any) -> Iterator[Any]:
    for each in jaxpr.eqns:
        if each.primitive.name == "pallas_call":
            yield each
        else:
            for inner in inside(each):
                yield from calls(inner)


def operations(jaxpr: Any) -> float:
    """Of the products in it, loops of a known length gone round."""
    total = 0.0
    for each in jaxpr.eqns:
        found = [operations(inner) for inner in inside(each)]
        if each.primitive.name == "dot_general":
            (summed, _), _ = each.params["dimension_numbers"]
            left = each.invars[0].aval.shape
            total += 2.0 * math.prod(each.outvars[0].aval.shape) * math.prod(left[axis] for axis in summed)
        elif each.primitive.name == "cond":
            total += sum(found) / len(found)
        else:
            total += each.params["length"] * sum(found) if each.primitive.name == "scan" else sum(found)
    return total


def inside(each: Any) -> list[Any]:
    """The programs that an equation runs."""
    values = [
        value for param in each.params.values() for value in (param if isinstance(param, tuple | list) else [param])
    ]
    programs = [getattr(value, "jaxpr", value) for value in values]
    return [program for program in programs if hasattr(program, "eqns")]
