"""A model made from other people's weights, asked as a run's checkpoint is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from data.task import Example, Task
from eval.restore import Restored
from model.asked import Asked, Image, Vectors
from model.errors import UserError
from model.paths import as_tree, by_path
from model.weights.folder import fit, open_weights
from model.weights.names import stacks
from train import config as configs
from train.run import prepare

NO_TASK = "weights come without a task; name one, as --config.data.task=text --config.data.text.path=FILE"


@dataclass(frozen=True)
class Prompts(Task):
    """What the weights take, given as prompts: where no task is named, nothing else is asked of them."""

    what: Asked

    name: ClassVar[str] = "prompts"

    @property
    def kind(self) -> str:
        return "classify" if self.what.n_classes else "lm"

    @property
    def vocab_size(self) -> int:
        return self.what.vocab_size

    @property
    def n_classes(self) -> int:
        return self.what.n_classes

    @property
    def tail(self) -> int:
        return self.what.tail

    @property
    def inputs(self) -> Vectors | Image | None:
        return self.what.inputs

    @property
    def length(self) -> int:
        return 1 + self.tail

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        if split != "train":  # of which one row says what shapes the model is built for
            raise UserError(f"{NO_TASK}, or give a --prompt")
        image, asks = self.inputs, () if self.n_classes else (self.length,)
        if image is None:
            inputs = np.zeros(self.length, np.int32)
        else:
            inputs = np.zeros((image.height, image.width, image.channels), np.float32)
        return {"inputs": inputs, "targets": np.zeros(asks, np.int32), "weights": np.zeros(asks, np.float32)}

    def resized(self, length: int) -> dict[str, Any]:
        raise UserError(NO_TASK)

    def baselines(self) -> dict[str, float]:
        return {}


def imported(path: str, overrides: Iterable[tuple[str, str]] = ()) -> Restored:
    """The model of a folder of safetensors, on a task if the overrides name one whose vocabulary is no larger."""
    weights = open_weights(path)
    file = str(weights.folder / "config.json")
    trained = configs.resolve({"model": weights.settings}, file=file)
    overrides = dict(overrides)
    config = configs.resolve({"model": weights.settings}, overrides.items(), file)
    task = None if "data.task" in overrides else Prompts(weights.asked)
    run = prepare(config, task)
    like = by_path(run.abstract.params)
    fitted = fit(weights, like, stacks(config.model.to_dict()))
    params = as_tree({path: fitted.load(path, like[path]) for path in fitted.paths})
    return Restored(folder=weights.folder, trained=trained, run=run, step=0, params=params)
