"""A source read and its answer written: strings reversed, dates put into one form, a made-up language translated.

    python -m train --config=configs/seq2seq.py:task=reverse,arch=seq2seq --workdir=runs/reverse

Tasks: copy, reverse, sort, dates, translate. Architectures: seq2seq_vector, seq2seq and transformer, or any encoder and
decoder. Feeds the table `seq2seq`. `size=small` is for one accelerator, `size=smoke` shows on a CPU that it runs, and
`size=base` with `arch=transformer_base` is the published model and schedule: 4,000 steps of warm-up to 512^-0.5
4,000^-0.5, then falling with the inverse root of the step.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

STRINGS = ("copy", "reverse", "sort")
TASKS = (*STRINGS, "dates", "translate")
SIZES = {
    "smoke": dict(
        model=dict(width=64, layers=1),
        strings=dict(length=12, vocab_size=13),
        translate=dict(length=12, nouns=4, verbs=3, adjectives=3),
        test_lengths={"strings": (4, 8, 12), "translate": (6, 9, 12)},
        train=dict(steps=300, batch_size=64),
        optim=dict(lr=4e-3, warmup=100),
    ),
    "small": dict(
        model=dict(width=256, layers=3),
        strings=dict(length=64, vocab_size=32),
        translate=dict(length=48),
        test_lengths={"strings": (8, 16, 32, 48, 64), "translate": (8, 16, 24, 36, 48)},
        train=dict(steps=8000, batch_size=128),
        optim=dict(lr=1e-3, warmup=1000),
    ),
    "base": dict(
        model={},
        strings=dict(length=64, vocab_size=32),
        translate=dict(length=48),
        test_lengths={"strings": (8, 16, 32, 48, 64), "translate": (8, 16, 24, 36, 48)},
        train=dict(steps=100_000, batch_size=256),
        optim=dict(lr=(512 * 4000) ** -0.5, warmup=4000, b1=0.9, b2=0.98, eps=1e-9),
    ),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="reverse", arch="seq2seq", size="small")
    size, task = choose("size", arg.size, SIZES), choose("task", arg.task, dict.fromkeys(TASKS, arg.task))
    kind = "strings" if task in STRINGS else task
    c = base.get_config()
    archs.use(c, arg.arch)
    c.model.update(size["model"])
    archs.use_layers(c, c.model.layers)
    c.data.task = task
    c.data[task] = size.get(kind, {})
    c.test_lengths = size["test_lengths"].get(kind, ())
    c.update(size["train"])
    c.eval_every = c.checkpoint_every = max(100, c.steps // 8)
    c.optim.update(schedule="rsqrt", weight_decay=0.0, **size["optim"])
    return c
