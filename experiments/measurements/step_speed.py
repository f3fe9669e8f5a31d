"""How long a training step takes, in how much memory, and how long it is compiled: ours in several forms, and a peer's.

The peer is Hugging Face's Llama of the same size, where torch and transformers are installed: compiled on a GPU, with a
fused AdamW, and as it comes on a CPU.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from data import pipeline
from experiments.measurements import torch_step
from experiments.measurements.overhead import step_alone
from experiments.measurements.sheet import Sheet
from experiments.measurements.speed import COMPILING, compiled_bytes, compiled_twice
from model.errors import UserError, out_of_memory
from train import config as configs
from train.run import prepare
from train.sharding import put_batch

Row = dict[str, Any]
GIB = 2**30

FORMS = {  # of the stack of layers: what is asked for beside the config
    "unrolled": [("model.scan", "False")],
    "looped": [("model.scan", "True")],
    "looped, matmuls kept": [("model.scan", "True"), ("model.kept", "matmuls")],
    "looped, nothing kept": [("model.scan", "True"), ("model.kept", "nothing")],
}
# case, arguments of its config, and the forms in which it is measured
CASES = {
    "gpu": [
        ("attention", "configs/step_speed.py:rows=16,length=2048", FORMS),
        ("attention", "configs/step_speed.py:rows=2,length=16384", ("unrolled", "looped")),
        ("mamba", "configs/step_speed.py:arch=mamba,rows=16,length=2048", ("unrolled", "looped")),
        ("mamba2", "configs/step_speed.py:arch=mamba2,rows=16,length=2048", ("unrolled", "looped")),
    ],
    "cpu": [
        ("attention", "configs/step_speed.py:size=64,rows=64,length=64", ("looped",)),
        ("attention", "configs/step_speed.py:size=128,rows=16,length=256", ("looped",)),
        ("attention", "configs/step_speed.py:size=128,rows=4,length=1024", ("looped",)),
        ("mamba", "configs/step_speed.py:arch=mamba,size=64,rows=64,length=64", ("looped",)),
    ],
}
STEPS = {"gpu": 10, "cpu": 3}  # of a round
SHEET = Sheet(
    {"case": "case", "batch": "batch", "length": "length", "width": "width", "contender": "contender"},
    {"step_ms": ("ms a step", ".1f"), "tokens_per_s": ("tokens/s", ",.0f"), "memory_gib": ("GiB", ".1f"), **COMPILING},
)


def measure(rounds: int) -> Iterator[Row]:
    """A row per case and form; one that breaks down says so in its row.

    Peers come last: whatever they do to the device, ours are measured by then.
    """
    place = "cpu" if jax.default_backend() == "cpu" else "gpu"
    cases = [(case, configs.load(spec), spec, forms) for case, spec, forms in CASES[place]]
    entered = [
        (case, config, f"longview {form}", partial(ours, spec, FORMS[form], STEPS[place]))
        for case, config, spec, forms in cases
        for form in forms
    ]
    entered += [
        (case, config, name, enter)
        for case, config, _, _ in cases
        if case == "attention"
        for name, enter in torch_step.contenders(config, STEPS[place]).items()
    ]
    for case, config, name, enter in entered:
        rows, length = config.batch_size, config.data.noise.length
        setting = dict(case=case, batch=rows, length=length, width=config.model.width, contender=name)
        yield setting | row_of(enter, rounds, rows * length)
        gc.collect()  # what it held on the device


def row_of(enter: Callable[[], tuple[Iterator[float], Row]], rounds: int, tokens: int) -> Row:
    """`enter` gives seconds a step, again and again, and what else there is to say."""
    try:
        seconds, found = enter()
        next(seconds)  # the first steps find nothing warm
        best = min(next(seconds) for _ in range(rounds))
    except UserError:
        raise
    except Exception as error:  # a peer that cannot compile, or a form that does not fit
        return dict(error=out_of_memory(error) or f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return dict(step_ms=1e3 * best, tokens_per_s=tokens / best) | found


def ours(spec: str, form: list[tuple[str, str]], steps: int) -> tuple[Iterator[float], Row]:
    run = prepare(configs.load(spec, form))
    c = run.config
    batch = put_batch(pipeline.Batch(run.task, c.data.seed, "train", c.batch_size, 0), run.batch_sharding)
    step, found = compiled_twice(lambda: run.train_step.lower(run.abstract, batch).compile())
    found |= dict(memory_gib=compiled_bytes(step) / GIB, params=run.params)
    return step_alone(replace(run, train_step=step), steps), found
