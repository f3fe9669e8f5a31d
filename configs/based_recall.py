"""Associative recall of many lengths and numbers of pairs at once, tested far beyond them (Based, arXiv:2402.18668).

    python -m train --config=configs/based_recall.py:arch=mamba,width=128 --workdir=runs/based

Feeds the table `based_recall`, which takes the best of several learning rates and sets accuracy against bytes of
state; columns are lengths, a quarter of them pairs. `python -m eval` slices by length and pairs. `size=paper` has the
published mix of 180,000 rows of 64 to 256 tokens with 4 to 64 pairs, 8,192 ids, 32 epochs in batches of 256 (22,500
steps a run) and tests on up to 1,024 tokens with 256 pairs; unlike there, no mixer has a short convolution in front.
`size=small`, for one accelerator, has a vocabulary of 512; `size=smoke` shows on a CPU that it runs.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(
        task=dict(length=32, vocab_size=64, train=((16, 2, 2000), (32, 4, 1000)), test=((16, 2), (32, 8)), n_test=64),
        lengths=(16, 32, 64),
        steps=100,
        batch=32,
        lr=4e-3,
    ),
    "small": dict(task=dict(vocab_size=512), lengths=(64, 128, 256, 512), steps=8000, batch=128, lr=3e-3),
    "paper": dict(task={}, lengths=(64, 128, 256, 512, 1024), steps=32 * 180_000 // 256, batch=256, lr=3.2e-3),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="mamba", width=64, size="small")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use_bare(c, arg.arch, arg.width)
    c.model.update(attention=dict(n_heads=1))
    c.data.task = "mqar_mix"
    c.data.mqar_mix = size["task"]
    c.test_lengths, c.test_at = size["lengths"], "best"
    c.steps, c.batch_size = size["steps"], size["batch"]
    c.eval_batches = 2 if arg.size == "smoke" else 16
    c.eval_every = c.checkpoint_every = 0 if arg.size == "smoke" else c.steps // 20
    c.optim.lr, c.optim.warmup, c.optim.weight_decay = size["lr"], c.steps // 10, 0.1
    return c
