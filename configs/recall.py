"""Associative recall over width and number of pairs: how much state does it take to remember? (Zoology, figure 2)

    python -m train --config=configs/recall.py:arch=mamba,width=128,pairs=16 --workdir=runs/recall

Feeds the table `recall`, which takes the best of several learning rates and sets accuracy against bytes of state. 4,
8, 16 and 64 pairs come in rows of 64, 128, 256 and 512 tokens, and attention has one head, as published. `size=paper`
has the published vocabulary of 8,192, 64 epochs of 100,000 examples, plain AdamW, and learned positions for attention;
it lacks the dropout of a tenth of embeddings and of attention's weights. `size=small`, for one accelerator, has a
vocabulary of 128 (256 for 64 pairs), fresh examples and rotary positions; `size=smoke` shows on a CPU that it runs.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

LENGTHS = {4: 64, 8: 128, 16: 256, 64: 512}  # by pairs
IDS = 4  # in the vocabulary for each pair, at least
EPOCH = 100_000  # examples, in the published setting
SIZES = {  # a step has at most `batch` examples and `tokens` tokens
    "smoke": dict(task=dict(vocab_size=64), steps=200, batch=32, tokens=2**14, lr=4e-3),
    "small": dict(task=dict(vocab_size=128), steps=4000, batch=256, tokens=2**14, lr=1e-2),
    "paper": dict(task=dict(vocab_size=8192, n_train=EPOCH), epochs=64, batch=512, tokens=2**16, lr=2.2e-3),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="mamba", width=64, pairs=4, size="small")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use_bare(c, arg.arch, arg.width)
    c.model.update(attention=dict(n_heads=1))
    length = choose("number of pairs", arg.pairs, LENGTHS)
    c.data.task = "mqar"
    c.data.mqar = dict(length=length, n_pairs=arg.pairs, **size["task"])
    c.data.mqar.vocab_size = max(c.data.mqar.vocab_size, IDS * arg.pairs)
    c.batch_size = min(size["batch"], size["tokens"] // length)
    c.steps = size["steps"] if "steps" in size else size["epochs"] * EPOCH // c.batch_size
    c.eval_every = c.checkpoint_every = max(100, c.steps // 20)
    c.target = 0.99
    c.optim.lr, c.optim.warmup, c.optim.weight_decay = size["lr"], min(200, c.steps // 6), 0.1
    if arg.size == "paper":
        c.optim.update(warmup=0, b2=0.999, clip=0.0)
        c.test_at = "best"
        if "attention" in c.model.mixers:
            c.model.update(position="learned", learned=dict(max_len=length))
    return c
