"""Command lines: absl flags, `--config.KEY=VALUE` overrides, and mistakes told in one line with exit code 2."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging

from model.errors import UserError, closest

# Faults of the machine that may show in any write: they are told in one line, like a user's mistake.
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)

OVERRIDES = flags.DEFINE_multi_string("override", [], "KEY=VALUE in the config; written --config.KEY=VALUE.")


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Parses flags, runs `main(argv)` and exits with its return value (None: 0)."""
    logging.set_verbosity(logging.WARNING)  # --verbosity changes it
    widen_thread_pool()
    try:
        app.run(main, flags_parser=parse_flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in MACHINE:
            raise
        print(f"error: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


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


def overrides() -> list[tuple[str, str]]:
    """The config overrides given on the command line."""
    return [(key, value) for key, _, value in (item.partition("=") for item in OVERRIDES.value)]


def use_compilation_cache() -> None:
    """Programs compiled once are kept on disk for later starts; JAX_COMPILATION_CACHE_DIR moves the folder."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "longview" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
