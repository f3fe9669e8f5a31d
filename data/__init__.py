"""Tasks: every example a pure function of (seed, split, index), generated or read, never downloaded."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.adding import Adding
from data.dates import Dates
from data.imdb import Imdb
from data.induction import Induction
from data.listops import ListOps
from data.matching import Matching
from data.mqar import Mqar
from data.pathfinder import Pathfinder
from data.pixels import LraImage, PermutedMnist, SequentialCifar, SequentialFashion, SequentialMnist
from data.retrieval import Aan, WikiLinks
from data.running_sum import RunningSum
from data.selective_copying import SelectiveCopying
from data.shape_questions import ShapeQuestions
from data.shapes import Shapes
from data.strings import Copy, Reverse, Sort
from data.task import SPLITS, Task
from data.text import Text
from data.translate import Translate
from model.errors import UserError, choose, closest

TASKS: dict[str, type[Task]] = {
    "mqar": Mqar,
    "selective_copying": SelectiveCopying,
    "induction": Induction,
    "listops": ListOps,
    "running_sum": RunningSum,
    "text": Text,
    "adding": Adding,
    "shapes": Shapes,
    "shape_questions": ShapeQuestions,
    "matching": Matching,
    "copy": Copy,
    "reverse": Reverse,
    "sort": Sort,
    "dates": Dates,
    "translate": Translate,
    "smnist": SequentialMnist,
    "psmnist": PermutedMnist,
    "sfashion": SequentialFashion,
    "scifar": SequentialCifar,
    "image": LraImage,
    "imdb": Imdb,
    "pathfinder": Pathfinder,
    "aan": Aan,
    "wiki_links": WikiLinks,
}

__all__ = ["SPLITS", "TASKS", "Task", "build"]


def build(name: str, section: Mapping[str, Any]) -> Task:
    """The task of that name, with the fields in its section; the others keep their defaults."""
    task = choose("task", name, TASKS)
    fields = [field.name for field in dataclasses.fields(task)]
    for key in section:
        if key not in fields:
            raise UserError(f"unknown field data.{name}.{key}; choose from {', '.join(fields)}{closest(key, fields)}")
    return task(**section)
