"""Longer contexts for a trained model: rotary positions scaled in several ways, before and after a short fine-tuning.

    python -m train --config=configs/extension.py:size=small --workdir=runs/short
    python -m train --config=configs/extension.py:scaling=yarn,tuned=yes,size=small --workdir=runs/yarn \\
      --config.init.path=runs/short

Without arguments a model is trained on short rows. Given its parameters, `scaling` (linear, which is position
interpolation, arXiv:2306.15595; ntk; dynamic_ntk; yarn, arXiv:2309.00071) makes room for FACTOR times the length, and
with `tuned=yes` it is trained some more at that length, as those papers do; else one step at a rate of 0 leaves it as
it was. All are tested at 1 to 32 times the short length, on the same bytes. Feeds the table `extension`. `size=small`,
for one accelerator, goes from rows of 256 bytes of enwik8 to 8,192; `size=smoke` from 32 bytes of Python's help texts
to 1,024.
"""

from ml_collections import ConfigDict

from configs import enwik8
from configs.argument import parse
from configs.sinks import test_only
from model.errors import choose

FACTOR = 8
LONGEST = 32  # times the short length
SIZES = {"smoke": (32, 40), "small": (256, 500)}  # the short length; steps of fine-tuning
FIRST = "runs/short"  # what they begin with, unless init.path says otherwise
SCALINGS = ("none", "linear", "ntk", "dynamic_ntk", "yarn")


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, scaling="none", tuned="no", size="small")
    length, steps = choose("size", arg.size, SIZES)
    tuned = choose("tuned", arg.tuned, {"yes": True, "no": False})
    c = enwik8.get_config(f"arch=attention,size={arg.size}")
    tokens = c.batch_size * c.data.text.length
    scaled = choose("scaling", arg.scaling, dict.fromkeys(SCALINGS, True) | {"none": False})
    if scaled:
        # Dynamic NTK has no factor: it takes the length's.
        c.model.rope = dict(scaling=arg.scaling, original_length=length)
        c.model.rope.factor = 1.0 if arg.scaling == "dynamic_ntk" else float(FACTOR)
    if tuned:
        c.steps, c.optim.lr, c.optim.warmup = steps, c.optim.lr / 10, steps // 10
        c.eval_every = c.checkpoint_every = steps
        c.init.path = FIRST
    elif scaled:
        test_only(c, FIRST)
    c.data.text.length = length * (FACTOR if tuned else 1)
    c.batch_size = tokens // c.data.text.length
    c.test_lengths = tuple(length * 2**i for i in range(LONGEST.bit_length()))
    return c
