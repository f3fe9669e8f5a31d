"""A model trained on short rows reads a long document through a small cache, with or without its first bytes in it.

    python -m train --config=configs/sinks.py:cache=all,size=small --workdir=runs/all
    python -m train --config=configs/sinks.py:cache=4,size=small --workdir=runs/four --config.init.path=runs/all

`cache=all` trains attention with rotary positions on rows as long as the cache will be, and then reads the document
with every byte in the cache. The others take its parameters, by default those in runs/all, and train no more (one step
at a rate of 0): a number is of first bytes that stay, StreamingLLM's attention sinks (arXiv:2309.17453), beside as many
last ones as fill the cache; `recompute` reads a whole row anew for every byte, which is what the cache is to be as good
as.
`test/stream_bits_per_byte` is of the whole document, `test/length_N/stream_bits_per_byte` of a stretch of it that ends
at byte N. Feeds the table `sinks`. `size=small`, for one accelerator, reads 65,536 bytes of enwik8's test split;
`size=smoke` 4,096 of Python's help texts.
"""

from ml_collections import ConfigDict

from configs import enwik8
from configs.argument import parse
from model.errors import UserError, choose, closest

SIZES = {  # length of rows and of the cache; of the document
    "smoke": (64, 4096),
    "small": (256, 65_536),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, cache="all", size="small")
    length, document = choose("size", arg.size, SIZES)
    c = enwik8.get_config(f"arch=attention,size={arg.size}")
    c.batch_size = c.batch_size * c.data.text.length // length
    c.data.text.length = length
    c.stream.length = document
    if arg.cache == "all":
        return c
    test_only(c, "runs/all")
    if arg.cache == "recompute":
        c.stream.recompute = length
    elif arg.cache.isdecimal() and int(arg.cache) < length:
        c.model.attention.update(window=length - int(arg.cache), sink_tokens=int(arg.cache))
    else:
        near = f"; closest: {length - 1}" if arg.cache.isdecimal() else closest(arg.cache, ("all", "recompute"))
        allowed = f"all, recompute, or how many first bytes, below {length}"
        raise UserError(f"config argument cache is {arg.cache!r}; allowed: {allowed}{near}")
    return c


def test_only(c: ConfigDict, first: str) -> None:
    """One step at a rate of 0: what the run begins with, by default that in a folder, is tested as it is."""
    c.init.path = first
    c.steps, c.optim.lr = 1, 0.0
    c.eval_every = c.checkpoint_every = 0
