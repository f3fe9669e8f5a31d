"""Mistakes a user can make, told in one line."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(Exception):
    """A mistake in what the user asked for; commands print its one line and exit with code 2."""


Name = str | int


def closest(given: Name, allowed: Iterable[Name]) -> str:
    """A hint ending an error line: the allowed name nearest to the one given, if any is near."""
    if isinstance(given, int):
        return f"; closest: {min(allowed, key=lambda number: abs(number - given))}"
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; closest: {near[0]}" if near else ""


def choose(what: str, given: Name, table: Mapping[Name, Any] | set[Name]) -> Any:
    """Looks up a name or a number in a table, or says what could have been meant."""
    if given in table:
        return table[given] if isinstance(table, Mapping) else given
    names = ", ".join(map(str, sorted(table)))
    raise UserError(f"unknown {what} {given!r}; choose from {names}{closest(given, table)}")
