"""What a small key-value cache costs: a language model with fewer key-value heads, or a latent vector in their place.

    python -m train --config=configs/heads.py:keys=heads,n=1,size=small --workdir=runs/mqa
    python -m train --config=configs/heads.py:keys=latent,n=128,size=small --workdir=runs/mla

`keys=heads` has `n` key-value heads: all is multi-head attention, some grouped-query (arXiv:2305.13245), 1 multi-query
(arXiv:1911.02150). `keys=latent` is multi-head latent attention (arXiv:2405.04434) of rank `n`, with half a head's dims
for the part that positions turn. What the projections lack goes into wider MLPs, as in the paper on multi-query
attention, so that all have as many parameters. The rest is `configs/enwik8.py`, in the same sizes. Feeds the table
`heads`.
"""

from ml_collections import ConfigDict

from configs import enwik8
from configs.argument import parse
from model.errors import UserError, choose
from model.mlps import mlp_width

MULTIPLE = 8  # widths that accelerators like


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, keys="heads", n=1, size="small")
    size = choose("size", arg.size, enwik8.SIZES)
    D, H = size["width"], size["heads"]
    K = D // H
    c = enwik8.get_config(f"arch={choose('keys', arg.keys, {'heads': 'attention', 'latent': 'mla'})},size={arg.size}")
    if arg.keys == "heads":
        c.model.attention.n_kv_heads = choose("n", arg.n, {n for n in range(1, H + 1) if H % n == 0})
        saved = 2 * D * (H - arg.n) * K
    else:
        if not 1 <= arg.n <= D:
            near = min(max(arg.n, 1), D)
            raise UserError(f"config argument n is {arg.n}; allowed: 1 to {D} (the width); closest: {near}")
        shared = K // 2
        c.model.mla.update(kv_rank=arg.n, shared_dim=shared)
        saved = 2 * D * D - D * (H + 1) * shared - 3 * D * arg.n  # of the queries, the shared part, down and up
    usual = mlp_width(c.model.mlp, D, 0, c.model.mlp_multiple)
    c.model.mlp_width = usual + round(saved / (3 * D) / MULTIPLE) * MULTIPLE  # a gated MLP has three maps
    return c
