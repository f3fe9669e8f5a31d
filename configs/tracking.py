"""State tracking: what all tokens so far amount to, trained on short rows and tested on long ones.

    python -m train --config=configs/tracking.py:task=s5,arch=mamba --workdir=runs/tracking

Tasks: parity and z60, sums modulo 2 and 60; s3, a5 and s5, products of permutations, of which a5 (60 elements, like
z60) and s5 are not solvable ("The Illusion of State in State-Space Models", arXiv:2404.08819: what linear recurrences
and attention of a fixed depth should not be able to track, however long they train, and an LSTM can). Feeds the table
`tracking`. `size=small`, for one accelerator, trains on 64 tokens and tests on up to 1,024; `size=smoke` shows on a
CPU that it runs. `window` cuts what each layer sees (configs/window.py).
"""

from ml_collections import ConfigDict

from configs import archs, base, window
from configs.argument import parse
from model.errors import choose

TASKS = {
    "parity": ("running_sum", dict(modulus=2)),
    "z60": ("running_sum", dict(modulus=60)),
    "s3": ("permutations", dict(group="S3")),
    "a5": ("permutations", dict(group="A5")),
    "s5": ("permutations", dict(group="S5")),
}
SIZES = {
    "smoke": dict(length=8, lengths=(8, 32), steps=100, batch=32, width=32, lr=4e-3),
    "small": dict(length=64, lengths=(64, 128, 256, 512, 1024), steps=10_000, batch=128, width=128, lr=1e-3),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="s5", arch="mamba", size="small", window=0)
    size = choose("size", arg.size, SIZES)
    name, fields = choose("task", arg.task, TASKS)
    c = base.get_config()
    archs.use(c, arg.arch)
    c.model.width = size["width"]
    archs.use_layers(c, 2)
    c.data.task = name
    c.data[name] = dict(length=size["length"], **fields)
    c.test_lengths = size["lengths"]
    c.steps, c.batch_size, c.eval_batches = size["steps"], size["batch"], 4
    c.eval_every = c.checkpoint_every = 0 if arg.size == "smoke" else c.steps // 20
    c.target, c.test_at = 0.999, "best"
    c.optim.lr, c.optim.warmup, c.optim.weight_decay = size["lr"], c.steps // 10, 0.01
    window.use(c, arg.window)
    return c
