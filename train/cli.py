"""Command lines: absl flags, `--config.KEY=VALUE` overrides, and mistakes told in one line with exit code 2."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, flags, logging

from model import settings
from model.errors import UserError, closest, out_of_memory

OVERRIDES = flags.DEFINE_multi_string("override", [], "KEY=VALUE in the config; written --config.KEY=VALUE.")


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parses flags, runs `main(argv)` and exits with its return value (None: 0).

    What the user or the machine did wrong ends in one line; a traceback is a mistake of ours.
    """
    logging.set_verbosity(logging.WARNING)  # --verbosity changes it
    widen_thread_pool()
    try:
        app.run(main, flags_parser=parse_flags)
    except UserError as error:
        refuse(str(error))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        hint = "lower batch_size, recompute by model.remat=True or share out by mesh.fsdp"
        print(f"error: {reason}; {hint}", file=sys.stderr)
        sys.exit(1)
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
    """absl's parsing, with config overrides taken out first."""
    try:
        return flags.FLAGS(rewrite(argv))
    except flags.UnrecognizedFlagError as error:
        near = closest(error.flagname, flags.FLAGS).replace("closest: ", "closest: --")
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


def widen_thread_pool() -> None:
    """Gives XLA threads to spare when a CPU plays many devices: each collective in flight blocks one per device."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("PJRT_NPROC", "64")


def refuse_arguments(argv: Sequence[str], command: str, example: str = "") -> None:
    """For a command that takes flags only, and no config."""
    for word in (*argv[1:], *(f"--config.{item}" for item in OVERRIDES.value)):
        raise UserError(f"unexpected argument {word!r}; {command} takes {example or 'none'}")


def overrides() -> list[tuple[str, str]]:
    """The config overrides given on the command line."""
    return [(key, value) for key, _, value in (item.partition("=") for item in OVERRIDES.value)]


def use_compilation_cache() -> None:
    """Programs compiled once are kept on disk for later starts; JAX_COMPILATION_CACHE_DIR moves the folder."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "longview" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
