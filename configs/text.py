"""A byte-level language model of any text file, or of all files in a folder, at laptop size.

    python -m train --config=configs/text.py:path=book.txt,arch=mamba --workdir=runs/book
    python -m eval --workdir=runs/book        # loss in nats, perplexity, bits per byte
    python -m eval --workdir=runs/book --suite=generate --prompt="The "

Takes `path` and `arch`; a path with a comma goes into `--config.data.text.path` instead. Feeds no table. Ten
minutes on two busy CPU cores brought attention to 0.88 nats or 1.27 bits per byte on the test split, seed 0,
of Python 3.11's own help texts: 757 kB, at `python -c "import pydoc_data.topics as t; print(t.__file__)"`.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, path="", arch="attention")
    c = base.get_config()
    archs.use(c, arg.arch)
    c.data.task = "text"
    c.data.text = {"path": arg.path, "length": 128}
    c.steps, c.batch_size = 500, 16
    c.eval_every, c.checkpoint_every, c.eval_batches = 250, 250, 16
    c.best = "loss"
    c.model.width = 128
    archs.use_layers(c, 4)
    c.optim.lr = 3e-3
    return c
