"""Whether a run has the same bits again, and after it was killed at random moments and resumed; and what that costs.

Every run is `python -m train` in a process of its own, with a compilation cache of its own: what is compiled anew must
give the same bits too. This process keeps to the CPU and leaves the accelerator to the runs.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import jax
import numpy as np

from configs.archs import ARCHS
from experiments.measurements.sheet import Sheet
from experiments.running import folders
from experiments.running.runs import RunSpec, Value, command, texts, with_argument
from model.errors import UserError, choose
from train import checkpoint, log
from train import config as configs

# One of each kind of kernel that a GPU has: what `bench determinism` tries where nothing is named.
KINDS = ("attention", "mamba2", "s4d", "mamba", "hybrid", "gla", "deltanet", "kda", "rwkv7")
SETTINGS: Mapping[str, Value] = {"model.width": 128, "model.dtype": "bfloat16", "steps": 200, "checkpoint_every": 10}
SAME = "identical"


def specs(names: str | None = None) -> list[str]:
    """Configs of architectures by their names, with commas between them; None: of one of each kind."""
    archs = KINDS if names is None else [choose("arch", name.strip(), set(ARCHS)) for name in names.split(",")]
    return [with_argument("configs/debug.py", {"arch": arch}) for arch in archs]


def measure(spec: str, overrides: Mapping[str, Value], kills: int) -> dict:
    """One row: an undisturbed run against another, and against one that was killed `kills` times.

    A config that cannot be run says so in its row, as `error`.
    """
    jax.config.update("jax_platforms", "cpu")
    run = RunSpec(spec, {**overrides, "log_every": 1}, {})
    configs.check(configs.load(spec, texts(run)))
    with tempfile.TemporaryDirectory() as folder:
        calm, again, killed, free = (Path(folder, name) for name in ("calm", "again", "killed", "free"))
        try:
            finish(run, calm)
            finish(run, again)
            finish(RunSpec(spec, {**run.overrides, "deterministic": False}, {}), free)
            result = folders.read_json(calm / "result.json")
            moments = disturb(run, killed, result["steps"], kills, random.Random())
            finish(run, killed)
        except UserError as error:
            return {"config": spec, "identical": False, "error": str(error), "device": None}
        repeated, resumed = compare(calm, again), compare(calm, killed)
        config = folders.read_json(calm / "config.json")
        at_will = folders.read_json(free / "result.json")["steps_per_s"]
    return {
        "config": spec,
        **{key: config["model"][key] for key in ("width", "layers", "dtype")},
        "length": result["length"],
        "steps": result["steps"],
        "kills": len(moments),
        "killed_at": moments,
        "identical": repeated == resumed == SAME,
        "repeated": repeated,
        "resumed": resumed,
        "steps_per_s": result["steps_per_s"],
        "not_deterministic_steps_per_s": at_will,
        "device": result["device"],
        "jax": result["jax"],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def finish(run: RunSpec, folder: Path) -> None:
    """Runs to the end."""
    with started(run, folder) as process:
        process.wait()
    if process.returncode or not folders.finished(folder):
        raise UserError(f"{run.config} did not finish: {folders.last_line(output(folder))}")


def disturb(run: RunSpec, folder: Path, steps: int, kills: int, rng: random.Random) -> list[int]:
    """Starts the run again and again, and kills it at random moments; the last step logged at each of them.

    The moments are spread over the run. Should it come to its end first, there are fewer of them.
    """
    moments: list[int] = []
    for left in range(kills, 0, -1):
        last = reached(folder)
        goal = last + rng.randint(1, max(1, 2 * (steps - last) // (left + 1)))
        with started(run, folder) as process:
            while process.poll() is None and reached(folder) < goal:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))  # a step, a save or an evaluation later
            if process.poll() is not None:
                break
            process.kill()
        moments.append(reached(folder))
    return moments


def reached(folder: Path) -> int:
    return folders.position(folder).get("step", 0)


def output(folder: Path) -> Path:
    return folder.with_suffix(".txt")


@contextmanager
def started(run: RunSpec, folder: Path) -> Iterator[subprocess.Popen]:
    """The run's process, which does not outlive the block."""
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder.with_suffix(".cache"))}
    with output(folder).open("w") as file:
        process = subprocess.Popen(
            command(run, folder), env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def compare(one: Path, other: Path) -> str:
    """`identical`, or where two runs part: the first step with another loss, else an array of the last checkpoint."""
    for a, b in zip_longest(losses(one), losses(other)):
        if a != b:
            return f"from step {min(pair[0] for pair in (a, b) if pair)}"
    a, b = arrays(one), arrays(other)
    differing = [path for path in a | b if a.get(path) != b.get(path)]
    return f"checkpoint: {differing[0]}" if differing else SAME


def losses(folder: Path) -> list[tuple[int, str]]:
    """Every step's loss, to the bit, in the order of the log."""
    return [
        (line["step"], float(line["loss"]).hex())
        for line in log.read_metrics(folder / "metrics.jsonl")
        if "loss" in line
    ]


def arrays(folder: Path) -> dict[str, str]:
    """The last checkpoint: a digest of every array of the run's state."""
    directory = folder / "checkpoints"
    step = checkpoint.steps(directory)[-1]
    leaves = checkpoint.read_manifest(checkpoint.step_folder(directory, step))["leaves"]
    state = checkpoint.load(directory, {path: struct(text) for path, text in leaves.items()}, step)
    digests = {path: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for path, x in state.items()}
    return {"step": str(step)} | digests


def struct(text: str) -> jax.ShapeDtypeStruct:
    """What a manifest says of an array, such as float32[2,3]."""
    dtype, shape = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()
    return jax.ShapeDtypeStruct(tuple(json.loads(f"[{shape}]")), jax.numpy.dtype(dtype))


def sentence(row: Mapping) -> str:
    if "error" in row:
        return f"{row['config']}: {row['error']}"
    at = ", ".join(map(str, row["killed_at"])) or "none"
    rates = row["steps_per_s"], row["not_deterministic_steps_per_s"]
    # A run that is over before its clock has seen enough has no rate.
    rate = "" if None in rates else f" at {rates[0]} a second, {rates[1]} if not deterministic"
    return (
        f"{row['config']}: {row['steps']} steps{rate}; run again: {row['repeated']}; "
        f"killed after steps {at} and resumed: {row['resumed']}"
    )


SHEET = Sheet(
    {"config": "config"},
    {
        "width": ("width", ""),
        "layers": ("layers", ""),
        "length": ("length", ""),
        "dtype": ("dtype", ""),
        "steps": ("steps", ""),
        "kills": ("kills", ""),
        "repeated": ("run again", ""),
        "resumed": ("killed and resumed", ""),
        "steps_per_s": ("steps/s", ""),
        "not_deterministic_steps_per_s": ("steps/s, deterministic=False", ""),
    },
)
