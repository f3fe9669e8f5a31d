"""Command lines: absl flags whose types say what they may be, and mistakes told in one line with exit code 2."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from model import settings
from model.errors import LESS_MEMORY, UserError, closest, no_device, out_of_memory

flags.disclaim_key_flags()  # what `flag` defines is its caller's, so that --help of a command lists it


def run(main: Callable[[Sequence[str]], int | None], rewrite: Callable[[Sequence[str]], list[str]] = list) -> None:
    """Parses flags, runs `main(argv)` and exits with its return value (None: 0); `rewrite` changes argv first.

    What the user or the machine did wrong ends in one line; a traceback is a mistake of ours.
    """
    logging.set_verbosity(logging.WARNING)  # --verbosity changes it
    try:
        app.run(main, flags_parser=lambda argv: parse_flags(rewrite(argv)))
    except UserError as error:
        refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        if lacking := no_device(error):
            refuse(lacking)
        reason = out_of_memory(error)
        if reason is None:
            raise
        print(f"error: {reason}; {LESS_MEMORY}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # told where it can be said better, where it cannot it ends here
        refuse(": ".join(filter(None, (str(error.filename or ""), error.strerror or str(error)))))


def refuse(message: str) -> NoReturn:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


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
