"""Selective copying: tokens scattered among noise, to be reproduced in order (Mamba, section 4.1.1).

    python -m train --config=configs/selective_copying.py:arch=mamba --workdir=runs/copying

Feeds the table `selective_copying`. `size=paper` is the published setting, 4,096 tokens and 400,000 steps; `size=small`
has 256 tokens, for one accelerator; `size=smoke` shows on a CPU that it runs.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(task=dict(length=32, n_tokens=4), steps=300, lr=4e-3, schedule="cosine"),
    "small": dict(task=dict(length=256, n_tokens=16), steps=4000, lr=2e-3, schedule="cosine"),
    "paper": dict(task=dict(length=4096, n_tokens=16), steps=400_000, lr=1e-4, schedule="constant"),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="mamba", size="small")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use_bare(c, arg.arch)
    c.data.task = "selective_copying"
    c.data.selective_copying = dict(vocab_size=16, **size["task"])
    c.steps, c.batch_size = size["steps"], 64
    c.eval_every = c.checkpoint_every = max(100, c.steps // 20)
    c.target = 0.999
    c.optim.lr, c.optim.schedule = size["lr"], size["schedule"]
    c.optim.warmup, c.optim.weight_decay = min(200, c.steps // 6), 0.0
    return c
