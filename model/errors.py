"""Mistakes a user can make, told in one line."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class UserError(Exception):
    """A mistake in what the user asked for; commands print its one line and exit with code 2."""


class NoRoom(MemoryError):
    """Memory that could not be had, and what would take less."""


# What makes a run smaller, told where it does not fit and nothing else is said to.
LESS_MEMORY = "lower batch_size, raise optim.accumulate, keep less by model.kept=matmuls, or share out by mesh.fsdp"


@contextlib.contextmanager
def made_smaller_by(advice: str) -> Iterator[None]:
    """What is told where there is no room for what is done meanwhile."""
    try:
        yield
    except Exception as error:
        if lacking := out_of_memory(error):
            raise NoRoom(f"{lacking}; {advice}") from error
        raise


def out_of_memory(error: BaseException) -> str | None:
    """In one line what could not be had, of a device's memory or of this host's; None for any other error."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}".rstrip(": ")
    if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        first = str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]
        return f"out of memory: {first.rstrip('.')}"
    return None


def no_device(error: BaseException) -> str | None:
    """In one line which devices could not be had; None for any other error."""
    if isinstance(error, RuntimeError) and "Unable to initialize backend" in str(error):
        return " ".join(str(error).split())
    return None


def told(error: BaseException) -> tuple[int, str] | None:
    """The exit code and the line that end a process by what its user or the machine did; None: a mistake of ours."""
    lacking, nowhere = out_of_memory(error), no_device(error)
    if isinstance(error, UserError):
        code, text = 2, str(error)
    elif isinstance(error, NoRoom):
        code, text = 1, str(error)
    elif lacking:
        code, text = 1, f"{lacking}; {LESS_MEMORY}"
    elif nowhere:
        code, text = 2, nowhere
    elif isinstance(error, KeyboardInterrupt):
        code, text = 130, "interrupted"
    elif isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        code, text = 2, f"cannot use {error.filename}: {reason}" if error.filename else reason
    else:
        return None
    return code, " ".join(line.strip() for line in text.splitlines())


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
