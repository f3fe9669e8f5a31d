"""Induction heads: what followed this token last time? Trained short, tested long (Mamba, section 4.1.2).

    python -m train --config=configs/induction_heads.py:arch=mamba --workdir=runs/induction

Feeds the table `induction_heads`. `size=paper` is the published setting, 204,800 steps of 8 examples of 256 tokens
by models of width 64, and for attention 409,600 and width 128, at the better of two rates, tested on up to 2^20;
`size=small`, for one accelerator, takes the same length in fewer, larger steps and tests up to 2^14; `size=smoke` shows
on a CPU that it runs.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(length=32, longest=256, steps=300, batch=32, lr=4e-3, schedule="cosine"),
    "small": dict(length=256, longest=2**14, steps=8000, batch=64, lr=1e-3, schedule="cosine"),
    "paper": dict(length=256, longest=2**20, steps=204_800, batch=8, lr=1e-3, schedule="constant"),
}
ATTENTION_LONGEST = 2**14  # as published: attention ran out of memory beyond
ATTENTION_PAPER = dict(width=128, longer=2)  # and was wider, and trained twice as long


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="mamba", size="small")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use_bare(c, arg.arch)
    attends = "attention" in c.model.mixers
    c.data.task = "induction"
    c.data.induction = dict(length=size["length"], vocab_size=16)
    first = size["length"] // 4
    longest = min(size["longest"], ATTENTION_LONGEST) if attends else size["longest"]
    c.test_lengths = tuple(first * 2**i for i in range((longest // first).bit_length()))
    c.steps, c.batch_size = size["steps"], size["batch"]
    if arg.size == "paper" and c.model.mixers == ("attention",):
        c.model.width, c.steps = ATTENTION_PAPER["width"], ATTENTION_PAPER["longer"] * c.steps
    c.eval_every = c.checkpoint_every = max(100, c.steps // 20)
    c.eval_batches = 4
    c.optim.lr, c.optim.schedule = size["lr"], size["schedule"]
    c.optim.warmup, c.optim.weight_decay = 0 if arg.size == "paper" else min(200, c.steps // 6), 0.0
    return c
