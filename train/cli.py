"""Command lines: absl flags, `--config.KEY=VALUE` overrides, and mistakes told in one line with exit code 2."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from model.errors import UserError

OVERRIDES = flags.DEFINE_multi_string("override", [], "KEY=VALUE in the config; written --config.KEY=VALUE.")


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parses flags, runs `main(argv)` and exits with its return value (None: 0)."""
    logging.set_verbosity(logging.WARNING)  # --verbosity changes it
    try:
        app.run(main, flags_parser=parse_flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's parsing, with config overrides taken out first."""
    try:
        return flags.FLAGS(rewrite(argv))
    except flags.UnrecognizedFlagError as error:
        near = f"; closest: --{error.suggestions[0]}" if error.suggestions else ""
        raise UserError(f"unknown flag --{error.flagname}{near}") from None
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None


def rewrite(argv: Sequence[str]) -> list[str]:
    """`--config.optim.lr=1e-3`, or with a blank for the `=`, becomes `--override=optim.lr=1e-3`."""
    out, rest = [argv[0]], list(argv[1:])
    while rest:
        word = rest.pop(0)
        if word.startswith("--config.") or word.startswith("-config."):
            key, equals, value = word.partition(".")[2].partition("=")
            if not equals:
                if not rest:
                    raise UserError(f"{word} needs a value: {word}=...")
                value = rest.pop(0)
            word = f"--override={key}={value}"
        out.append(word)
    return out


def overrides() -> list[tuple[str, str]]:
    """The config overrides given on the command line."""
    return [(key, value) for key, _, value in (item.partition("=") for item in OVERRIDES.value)]
