"""ListOps: the value of nested expressions, by the Long Range Arena's law.

    python -m train --config=configs/listops.py:size=short,arch=attention --workdir=runs/listops

`size=short` keeps trees of 10 to 100 tokens, minutes on a CPU; `size=lra` is the benchmark, up to 2,000 tokens, for an
accelerator. Print the baselines beside any score: much of what is published is near the rate of a model that reads
the first operator and nothing else. Rows are read forward, but by models that learn masked tokens first.

`window` cuts what each layer sees (configs/window.py), `start` is for self-pretraining (configs/pretraining.py).
"""

from ml_collections import ConfigDict

from configs import archs, base, longest, pretraining, window
from configs.argument import parse
from model.errors import choose

SIZES = {
    "short": dict(length=100, max_depth=6, min_length=10, max_length=100),
    "lra": dict(length=2000, max_depth=10, min_length=500, max_length=2000),
}
MASKED = 0.1  # of a row in self-pretraining


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, size="short", arch="attention", start="scratch", window=0)
    c = base.get_config()
    archs.use(c, arg.arch)
    c.data.task = "listops"
    c.data.listops = choose("size", arg.size, SIZES)
    longest.use(c, c.data.listops.length)
    c.steps, c.batch_size, c.eval_batches = 5000, 32, 0
    c.eval_every, c.checkpoint_every = 1000, 1000
    c.optim.warmup, c.optim.weight_decay = 500, 0.1
    window.use(c, arg.window)
    if arg.start.endswith("masked"):
        archs.read_bidirectionally(c)
    pretraining.use(c, arg.start, tokens=True, rate=MASKED)
    return c
