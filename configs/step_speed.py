"""A language model to be timed: how long does a training step take, and in how much memory?

    python -m experiments.measurements.steps --config=configs/step_speed.py:arch=mamba2,rows=16 --workdir=runs/speed

Feeds `experiments.bench step`. `size=110m` has 12 layers of width 768 and a vocabulary of 32,000, and computes in
bfloat16; `size=64` and `size=128` are two layers of that width, for a CPU. Tokens are random, which take as long as any
others, and every one is asked for the next, as in training a language model.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "110m": dict(width=768, layers=12, vocab_size=32_000, dtype="bfloat16"),
    "128": dict(width=128, layers=2, vocab_size=2048),
    "64": dict(width=64, layers=2, vocab_size=2048),
}
HEAD = 64  # channels, but no fewer than two heads


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="attention", size="110m", rows=16, length=2048)
    c = base.get_config()
    archs.use(c, arg.arch, **choose("size", arg.size, SIZES))
    if "attention" in c.model.mixers:
        c.model.attention = dict(c.model.get("attention", {}), n_heads=max(2, c.model.width // HEAD))
    c.data.task = "noise"
    c.data.noise = dict(length=arg.length, vocab_size=c.model.vocab_size)
    c.batch_size, c.steps = arg.rows, 10
    return c
