"""Gradient and accuracy against distance: one token to keep among noise, from 1 to 255 tokens back.

    python -m train --config=configs/distance.py:arch=lstm --workdir=runs/distance
    python -m eval --workdir=runs/distance --suite=reach

Trained at all distances mixed, then tested on rows of 2 to 1,024 tokens, of which each asks for the first. The
objective `reach` has tests also tell the decimal logarithm of the norm of the answer's gradient by that first token:
what every textbook says vanishes in an RNN, and not in attention. `trained=no` stops before the first update, so that
this is told of fresh parameters; `--suite=reach` has the gradients at all distances of one run. Feeds the table
`distance`. `size=small` is for one accelerator; `size=smoke`, with rows of 32 tokens, shows on a CPU that it runs.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(length=32, lengths=(4, 16, 64), steps=100, batch=32, width=32, lr=4e-3),
    "small": dict(length=256, lengths=tuple(2**i for i in range(1, 11)), steps=6000, batch=64, width=128, lr=1e-3),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="lstm", trained="yes", size="small")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use(c, arg.arch)
    c.model.width = size["width"]
    archs.use_layers(c, 2)
    c.data.task = "delayed_recall"
    c.data.delayed_recall = dict(length=size["length"], vocab_size=16)
    c.objective.kind = "reach"
    c.test_lengths = size["lengths"]
    c.steps, c.batch_size, c.eval_batches = size["steps"], size["batch"], 4 if arg.size == "smoke" else 16
    c.eval_every = c.checkpoint_every = 0 if arg.size == "smoke" else c.steps // 20
    c.optim.lr, c.optim.warmup, c.optim.weight_decay = size["lr"], c.steps // 10, 0.01
    if choose("trained", arg.trained, {"yes": True, "no": False}) is False:
        c.steps, c.optim.lr, c.optim.warmup = 1, 0.0, 0
    return c
