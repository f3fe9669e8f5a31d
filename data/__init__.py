"""Tasks: every example a pure function of (seed, split, index), generated or read, never downloaded."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from data.adding import Adding
from data.common_words import CommonWords
from data.copying import Copying
from data.dates import Dates
from data.delayed_recall import DelayedRecall
from data.imdb import Imdb
from data.induction import Induction
from data.listops import ListOps
from data.lookup import Lookup
from data.mad_compression import MadCompression
from data.mad_fuzzy_recall import MadFuzzyRecall
from data.mad_memorization import MadMemorization
from data.mad_recall import MadNoisyRecall, MadRecall
from data.mad_selective_copying import MadSelectiveCopying
from data.majority import Majority
from data.matching import Matching
from data.mqar import Mqar
from data.mqar_mix import MqarMix
from data.needles import MultiKey, MultiQuery, MultiValue, Needle, Passkey
from data.noise import Noise
from data.pathfinder import Pathfinder
from data.permutations import Permutations
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
from data.variable_tracking import VariableTracking
from model.errors import UserError, choose, closest

TASKS: dict[str, type[Task]] = {
    "mqar": Mqar,
    "mqar_mix": MqarMix,
    "selective_copying": SelectiveCopying,
    "copying": Copying,
    "induction": Induction,
    "lookup": Lookup,
    "delayed_recall": DelayedRecall,
    "mad_recall": MadRecall,
    "mad_fuzzy_recall": MadFuzzyRecall,
    "mad_noisy_recall": MadNoisyRecall,
    "mad_selective_copying": MadSelectiveCopying,
    "mad_compression": MadCompression,
    "mad_memorization": MadMemorization,
    "listops": ListOps,
    "running_sum": RunningSum,
    "permutations": Permutations,
    "majority": Majority,
    "text": Text,
    "noise": Noise,
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
    "passkey": Passkey,
    "needle": Needle,
    "multi_key": MultiKey,
    "multi_value": MultiValue,
    "multi_query": MultiQuery,
    "variable_tracking": VariableTracking,
    "common_words": CommonWords,
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
