"""Train short, test long: attention with any position encoding, asked far past the length it was trained at.

    python -m train --config=configs/extrapolation.py:task=induction,position=alibi --workdir=runs/alibi
    python -m train --config=configs/extrapolation.py:task=text,position=rope --workdir=runs/rope

`task=induction` is Mamba's test of induction heads, smaller; `task=text` is ALiBi's question, byte by byte, asked of
Python's own help texts or of `--config.data.text.path`. `python -m experiments.list` names the positions. Feeds the
tables `positions` and `positions_text`. `size=small` is for one accelerator; `size=smoke` takes half a minute on a
CPU core, where rotary positions find 100 % at their training length of 16, 98 % at twice and 29 % at four times that.
"""

from importlib.util import find_spec

from ml_collections import ConfigDict

from configs import base
from configs.argument import parse
from model.errors import choose

# size -> task -> length of training, longest of testing
LENGTHS = {
    "small": {"induction": (64, 4096), "text": (128, 4096)},
    "smoke": {"induction": (16, 256), "text": (32, 256)},
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="induction", position="rope", size="small")
    length, longest = choose("task", arg.task, choose("size", arg.size, LENGTHS))
    c = base.get_config()
    c.model.position = arg.position
    c.model.learned = dict(max_len=length)  # no entry that training never touches
    c.test_lengths = tuple(length * 2**i for i in range((longest // length).bit_length()))
    c.data.task = arg.task
    if arg.task == "induction":
        c.data.induction = dict(length=length, vocab_size=16)
        c.steps, c.batch_size = 4000, 64
        c.model.layers, c.model.mlp, c.model.tied = 2, "none", False
        c.optim.warmup, c.optim.weight_decay = 50, 0.01
    else:
        c.data.text = dict(path=find_spec("pydoc_data.topics").origin, length=length)
        c.steps, c.batch_size = 3000, 32
        c.eval_batches = 0  # the whole split, so that every length is tested on the same bytes
        c.best, c.test_at = "loss", "best"
        c.model.layers = 4
    c.model.width, c.optim.lr = 128, 2e-3
    c.eval_every, c.checkpoint_every = 500, 500
    if arg.size == "smoke":
        c.steps, c.batch_size = c.steps // 10, c.batch_size // 2
        c.model.width, c.model.layers, c.optim.lr = 32, 2, 4e-3
    return c
