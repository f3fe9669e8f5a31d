"""The smallest real run: 100 steps of recall in well under a minute on a CPU.

    python -m train --config=configs/debug.py --workdir=runs/debug

Takes `arch=...` as its argument: `--config=configs/debug.py:arch=mamba`. Reaches no score worth a table.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="attention")
    c = base.get_config()
    archs.use(c, arg.arch)
    c.steps, c.batch_size = 100, 16
    c.log_every, c.eval_every, c.checkpoint_every, c.eval_batches = 1, 50, 20, 2
    c.optim.warmup = 10
    c.model.width = 32
    c.data.task = "mqar"
    c.data.mqar = dict(length=32, vocab_size=64, n_pairs=4)
    return c
