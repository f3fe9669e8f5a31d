"""A window on any benchmark: the same model, in whose layers a token sees those less than so far away and no others.

A switch of benchmark configs (lra, seqimage, listops, mad, ruler, tracking, enwik8), `window=...`. What such a model
still solves is local, however long its rows are.

    python -m train --config=configs/lra.py:task=image,arch=s4d,window=32 --workdir=runs/local

Attention has its window, state spaces that are the same at every token a kernel that ends there, both ways where rows
are read both ways. Layers on top of each other see farther: n of them n times the window. Other mixers are refused.
"""

from ml_collections import ConfigDict

from configs.archs import ARCHS, MATCHED
from model.entries import entry
from model.errors import UserError
from model.mixers import MIXERS
from model.settings import section

HAVE = sorted(name for name, mixer in MIXERS.items() if "window" in section(mixer) and not mixer.reads_memory)
CUT = [arch for arch in MATCHED if all(entry(ARCHS[arch], name).mixer in HAVE for name in ARCHS[arch]["mixers"])]


def use(config: ConfigDict, window: int) -> None:
    """Gives every layer of a config this window; 0 leaves them as they are."""
    if not window:
        return
    for name in config.model.mixers:
        kind = entry(config.model, name).mixer
        if kind not in HAVE:
            raise UserError(
                f"config argument window is {window}, and mixer {kind!r} has none; allowed: 0, or arch={', '.join(CUT)}"
            )
        config.model.update({name: {"window": window}})
    config.model.pool = "mean"  # a vector in front of the row would see its first tokens alone
