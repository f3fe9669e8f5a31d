"""What a setting may be: said by the type of its field, beside its default, and checked here alone.

    n_heads: Dim = 4
    window: Length | None = None
    schedule: Literal["constant", "cosine", "rsqrt"] = "cosine"
    b1: Annotated[float, at_least(0), below(1)] = 0.9

The same types serve settings of a config, fields of a module or a task, and flags of a command.
"""

import ast
import dataclasses
import math
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from model.errors import UserError, closest

Kind = Any  # a type, as it stands behind a field's colon


@dataclasses.dataclass(frozen=True)
class Bound:
    """A condition on a value of the type before it."""

    says: str  # it follows "a number"
    holds: Callable[[Any], bool]
    nearest: Callable[[Any], Any] = lambda value: None  # the value that holds and is the closest to one that does not


def at_least(low: float) -> Bound:
    return Bound(f"of at least {low}", lambda x: x >= low, lambda x: low)


def at_most(high: float) -> Bound:
    return Bound(f"of at most {high}", lambda x: x <= high, lambda x: high)


def within(low: float, high: float) -> Bound:
    return Bound(f"from {low} to {high}", lambda x: low <= x <= high, lambda x: low if x < low else high)


# The limit itself cannot be used, so a number that float32 rounds to it cannot either.
def above(low: float) -> Bound:
    return Bound(f"above {low}", lambda x: np.float32(x) > low)


def below(high: float) -> Bound:
    return Bound(f"below {high}", lambda x: np.float32(x) < high)


even = Bound("that is even", lambda x: x % 2 == 0, lambda x: x + 1)
filled = Bound("that is not empty", str.strip)

HUGE = float(np.finfo(np.float32).max)
LARGEST = 2**31 - 1  # steps and positions are counted in int32
LONGEST = 2**26
WIDEST = 2**20

Count = Annotated[int, within(1, LARGEST)]
Whole = Annotated[int, within(0, LARGEST)]
Seed = Annotated[int, within(0, 2**32 - 1)]
Length = Annotated[int, within(1, LONGEST)]  # tokens
Dim = Annotated[int, within(1, WIDEST)]  # of an array
Positive = Annotated[float, above(0)]
NotNegative = Annotated[float, at_least(0)]
Fraction = Annotated[float, within(0, 1)]
Name = Annotated[str, filled]


Section = dict[str, Any]  # a setting's name -> its field; a section's name -> that section


def section(cls: type, without: type | None = None) -> Section:
    """The settings that a dataclass declares, less another's; a field of which nothing is said is none."""
    other = {field.name for field in dataclasses.fields(without)} if without else set()
    own = [field for field in dataclasses.fields(cls) if field.name not in other and field.type is not Any]
    return {f.name: section(f.type) if dataclasses.is_dataclass(f.type) else f for f in own}


def defaults(settings: Section) -> dict[str, Any]:
    """What the settings of a section are as long as nobody changes them."""
    return {name: defaults(one) if isinstance(one, dict) else one.default for name, one in settings.items()}


def check(name: str, value: Any, kind: Kind, usual: Any = None, where: Callable[[], str] = str) -> None:
    """Refuses a value that is not of its kind: what was given, what is allowed, the closest that is."""
    if admits(kind, value):
        return
    hints = {"closest": nearest(kind, value), "usual": usual}
    hint = next((f"; {word}: {written(hint)}" for word, hint in hints.items() if hint not in (None, "", ())), "")
    raise UserError(f"{name} is {shown(value)}{where()}; allowed: {says(kind)}{hint}")


def check_fields(thing: Any, room: str = "") -> None:
    """Checks every field of a dataclass against its type."""
    for field in dataclasses.fields(thing):
        if field.name not in ("parent", "name"):  # Flax's own
            name = f"{room or type(thing).__name__}.{field.name}"
            check(name, getattr(thing, field.name), field.type, field.default)


def admits(kind: Kind, value: Any) -> bool:
    """Whether a value is of a kind."""
    match get_origin(kind), get_args(kind):
        case origin, (base, *bounds) if origin is Annotated:
            return admits(base, value) and all(bound.holds(value) for bound in bounds)
        case origin, names if origin is Literal:
            return any(type(value) is type(name) and value == name for name in names)
        case origin, kinds if origin in (Union, UnionType):
            return any(admits(one, value) for one in kinds)
        case origin, (item, ends) if origin is tuple and ends is ...:
            return isinstance(value, tuple) and all(admits(item, one) for one in value)
        case origin, items if origin is tuple:
            return isinstance(value, tuple) and len(value) == len(items) and all(map(admits, items, value))
    if kind is float:  # in float32, where a run will use it
        return type(value) in (int, float) and abs(value) <= HUGE
    return kind is Any or type(value) is kind


def says(kind: Kind) -> str:
    """A kind in words."""
    match get_origin(kind), get_args(kind):
        case origin, (base, *bounds) if origin is Annotated:
            return f"{says(base)} {' and '.join(bound.says for bound in bounds)}"
        case origin, names if origin is Literal:
            return ", ".join(map(str, names))
        case origin, kinds if origin in (Union, UnionType):
            return ", or ".join(map(says, kinds))
        case origin, (item, ends) if origin is tuple and ends is ...:
            return f"a tuple, each item {says(item)}"
        case origin, items if origin is tuple:
            return f"a tuple of {len(items)} ({'; '.join(map(says, items))})"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
    words |= {dict: "an object", list: "a list"}  # of JSON
    return words.get(kind, str(kind))


def nearest(kind: Kind, value: Any) -> Any:
    """The value of a kind that is the closest to one that is not; None if there is none to speak of."""
    found = next((near for near in _candidates(kind, value) if near is not None and admits(kind, near)), None)
    return fit(kind, found)


def _candidates(kind: Kind, value: Any) -> Iterator[Any]:
    number = type(value) in (int, float) and value == value
    match get_origin(kind), get_args(kind):
        case origin, (base, *bounds) if origin is Annotated and number and base in (int, float):
            near = value if abs(value) <= HUGE else math.copysign(math.inf, value > 0 or -1)
            near = round(near) if base is int and abs(near) <= HUGE else near
            for bound in bounds:
                near = near if near is None or bound.holds(near) else bound.nearest(near)
            yield near
        case origin, names if origin is Literal and number:
            yield min((name for name in names if type(name) is int), key=lambda name: abs(name - value), default=None)
        case origin, names if origin is Literal and isinstance(value, str):
            yield closest(value, map(str, names)).removeprefix("; closest: ") or None
        case origin, kinds if origin in (Union, UnionType):
            found = [near for one in kinds if (near := nearest(one, value)) is not None]
            yield from sorted(found, key=lambda near: abs(near - value)) if number else found
        case origin, (item, ends) if origin is tuple and ends is ...:
            yield tuple(nearest(item, one) if not admits(item, one) else one for one in _tuple(value))


def _tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _items(text: str, kind: Kind) -> tuple:
    """A tuple without its brackets and quotes: `mamba,attention`."""
    item = get_args(kind)[0]
    return tuple(parsed(part.strip(), item) for part in text.split(","))


def fit(kind: Kind, value: Any) -> Any:
    """An admitted value in the type that stands for it: a whole number may be given for a float."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return float(value) if base is float and type(value) is int else value


def parsed(text: str, kind: Kind) -> Any:
    """What a text on a command line means where this kind is wanted; a text that means nothing of it stays one."""
    if admits(kind, text):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    if get_origin(kind) is tuple:
        value = _items(text, kind) if isinstance(value, str) else _tuple(value)
    if isinstance(value, float) and value.is_integer() and admits(kind, int(value)):
        value = int(value)
    return fit(kind, value)


def is_one_of(count: range, text: str) -> bool:
    """Whether a text is one of these whole numbers, written in digits."""
    try:
        return text.isdecimal() and int(text) in count
    except ValueError:  # Python reads no numbers of thousands of digits
        return False


ROOM = 80  # characters of a value that an error shows


def shown(value: Any) -> str:
    """A value as an error has room for it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= ROOM else f"{text[: ROOM - 3]}..."


def written(value: Any) -> str:
    """A value as it is written on a command line."""
    return value if isinstance(value, str) else shown(value)
