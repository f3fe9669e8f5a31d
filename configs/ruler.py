"""x

python -m train --config=configs/ruler.py:task=needle,arch=mamba2 --workdir=runs/needle
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(
        length=64,
        longest=512,
        steps=600,
        batch=32,
        lr=4e-3,
        tasks=dict(
            passkey=dict(digits=3, names=16, values=16, fillers=16),
            needle=dict(value_words=2, names=16, values=16, fillers=16),
            multi_key=dict(names=16, values=16, fillers=16),
            multi_value=dict(n_values=2, names=16, values=16, fillers=16),
            multi_query=dict(names=16, values=16, fillers=16),
            variable_tracking=dict(n_hops=2, n_chains=2, names=16, values=16, fillers=16),
            common_words=dict(n_common=2, common_times=10, other_times=1, names=512, values=16, fillers=16),
        ),
    ),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="needle", arch="attention", size="smoke")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use(c, arg.arch)
    c.data.task = arg.task
    c.data[arg.task] = dict(length=size["length"], **choose("task", arg.task, size["tasks"]))
    c.test_lengths = tuple(size["length"] * 2**i for i in range((size["longest"] // size["length"]).bit_length()))
    c.steps, c.batch_size = size["steps"], size["batch"]
    c.eval_every = c.checkpoint_every = max(100, c.steps // 10)
    c.optim.lr, c.optim.warmup, c.optim.weight_decay = size["lr"], min(200, c.steps // 6), 0.0
    return c
