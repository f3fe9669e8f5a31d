"""Command lines: absl flags whose types say what they may be, and mistakes told in one line with exit code 2."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from model import settings
from model.errors import UserError, closest, told

flags.disclaim_key_flags()  # what `flag` defines is its caller's, so that --help of a command lists it


def run(main: Callable[[Sequence[str]], int | None], rewrite: Callable[[Sequence[str]], list[str]] = list) -> None:
    """Parses flags, runs `main(argv)` and exits with its return value (None: 0); `rewrite` changes argv first.

    What the user or the machine did wrong ends in one line; a traceback is a mistake of ours.
    """
    logging.set_verbosity(logging.WARNING)  # --verbosity changes it
    try:
        app.run(main, flags_parser=lambda argv: parse_flags(rewrite(argv)))
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        found = told(error)
        if found is None:
            raise
        code, line = found
        print(f"error: {line}", file=sys.stderr)
        sys.exit(code)


def flag(name: str, kind: settings.Kind, default: Any, help: str) -> flags.FlagHolder:
    """A flag whose type says what it may be, as a setting's does."""
    return flags.DEFINE(Parser(name, kind), name, default, help)


class Parser(flags.ArgumentParser):
    def __init__(self, name: str, kind: settings.Kind):
        self.name, self.kind, self.syntactic_help = name, kind, settings.says(kind)

    def parse(self, argument: Any) -> Any:
        value = settings.parsed(argument, self.kind) if isinstance(argument, str) else argument
        settings.check(f"--{self.name}", value, self.kind)
        return settings.fit(self.kind, value)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's parsing, with mistakes in one line."""
    try:
        return flags.FLAGS(argv)
    except SystemExit:  # by --help, which absl takes for a failure
        sys.exit(0)
    except flags.UnrecognizedFlagError as error:
        near = closest(error.flagname, flags.FLAGS).replace("closest: ", "closest: --")
        raise UserError(f"unknown flag --{error.flagname}{near}") from None
    except (flags.Error, ValueError) as error:  # absl's own flags raise either
        raise UserError(" ".join(str(error).split())) from None
