"""Mistakes a user can make, told in one line."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(Exception):
    """A mistake in what the user asked for; commands print its one line and exit with code 2."""


def closest(given: str, allowed: Iterable[str]) -> str:
    """A hint ending an error line: the allowed name nearest to the one given, if any is near."""
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; closest: {near[0]}" if near else ""


def choose(what: str, given: str, table: Mapping[str, Any] | set[str]) -> Any:
    """Looks up a name in a table, or says what could have been meant."""
    if given in table:
        return table[given] if isinstance(table, Mapping) else given
    raise UserError(f"unknown {what} {given!r}; choose from {', '.join(sorted(table))}{closest(given, table)}")
