"""Whose run a folder holds: its config and its data, against those it was started with, and whether it is over."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from model.errors import UserError
from train import config as configs
from train import hosts, places
from train.manifest import steps
from train.run import Run
from train.workdir import read_json, write_json

SHOWN = 4  # of the keys by which a config is another one


def ended(folder: Path) -> dict[str, Any] | None:
    """The result of a run that came to its end; one that broke off at a loss that was not finite may go on."""
    result = folder / "result.json"
    done = read_json(result, status=str, config_hash=str, steps=int) if result.exists() else None
    return None if done is None or done["status"] == "nonfinite" else done


def open_run(run: Run, folder: Path, fingerprint: str) -> dict[str, Any] | None:
    """Checks the folder against this run and its data; the result, if there is nothing left to do."""
    config = run.config
    hosts.same(lambda: {"data fingerprint": fingerprint})

    def check() -> dict[str, Any] | None:
        file, data, done = folder / "config.json", folder / "data.json", ended(folder)
        if file.exists():
            refuse_changes(configs.changes(configs.tuples(read_json(file)), config), config, folder)
        if data.exists() and read_json(data, fingerprint=str)["fingerprint"] != fingerprint:
            raise UserError(
                f"the data of task {run.task.name} has changed since {folder} was started; give another --workdir"
            )
        if done is None or done["config_hash"] == configs.digest(config):
            return done
        if not steps(folder / "checkpoints"):
            raise UserError(
                f"{folder} has a result of {done['steps']} steps and no checkpoint to go on from; a pack has those of "
                "a finished run if made with --checkpoints=all; to begin again give another --workdir"
            )
        return None

    return hosts.agree(check)


def refuse_changes(changes: dict[str, tuple[Any, Any]], config: ConfigDict, folder: Path) -> None:
    """Prints what differs from the config the run was started with; only where data lie and keys declared safe may."""
    others = [key for key, (old, new) in changes.items() if not places.moved(key, old, new)]
    unsafe = [key for key in others if not any(fnmatchcase(key, safe) for safe in config.resume_safe)]
    if unsafe:
        unsafe.sort(key=lambda key: None in changes[key])  # a choice before the section that came or went with it
        told = [f"{key}: {changes[key][0]!r} -> {changes[key][1]!r}" for key in unsafe[:SHOWN]]
        more = f" and {len(unsafe) - SHOWN} more" if len(unsafe) > SHOWN else ""
        raise UserError(
            f"{folder} holds a run with another config ({', '.join(told)}{more}); give another --workdir, "
            f"or go on all the same by --config.resume_safe={','.join([*config.resume_safe, *unsafe])}"
        )
    for key, (old, new) in changes.items():
        print(f"config change: {key}: {old!r} -> {new!r}")


def sign_run(
    run: Run, folder: Path, fingerprint: str, step: int, origin: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Makes the folder this run's, once all that is in it fits; returns what was changed in the config on the way."""

    def sign() -> list[dict[str, Any]]:
        file, changes, result = folder / "config.json", folder / "changes.json", folder / "result.json"
        before = configs.flatten(configs.tuples(read_json(file))) if file.exists() else {}
        made = read_json(changes, changes=list)["changes"] if changes.exists() else []
        noted = configs.noted(made, before, configs.flatten(run.config), step)
        result.unlink(missing_ok=True)
        if origin:
            write_json(folder / "init.json", origin)
        write_json(changes, {"changes": noted})  # before the config: written again if the config is not
        write_json(file, run.config.to_dict())
        write_json(folder / "data.json", {"task": run.task.name, "fingerprint": fingerprint})
        return noted

    return hosts.agree(sign)
