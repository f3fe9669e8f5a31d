"""Byte-level language modelling of enwik8, the first 100 MB of Wikipedia's XML: bits per byte by architecture.

    python -m train --config=configs/enwik8.py:arch=mamba2,size=small --workdir=runs/enwik8
    python -m train --config=configs/enwik8.py:arch=attention,size=smoke --workdir=runs/smoke

It reads what `python -m data.prepare enwik8` leaves, or `--config.data.text.path`; its split is the usual one, 90 / 5 /
5 million bytes. Feeds the table `enwik8`; `heads`, `sinks` and `extension` ask their questions of the same texts.
`size=small`, for one accelerator, reads the training bytes once in rows of 1,024, and every architecture has as many
parameters as attention of 6 layers and width 512; elsewhere those without MLPs have twice the layers. `size=paper` is
Transformer-XL's base model (arXiv:1901.02860, run_enwik8_base.sh of its code): 12 layers of 512 in 8 heads, dropout
0.1, rows of 512, 22 a step, 400,000 steps at 2.5e-4: 4.5 billion bytes through 38 million parameters, 1e18
floating-point operations without those of the attention itself. It says 1.06 bits, with 512 bytes of memory carried
from row to row, which ours do not have. `size=smoke` takes Python's own help texts, and shows on a CPU that it
runs. `window` cuts what each layer sees (configs/window.py).
"""

from importlib.util import find_spec

from ml_collections import ConfigDict

from configs import archs, base, longest, window
from configs.argument import parse
from model.errors import choose

ENWIK8 = "downloads/prepared/enwik8/bytes.npy"
HELP = find_spec("pydoc_data.topics").origin  # every Python has it
SIZES = {
    "smoke": dict(text=HELP, length=64, width=32, layers=3, heads=4, steps=200, batch=16, lr=4e-3, warmup=20),
    "small": dict(text=ENWIK8, length=1024, width=512, layers=6, heads=8, steps=2750, batch=32, lr=1e-3, warmup=140),
    "paper": dict(text=ENWIK8, length=512, width=512, layers=12, heads=8, steps=400_000, batch=22, lr=2.5e-4, warmup=0),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="attention", size="small", window=0)
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    if arg.size == "small":
        archs.use_matched(c, arg.arch, "large")
    else:
        archs.use(c, arg.arch)
        c.model.width = size["width"]
        archs.use_layers(c, size["layers"] * (2 if c.model.mlp == "none" else 1))
    c.data.task = "text"
    c.data.text = dict(path=size["text"], length=size["length"])
    longest.use(c, size["length"])
    c.model.update(attention=dict(n_heads=size["heads"]), mla=dict(n_heads=size["heads"]))
    c.steps, c.batch_size = size["steps"], size["batch"]
    c.optim.lr, c.optim.warmup = size["lr"], size["warmup"]
    c.best = "loss"
    c.eval_batches = 0  # the whole split: every length of rows is tested on the same bytes
    c.eval_every = c.checkpoint_every = 0 if arg.size == "smoke" else c.steps // 10
    if arg.size != "smoke":
        c.model.dtype = "bfloat16"
    if arg.size == "paper":
        c.model.dropout, c.test_at = 0.1, "best"
    window.use(c, arg.window)
    return c
