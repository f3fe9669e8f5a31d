"""What a suite leaves behind: a JSON file in the run's folder that says what was measured, and on what; and tables."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Column, Table

from eval.restore import Restored
from model.errors import UserError
from train import config as configs
from train.revision import revision
from train.workdir import write_json

PROMPT = "prompt"  # in the place of a split


def provenance(restored: Restored, split: str) -> dict[str, Any]:
    """Where numbers come from; `changes` holds the config keys that were overridden: [trained, evaluated].

    A prompt is none of the task's data, and weights without a task have no others.
    """
    config, task = restored.run.config, restored.run.task
    return {
        "config_hash": configs.digest(restored.trained),
        "changes": {key: list(pair) for key, pair in configs.changes(restored.trained, config).items()},
        "revision": revision(),
        "task": task.name,
        "data_fingerprint": None if split == PROMPT else task.fingerprint(config.data.seed),
        "split": split,
        "step": restored.step,
        "seed": config.seed,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write(restored: Restored, suite: str, split: str, report: dict[str, Any]) -> Path:
    """Writes `WORKDIR/eval/SUITE-SPLIT-STEP.json`, with a hash appended if config or data are not as in training."""
    config = restored.run.config
    other = f"-{configs.digest(config)}" if configs.changes(restored.trained, config) else ""
    other += f"-{restored.other_data[:8]}" if restored.other_data else ""
    path = restored.folder / "eval" / f"{suite}-{split}-{restored.step}{other}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, finite(report))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path


def columns(*names: str | Column, texts: int = 1) -> Table:
    """A table to be filled; what comes after the first columns, of texts, are numbers."""
    table = Table(*names, box=box.SIMPLE_HEAD)
    for column in table.columns[texts:]:
        column.justify = "right"
    return table


def changed(report: dict[str, Any]) -> str:
    """What was asked otherwise than it was trained, to end a headline."""
    return "".join(f", {key}={new}" for key, (_, new) in report["changes"].items())


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for a number there is not."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
