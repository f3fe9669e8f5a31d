"""A model made from other people's weights, asked as a run's checkpoint is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from data.task import Example, Task
from eval.restore import Restored
from model.errors import UserError
from model.paths import as_tree, by_path
from model.settings import Dim, Length
from model.weights.folder import fit, open_weights
from train import config as configs
from train.run import prepare


@dataclass(frozen=True)
class Prompts(Task):
    """Token ids, given as prompts: what is asked of weights where no task is named."""

    vocab_size: Dim = 1
    length: Length = 1

    name: ClassVar[str] = "prompts"
    kind: ClassVar[str] = "lm"

    def example(self, split: str, index: int, rng: np.random.Generator) -> Example:
        if split != "train":  # of which one row says what shapes the model is built for
            raise UserError(
                "weights come without a task; name one, as --config.data.task=text --config.data.text.path=FILE, or "
                "give a --prompt"
            )
        return {
            "inputs": np.zeros(self.length, np.int32),
            "targets": np.zeros(self.length, np.int32),
            "weights": np.zeros(self.length, np.float32),
        }

    def baselines(self) -> dict[str, float]:
        return {}


def imported(path: str, overrides: Iterable[tuple[str, str]] = ()) -> Restored:
    """The model of a folder of safetensors, on a task if the overrides name one whose vocabulary is no larger."""
    weights = open_weights(path)
    file = str(weights.folder / "config.json")
    trained = configs.resolve({"model": weights.settings}, file=file)
    overrides = dict(overrides)
    config = configs.resolve({"model": weights.settings}, overrides.items(), file)
    task = None if "data.task" in overrides else Prompts(config.model.vocab_size)
    run = prepare(config, task)
    like = by_path(run.abstract.params)
    fitted = fit(weights, like, config.model.layers, len(config.model.mixers))
    params = as_tree({path: fitted.load(path, like[path]) for path in fitted.paths})
    return Restored(folder=weights.folder, trained=trained, run=run, step=0, params=params)
