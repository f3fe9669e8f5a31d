"""Where the data of a run lie: below a root that differs from machine to machine, and is no part of what the run is."""

import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import data
from data.prepared import Unprepared, in_a_set, open_set


def below(config: ConfigDict, root: str) -> dict[str, str]:
    """What a config overrides to have its prepared data below a root; nothing where it reads none."""
    task = config.data.task
    if "root" in config.data[task]:
        return {f"data.{task}.root": root}
    stored = in_a_set(config.data[task].get("path", ""))
    return {f"data.{task}.path": str(Path(root, "prepared", stored.name, stored.file))} if stored else {}


def moved(key: str, old: Any, new: Any) -> bool:
    """Whether a change of a config says no more than where prepared data lie; a fingerprint tells which they are."""
    if re.fullmatch(r"data\.[^.]+\.path", key):
        before, after = in_a_set(str(old)), in_a_set(str(new))
        return bool(before and after) and before[1:] == after[1:]
    return re.fullmatch(r"data\.[^.]+\.root", key) is not None


def lacking(config: ConfigDict) -> tuple[str, str] | None:
    """The root and the name of the prepared set that a config's data lack; UserError where they lack something else."""
    section = config.data[config.data.task].to_dict()
    stored = in_a_set(section.get("path", ""))
    try:
        if stored:
            open_set(stored.root, stored.name)
        data.build(config.data.task, section)
    except Unprepared as error:
        return error.root, error.name
    return None
