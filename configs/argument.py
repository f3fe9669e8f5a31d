"""The part of `--config=FILE:key=value,key=value` after the colon."""

from types import SimpleNamespace

from model.errors import UserError, closest


def parse(argument: str, **defaults: str | int) -> SimpleNamespace:
    """Reads `key=value,...` over the defaults, as texts or whole numbers like them; an unknown key is an error."""
    values, given = dict(defaults), {}
    for item in filter(None, argument.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in defaults:
            allowed = ", ".join(f"{k}=..." for k in defaults)
            raise UserError(f"unknown config argument {item!r}; this config takes {allowed}{closest(key, defaults)}")
        if key in given:
            raise UserError(f"config argument {key} is given twice, as {given[key]!r} and as {value!r}")
        given[key] = value
        if isinstance(defaults[key], int) and not (value.isdecimal() and len(value) < 10):
            raise UserError(f"config argument {key} is {value!r}; it takes a whole number, such as {defaults[key]}")
        values[key] = type(defaults[key])(value)
    return SimpleNamespace(**values)
