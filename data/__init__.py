"""Tasks: every example a pure function of (seed, split, index), generated or read, never downloaded."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.induction import Induction
from data.listops import ListOps
from data.mqar import Mqar
from data.selective_copying import SelectiveCopying
from data.task import SPLITS, Task
from data.text import Text
from model.errors import UserError, choose, closest

TASKS: dict[str, type[Task]] = {
    "mqar": Mqar,
    "selective_copying": SelectiveCopying,
    "induction": Induction,
    "listops": ListOps,
    "text": Text,
}

__all__ = ["SPLITS", "TASKS", "Task", "build"]


def build(name: str, section: Mapping[str, Any]) -> Task:
    """The task of that name, with the fields in its section; the others keep their defaults."""
    task = choose("task", name, TASKS)
    defaults = {field.name: field.default for field in dataclasses.fields(task)}
    for key, value in section.items():
        if key not in defaults:
            fields = ", ".join(defaults)
            raise UserError(f"unknown field data.{name}.{key}; choose from {fields}{closest(key, defaults)}")
        want = type(defaults[key])
        if type(value) is not want and (want, type(value)) != (float, int):
            raise UserError(
                f"data.{name}.{key} is {value!r}; allowed: {want.__name__}; the default is {defaults[key]!r}"
            )
    return task(**section)
