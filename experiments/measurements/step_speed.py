"""How long a training step takes, in how much memory, and how long it is compiled: ours in several forms, and a peer's.

The peer is Hugging Face's Llama of the same size, where torch and transformers are installed: compiled on a GPU, with a
fused AdamW, and as it comes on a CPU.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from data import pipeline
from experiments.measurements import torch_step
from experiments.measurements.overhead import step_alone
from experiments.measurements.part import ALL, Part
from experiments.measurements.sheet import Sheet
from experiments.measurements.speed import COMPILING, compiled_bytes, compiled_twice, place
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


def settings() -> Iterator[Row]:
    return (setting for setting, _, _ in cases())


def cases() -> Iterator[tuple[Row, str, tuple[str, ...]]]:
    """What names the rows of a case, its config, and the forms in which it is measured."""
    for case, spec, forms in CASES[place()]:
        c = configs.load(spec)
        yield dict(case=case, batch=c.batch_size, length=c.data.noise.length, width=c.model.width), spec, tuple(forms)


def measure(rounds: int, part: Part = ALL) -> Iterator[Row]:
    """A row per case and form; one that breaks down says so in its row.

    Peers come last: whatever they do to the device, ours are measured by then.
    """
    steps, wanted = STEPS[place()], [case for case in cases() if part(case[0])]
    entered = [
        (setting, f"longview {form}", partial(ours, spec, FORMS[form], steps))
        for setting, spec, forms in wanted
        for form in forms
    ]
    entered += [
        (setting, name, enter)
        for setting, spec, _ in wanted
        if setting["case"] == "attention"
        for name, enter in torch_step.contenders(configs.load(spec), steps).items()
    ]
    for setting, name, enter in entered:
        row = setting | dict(contender=name)
        if part(row):
            yield row | row_of(enter, rounds, row["batch"] * row["length"])
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
