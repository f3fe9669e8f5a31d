"""What a convolution multiplies, by the attributes that a program's text has for it.

TPUs multiply batches of matrices so: what the batch counts is a window of as many places, padded or spread out until
each output meets one of them alone.
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """How a kernel goes along one axis."""

    stride: int = 1
    before: int = 0  # places padded ahead of the input; fewer than 0: left out of it
    apart: int = 1  # places from one number of the input to the next
    wide: int = 1  # and of the kernel


def multiplied(text: str, given: Sequence[int], kernel: Sequence[int], made: Sequence[int]) -> float:
    """Pairs of numbers that are multiplied, by the shapes of the input, the kernel and the output."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", text).groups()
    sizes = [dict(zip(told, dims, strict=True)) for told, dims in zip(labels, (given, kernel, made), strict=True)]
    axes = [name for name in labels[2] if name.isdigit()]
    met = math.prod(meetings(*(part[name] for part in sizes), window(text, int(name))) for name in axes)
    return float(sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"] * met)


def window(text: str, axis: int) -> Window:
    told = re.search(r"window=\{([^}]*)\}", text)
    fields = dict(field.split("=") for field in told[1].split()) if told else {}
    at = {key: value.split("x")[axis] for key, value in fields.items()}
    before = int(at.get("pad", "0_0").split("_")[0])
    return Window(int(at.get("stride", 1)), before, int(at.get("lhs_dilate", 1)), int(at.get("rhs_dilate", 1)))


@functools.cache
def meetings(given: int, kernel: int, made: int, along: Window) -> int:
    """Pairs of an output and a place of the kernel that meet at a number of the input, not beside or between them."""
    outputs = np.arange(made) * along.stride - along.before
    few, many = sorted((outputs, np.arange(kernel) * along.wide), key=len)
    places = (one + many for one in few)
    return sum(int(np.sum((at >= 0) & (at % along.apart == 0) & (at // along.apart < given))) for at in places)
