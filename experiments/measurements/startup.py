"""How long a command takes to its first step, and how much the compilation cache saves next time."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from experiments.running.folders import last_line
from experiments.running.runs import RunSpec, Value, command, texts
from model.errors import UserError
from train import config as configs


def measure(spec: str, overrides: Mapping[str, Value]) -> dict:
    """Seconds with an empty compilation cache, then with the one that this left."""
    run = RunSpec(spec, {**overrides, "log_every": 1}, {})
    configs.check(configs.load(run.config, texts(run)))
    with tempfile.TemporaryDirectory() as folder:
        first, second = (first_step(run, Path(folder), name) for name in ("first", "second"))
    return {"first_s": first, "second_s": second, "ratio": second / first}


def first_step(run: RunSpec, folder: Path, name: str) -> float:
    """Seconds from the command to the first line of metrics."""
    metrics, log = folder / name / "metrics.jsonl", folder / f"{name}.txt"
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}

    def reached() -> bool:
        return metrics.exists() and metrics.stat().st_size > 0

    start = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command(run, folder / name), env=env, stdout=file, stderr=file)
    while process.poll() is None and not reached():
        time.sleep(0.005)
    seconds = time.perf_counter() - start
    process.kill()
    process.wait()
    if not reached():
        raise UserError(f"{run.config} did not reach its first step: {last_line(log)}")
    return seconds
