"""Command lines with a config: `--config.KEY=VALUE` overrides, on top of model/command.py."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import flags

from model import command
from model.command import flag as flag  # for the commands above
from model.errors import UserError

OVERRIDES = flags.DEFINE_multi_string("override", [], "KEY=VALUE in the config; written --config.KEY=VALUE.")


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """`model.command.run`, for commands whose config can be overridden."""
    widen_thread_pool()
    command.run(main, rewrite)


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
