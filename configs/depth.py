"""How deep a Transformer trains: norms before or after the residual sum, with and without warm-up.

    python -m train --config=configs/depth.py:norm=post,layers=24,warmup=no --workdir=runs/post-24

`norm` is pre or post, `warmup` yes or no. Recall of a few pairs, which two layers can do: what fails here fails to
train. Feeds the table `depth`. `size=small` is for one accelerator, `size=smoke` shows on a CPU that it runs.
"""

from ml_collections import ConfigDict

from configs import base
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(width=32, n_heads=2, steps=200, batch_size=32, warmup=50),
    "small": dict(width=128, n_heads=4, steps=2000, batch_size=64, warmup=500),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, norm="pre", layers=12, warmup="yes", size="small")
    size = choose("size", arg.size, SIZES)
    order = choose("norm", arg.norm, {"pre": "pre", "post": "post"})
    warmup = choose("warmup", arg.warmup, {"yes": size["warmup"], "no": 0})
    c = base.get_config()
    c.data.task, c.data.mqar = "mqar", dict(length=16, vocab_size=16, n_pairs=3)
    c.model.update(width=size["width"], layers=arg.layers, mixers=("attention",), position="rope")
    # Behind the last norm of a post-norm layer another would change nothing.
    c.model.update(norm="layernorm", norm_order=order, final_norm=order == "pre", mlp="relu")
    c.model.attention = dict(n_heads=size["n_heads"])
    c.steps, c.batch_size = size["steps"], size["batch_size"]
    c.eval_every = c.checkpoint_every = max(100, c.steps // 4)
    c.nonfinite = "skip"
    c.optim.update(lr=1e-3, schedule="constant", warmup=warmup, weight_decay=0.0)
    return c
