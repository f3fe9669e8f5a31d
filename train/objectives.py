"""The objectives there are, by the names of `objective.kind`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from data import Task
from model.build import Model
from model.errors import UserError, choose
from train.objective import Objective


@dataclass(frozen=True)
class TaskTargets(Objective):
    """The task's own targets: the next token, a class, an answer at each place where it asks."""

    name: ClassVar[str] = "task"
    likelihood: ClassVar[bool] = True

    def check_model(self, model: Model) -> None:
        if self.task.next_token and model.sees_ahead:
            raise UserError(
                f"task {self.task.name!r} asks for the next token, and this model sees it; allowed: model.causal=True "
                "and no prefix"
            )


OBJECTIVES: dict[str, type[Objective]] = {one.name: one for one in (TaskTargets,)}


def build(section: Mapping[str, Any], task: Task) -> Objective:
    """The objective that a config's section names, of a task."""
    kind = section["kind"]
    return choose("objective", kind, OBJECTIVES)(task, section["label_smoothing"], **section.get(kind, {}))
