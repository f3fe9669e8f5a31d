"""A classifier of bytes in the size of Long Range Arena's Text, to be timed: how fast, and in how much memory?

    python -m experiments.measurements.steps --config=configs/lra_speed.py:arch=s4d,length=4096 --workdir=runs/speed

Feeds the table `lra_speed`. As released: 4 layers of width 256, 4 heads, MLPs of 1,024, 32 rows
a step. Rows are full of random bytes, which take as long as any others. What can read both ways does, the rest reads
forward. `size=small` is for one accelerator, its activations in bfloat16; `size=smoke` is a small model on 2 rows.
"""

from ml_collections import ConfigDict

from configs import archs, base, longest
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(model=dict(width=32, layers=2), rows=2, steps=3),
    "small": dict(model=dict(width=256, layers=4, mlp_width=1024, dtype="bfloat16"), rows=32, steps=10),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="attention", length=1024, size="small")
    size = choose("size", arg.size, SIZES)
    c = base.get_config()
    archs.use(c, arg.arch, **size["model"])
    archs.read_bidirectionally(c)
    longest.use(c, arg.length)
    c.data.task = "majority"
    c.data.majority = dict(length=arg.length)
    c.steps, c.batch_size = size["steps"], size["rows"]
    return c
