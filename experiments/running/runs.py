"""One training run: what it changes, what its folder is called, which command starts it."""

import ast
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Value = bool | int | float | str | tuple | None


@dataclass(frozen=True)
class RunSpec:
    """What a run is asked to be, before anything of it is built."""

    config: str  # a config file, with its argument if any: configs/synthetic.py:task=mqar,arch=mamba
    overrides: Mapping[str, Value]  # dotted config key -> value
    labels: Mapping[str, Value]  # the run's place in a table; its seed is not part of it
    # Labels, without dots, of the run beside it, of the same seed, that its first parameters come from; None: drawn.
    source: Mapping[str, Value] | None = None
    program: str = "train"  # the module that is run; another takes the same flags and leaves a result of the same form

    @property
    def coordinates(self) -> dict[str, Value]:
        """What tells this run from its neighbours."""
        return {**self.labels, **self.seed}

    @property
    def seed(self) -> dict[str, Value]:
        return {"seed": self.overrides["seed"]} if "seed" in self.overrides else {}

    @property
    def source_name(self) -> str:
        """The name of the folder, beside this run's, of its source; empty where there is none."""
        return names([RunSpec(self.config, self.seed, self.source)])[0] if self.source is not None else ""


def read_value(text: str) -> Value:
    """A number, truth value or tuple where the text is one, so that 1e-3 and 0.001 are the same setting."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str | tuple | None) else text


def with_argument(config: str, values: Mapping[str, Value]) -> str:
    """Writes values into the part of a config's name after the colon, over those already there."""
    path, _, argument = config.partition(":")
    pairs = dict(item.partition("=")[::2] for item in argument.split(",") if item)
    pairs |= {key: str(value) for key, value in values.items()}
    return path + (":" + ",".join(f"{k}={v}" for k, v in pairs.items()) if pairs else "")


def command(run: RunSpec, folder: Path) -> list[str]:
    overrides = [f"--config.{key}={text}" for key, text in texts(run, folder.parent)]
    return [sys.executable, "-m", run.program, f"--config={run.config}", f"--workdir={folder}", *overrides]


def texts(run: RunSpec, out: Path = Path()) -> list[tuple[str, str]]:
    """The overrides as they are written on a command line, for a run whose folder is in `out`."""
    begins = {"init.path": out / run.source_name} if run.source_name else {}
    return [(key, str(value)) for key, value in {**run.overrides, **begins}.items()]


def names(runs: Sequence[RunSpec]) -> list[str]:
    """A folder name for each run, like `lr=0.001,width=64,seed=0`.

    It depends on the run's own settings, not on its neighbours' values: a sweep that grows keeps its folders.
    """
    short = short_keys({key for run in runs for key in run.coordinates})
    found = [",".join(f"{short[k]}={_slug(v)}" for k, v in run.coordinates.items()) or "run" for run in runs]
    found = [name if len(name) <= 160 else f"{name[:150]}-{_digest(name)}" for name in found]
    twice = [name for name, count in Counter(found).items() if count > 1]
    if twice:
        raise ValueError(f"runs with different settings share the labels {twice[0]}")
    return found


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each dotted key's shortest ending that no other key shares."""
    keys = list(keys)

    def ending(key: str, parts: int) -> str:
        return ".".join(key.split(".")[-parts:])

    def shortest(key: str) -> str:
        lengths = range(1, key.count(".") + 2)
        return next(
            (ending(key, n) for n in lengths if all(ending(k, n) != ending(key, n) for k in keys if k != key)),
            key,
        )

    return {key: shortest(key) for key in keys}


def _slug(value: Value) -> str:
    """A value as part of a folder name; what cannot be written plainly ends in a digest of the original."""
    text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "-", text)[:40]
    return plain if plain == text else f"{plain}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
