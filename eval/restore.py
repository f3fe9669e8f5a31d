"""A run's checkpoint, found, checked and loaded. The run is only read, so it may still be going."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from model.errors import UserError, closest
from train import checkpoint, hosts, sharding
from train import config as configs
from train.checkpoint import choose_step
from train.run import Run, prepare
from train.workdir import read_json, refuse_remote


@dataclasses.dataclass(frozen=True)
class Restored:
    """A trained model and all that is known about it."""

    folder: Path
    trained: ConfigDict  # what the run was trained with
    run: Run  # built from `trained` with the overrides in force
    step: int
    params: Any
    other_data: str = ""  # the fingerprint of its data, where they are no longer what it was trained on


def restore(workdir: str, step: str, overrides: Iterable[tuple[str, str]] = ()) -> Restored:
    """The parameters of a step (a number, `best` or `latest`) in a model built with the overrides."""
    refuse_remote("workdir", workdir)
    folder = Path(workdir)
    file, checkpoints = folder / "config.json", folder / "checkpoints"

    def find() -> int:
        if not file.is_file():
            runs = [str(path.parent) for path in folder.parent.glob("*/config.json")]
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise UserError(f"no run in {workdir}: it {what}{closest(str(folder), runs)}")
        return choose_step(checkpoints, step)

    chosen = hosts.agree(find)  # the run may save another step while hosts look for the latest
    overrides = list(overrides)
    trained = configs.load(str(file))
    run = prepare(configs.load(str(file), [*on_these_devices(trained, overrides), *overrides]))
    fingerprint = run.task.fingerprint(run.config.data.seed)
    hosts.same(lambda: {"data fingerprint": fingerprint})
    asked_otherwise = any(key.startswith("data.") for key in configs.changes(trained, run.config))
    other = "" if asked_otherwise or known_data(folder) in (None, fingerprint) else fingerprint
    if other:
        logging.warning("the data of task %s have changed since %s was trained on them", run.task.name, workdir)
    return Restored(
        folder=folder,
        trained=trained,
        run=run,
        step=chosen,
        params=load(checkpoints, run.abstract.params, chosen),
        other_data=other,
    )


def on_these_devices(trained: ConfigDict, overrides: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """A mesh for as many devices as there are, where the run's was for others and none is asked for."""
    if any(key.startswith("mesh.") for key, _ in overrides):
        return []
    try:
        sharding.mesh_shape(trained.mesh, jax.device_count())
    except UserError:
        print(f"the run's mesh was for other devices: here it is mesh.data={jax.device_count()}")
        return [(f"mesh.{axis}", "-1" if axis == "data" else "1") for axis in sharding.AXES]
    return []


def known_data(folder: Path) -> str | None:
    """The fingerprint of what a run was trained on, if it was noted."""
    file = folder / "data.json"
    return read_json(file, fingerprint=str)["fingerprint"] if file.exists() else None


def load(checkpoints: Path, like: Any, step: int) -> Any:
    """The parameters alone: with the optimizer's moments they would be three times the bytes."""
    try:
        return checkpoint.load_params(checkpoints, like, step)
    except Exception as error:
        # A run that goes on removes old checkpoints, perhaps this one, while it is being read.
        if step in checkpoint.steps(checkpoints):
            raise
        raise UserError(f"checkpoint {step} was removed by its run while being read; try again") from error
