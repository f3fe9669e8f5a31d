"""How fast a config trains, and in how much memory: a few steps in a process of their own, and a row as of a run.

    python -m experiments.measurements.steps --config=configs/lra_speed.py:arch=mamba2 --workdir=runs/speed

`steps` of the config are a round; the fastest of three counts. Memory is the most that the device had in use, where it
counts that, and else what the compiled step says it needs.
"""

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from data import pipeline
from experiments.measurements.overhead import step_alone
from experiments.measurements.speed import compiled_bytes
from model.errors import UserError
from model.settings import Name
from train import cli
from train import config as configs
from train.revision import revision
from train.run import Run, prepare
from train.sharding import put_batch
from train.workdir import open_workdir, write_json

ROUNDS = 3
GB = 1e9

CONFIG = cli.flag("config", Name, None, "A config file, FILE.py[:key=value,...] or a run's config.json.")
WORKDIR = cli.flag("workdir", Name, None, "The folder for config.json and result.json.")
flags.declare_key_flag("override")


def measure(run: Run) -> dict[str, Any]:
    """Steps a second, and gigabytes on one device, and who counted these."""
    c = run.config
    batch = put_batch(pipeline.Batch(run.task, c.data.seed, "train", c.batch_size, 0), run.batch_sharding)
    step = run.train_step.lower(run.abstract, batch).compile()
    alone = step_alone(dataclasses.replace(run, train_step=step), c.steps)
    next(alone)  # the first steps find nothing warm
    seconds = min(next(alone) for _ in range(ROUNDS))
    needed = compiled_bytes(step)
    counted = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "memory_counted": "by the device" if counted else "by the compiler",
        "metrics": {
            "steps_per_s": 1 / seconds,
            "memory_gb": (counted or needed) / GB,
            "compiled_gb": needed / GB,
        },
    }


def row(config: ConfigDict) -> dict[str, Any]:
    run = prepare(config)
    found, device = measure(run), jax.devices()[0]
    return {
        "status": "finished",
        "config_hash": configs.digest(config),
        "revision": revision(),
        "data_fingerprint": run.task.fingerprint(config.data.seed),
        "task": config.data.task,
        "length": run.task.length,
        "mixers": list(config.model.mixers),
        "seed": config.seed,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "steps": config.steps,
        "steps_per_s": round(found["metrics"]["steps_per_s"], 2),
        "params": run.params,
        "state_bytes": run.model.state_bytes(run.task.length),
        "baselines": {},
        **found,
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; flags begin with --")
    for flag in (CONFIG, WORKDIR):
        if not flag.value:
            raise UserError(f"--{flag.name} is missing; e.g. --config=configs/lra_speed.py --workdir=runs/speed")
    config = configs.load(CONFIG.value, cli.overrides())
    cli.use_compilation_cache()
    with open_workdir(WORKDIR.value) as folder:
        write_json(folder / "config.json", config.to_dict())
        made = row(config)
        write_json(folder / "result.json", made)
    steps, memory = (made["metrics"][key] for key in ("steps_per_s", "memory_gb"))
    print(f"{steps:.3g} steps/s, {memory:.3g} GB {made['memory_counted']}")


if __name__ == "__main__":
    cli.run(main)
