"""Needles in haystacks and RULER's other tasks, made small: trained on short rows, tested on long ones.

    python -m train --config=configs/ruler.py:task=needle,arch=mamba2 --workdir=runs/needle

Tasks: passkey, needle, multi_key, needles (a haystack of nothing else), multi_value, multi_query, variable_tracking and
common_words. Feeds the tables `needle` and `ruler`. RULER (https://arxiv.org/abs/2404.06654) asks language models of
4,096 to 131,072 tokens, by prompts: 4 needles, values or queries, 4 hops, 10 words that come up 30 times among others
that do 3 times. `size=small`, for one accelerator, has those numbers in rows of 512 tokens of a made-up vocabulary,
tested on up to 8,192; `size=smoke` fewer in rows of 32, tested on up to 256, where attention finds the whole value of
every needle and, in rows of 128, of 88 % of them; it does not learn in that time to tell needles apart by their names
(multi_query, variable_tracking). There is no published size, as RULER has none for models trained on it. `window` cuts
what each layer sees (configs/window.py).
"""

from ml_collections import ConfigDict

from configs import archs, base, window
from configs.argument import parse
from model.errors import choose

SIZES = {
    "smoke": dict(
        length=32,
        longest=256,
        model=dict(width=64, layers=2),
        train=dict(steps=400, batch_size=32),
        lr=4e-3,
        words=dict(names=16, values=16, fillers=16),
        tasks=dict(
            passkey=dict(digits=3),
            needle=dict(value_words=2),
            multi_key=dict(n_needles=2),
            needles=dict(n_needles=0, names=128),
            multi_value=dict(n_values=2),
            multi_query=dict(n_queries=2),
            variable_tracking=dict(n_chains=2, n_hops=1),
            common_words=dict(n_common=2, common_times=8, other_times=1, names=256),
        ),
    ),
    "small": dict(
        length=512,
        longest=8192,
        model=dict(width=128, layers=2),
        train=dict(steps=6000, batch_size=64),
        lr=2e-3,
        words=dict(names=256, values=256, fillers=256),
        tasks=dict(
            passkey=dict(digits=5),
            needle=dict(value_words=2),
            multi_key=dict(n_needles=4),
            needles=dict(n_needles=0, names=4096),
            multi_value=dict(n_values=4),
            multi_query=dict(n_queries=4),
            variable_tracking=dict(n_chains=2, n_hops=4),
            common_words=dict(n_common=10, common_times=30, other_times=3, names=4096),
        ),
    ),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="needle", arch="attention", size="small", window=0)
    size = choose("size", arg.size, SIZES)
    asked = choose("task", arg.task, size["tasks"])
    c = base.get_config()
    archs.use(c, arg.arch, **size["model"])
    c.data.task = "multi_key" if arg.task == "needles" else arg.task
    c.data[c.data.task] = dict(length=size["length"], **size["words"] | asked)
    c.test_lengths = tuple(size["length"] * 2**i for i in range((size["longest"] // size["length"]).bit_length()))
    c.update(size["train"])
    c.eval_every = c.checkpoint_every = max(100, c.steps // 10)
    c.test_at = "best"
    c.optim.lr, c.optim.warmup, c.optim.weight_decay = size["lr"], min(200, c.steps // 6), 0.0
    window.use(c, arg.window)
    return c
