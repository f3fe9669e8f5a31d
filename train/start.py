"""Where a run's first parameters come from, if they are not drawn: another run, or a folder of safetensors.

They are read once, before the first step, and saved as step 0: a run that goes on needs its source no more.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from model.asked import Asked
from model.errors import UserError, closest
from model.paths import as_tree, by_path
from model.weights.family import differences, spelled_out
from model.weights.folder import Weights, fit, open_weights
from model.weights.names import Like, check_fit, stacks
from train import arrays, checkpoint, hosts
from train import config as configs
from train.run import Run
from train.step import RunState


@dataclass(frozen=True)
class Source:
    """Parameters that were found to fit; nothing of them is read yet."""

    paths: list[str]  # of those to be taken
    read: Callable[[Like], dict[str, jax.Array]]
    origin: dict[str, Any]  # where they come from, by hash


def find(run: Run) -> Source | None:
    """What `init` names, held against the parameters of this run; None where all are to be drawn."""
    c = run.config.init
    if not c.path:
        for key, usual in (("fresh", ()), ("step", "latest")):
            if c[key] != usual:
                raise UserError(
                    f"init.{key} is {c[key]!r}, and init.path is empty; allowed: {usual!r}; "
                    "closest: --config.init.path=FOLDER of the run to begin with"
                )
        return None
    folder = Path(c.path)
    if not folder.is_dir():
        near = closest(folder.name, [path.name for path in folder.parent.glob("*") if path.is_dir()])
        raise UserError(f"init.path {c.path!r} {'is a file' if folder.exists() else 'does not exist'}{near}")
    found = of_run(run, folder) if (folder / "checkpoints").is_dir() else of_weights(run, folder)
    fresh = sorted(by_path(run.abstract.params).keys() - set(found.paths))
    return Source(found.paths, found.read, {"path": c.path, **found.origin, "fresh": fresh})


def of_run(run: Run, folder: Path) -> Source:
    """Parameters of another run's checkpoint, which may still be going on."""
    c, steps = run.config.init, folder / "checkpoints"
    step = hosts.agree(lambda: checkpoint.choose_step(steps, str(c.step)))
    here = arrays.describe(by_path(run.abstract.params))

    def check() -> list[Any]:
        there, digest = checkpoint.parameters(steps, step)
        return [check_fit(f"{folder} at step {step}", there, here, c.fresh), digest]

    paths, digest = hosts.agree(check)
    return Source(paths, lambda like: checkpoint.load_some(steps, like, step), {"step": step, "sha256": digest})


def of_weights(run: Run, folder: Path) -> Source:
    """Other people's."""
    c = run.config
    if c.init.step != "latest":
        raise UserError(f"init.step is {c.init.step!r}, and {folder} is no run; allowed: latest")
    weights = open_weights(folder)
    kind = weights.settings.get("kind", "stack")
    if c.model.kind != kind:
        raise UserError(f"model.kind is {c.model.kind!r}, and {folder} is of another; allowed: {kind}")
    like = by_path(run.abstract.params)
    fitted = fit(weights, like, stacks(c.model.to_dict()), c.init.fresh)
    tell_differences(weights, c, run.objective.asked)

    def read(like: Like) -> dict[str, jax.Array]:
        return {path: fitted.load(path, one) for path, one in like.items()}

    files = sorted({stored.file for stored in weights.tensors.values()})
    return Source(fitted.paths, read, {"step": None, "sha256": hosts.agree(lambda: file_hash(files))})


def tell_differences(weights: Weights, c: ConfigDict, asked: Asked) -> None:
    """Settings that have no parameters do not show in shapes: a model may be another in the same ones."""
    theirs = configs.resolve({"model": weights.settings}, file=str(weights.folder / "config.json"))
    told = spelled_out(theirs.model.to_dict(), asked), spelled_out(c.model.to_dict(), asked)
    for key, there, here in differences(*told):
        print(f"note: {key} is {here!r}, and {there!r} in {weights.folder}")


def file_hash(files: list[Path]) -> str:
    """SHA-256 of a file, as sha256sum has it; of several, that of their names and hashes."""
    each = {}
    for file in files:
        with open(file, "rb") as opened:
            each[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return next(iter(each.values())) if len(each) == 1 else hashlib.sha256(json.dumps(each).encode()).hexdigest()


def begin(run: Run, source: Source | None) -> RunState:
    """The state before the first step."""
    state = jax.block_until_ready(run.init())  # here, if at all, memory lacks; see train.evaluate.fetch
    if source is None:
        return state
    like: Mapping[str, Any] = by_path(run.abstract.params)
    params = by_path(state.params)
    params |= source.read({path: like[path] for path in source.paths})
    print(f"{len(source.paths)} of {len(params)} parameter arrays are from {source.origin['path']}")
    return state.replace(params=as_tree(params))
