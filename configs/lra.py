"""Long Range Arena (https://arxiv.org/abs/2011.04006): six tasks of 1,024 to 16,384 tokens, one label each.

    python -m data.prepare cifar10 --root=downloads
    python -m train --config=configs/lra.py:task=image,arch=s4d --workdir=runs/image-s4d

Tasks: listops, text, retrieval, image, pathfinder, pathx. ListOps and Pathfinder are made by their published laws; the
others need `python -m data.prepare` with imdb, lra_aan or cifar10. `links` is a stand-in for retrieval that needs no
release: do two Wikipedia articles link to each other (wiki_links)? `protocol=lra` feeds token ids as released,
`protocol=s4` what S4 and those after it feed: real pixels; of texts, characters with an end mark. If neither is given,
a published recipe has its own, and all else s4. Feeds `lra`.

Rows are read bidirectionally by whatever can. `size=small` is for one accelerator: every architecture with as many
parameters as attention of 4 layers and width 128 (configs/archs.py; but see configs/longest.py), minutes a run;
`size=medium` is 6 layers of width 256 with more dropout and four times the steps: feeds `lra_medium`. The activations
of both are in bfloat16, and rows of Text end at 2,048 characters. `size=paper` has the published recipe
(configs/recipes.py) of attention (LRA's Transformer), s4, s4d, s5, lru or b2s6, up to 833,250 steps, and of LRA's
other baselines on all tasks but Path-X. `size=smoke` shows on a CPU that it runs. Test scores are of the step that
validation chose.

`window` cuts what each layer sees (configs/window.py): feeds `locality`. `start` is for self-pretraining
(configs/pretraining.py): feeds `self_pretraining`.
"""

from ml_collections import ConfigDict

from configs import archs, base, longest, pretraining, recipes, window
from configs.argument import parse
from model.errors import choose

# The task's name here, what it reads, and how many steps of how many rows a small run has.
TASKS = {
    "listops": ("listops", {"lra": dict(length=2000), "s4": dict(length=2048)}, 5000, 32),
    "text": ("imdb", {"lra": dict(length=1000), "s4": dict(length=2048)}, 5000, 32),
    "retrieval": ("aan", {"lra": dict(length=4000), "s4": dict(length=4000)}, 5000, 16),
    "links": ("wiki_links", {"lra": dict(length=2000), "s4": dict(length=2000)}, 5000, 16),
    "image": ("image", {"lra": {}, "s4": {}}, 10_000, 50),
    "pathfinder": ("pathfinder", {"lra": dict(side=32), "s4": dict(side=32)}, 10_000, 64),
    "pathx": ("pathfinder", {"lra": dict(side=128), "s4": dict(side=128)}, 20_000, 16),
}
LONGER = 4  # times as many steps, where models are medium
VALIDATIONS = {"text": 10, "pathfinder": 10}  # in a run, where they have 20,000 rows and more; else 20
PAIRS = ("retrieval", "links")
PIXELS = ("image", "pathfinder", "pathx")
PUBLISHED = {"text": dict(length=4096), "retrieval": dict(length=4000)}  # of protocol s4
SMOKE = {
    "listops": dict(length=100, max_depth=6, min_length=10, max_length=90, n_train=2000, n_validation=64, n_test=64),
    "pathfinder": dict(side=32, difficulty="easy", n_train=2000, n_validation=64, n_test=64),
    "text": dict(length=256),
    "retrieval": dict(length=128),
    "links": dict(length=128),
}
MASKED = {"listops": 0.1, "image": 0.5, "pathfinder": 0.5, "pathx": 0.5}  # of a row in self-pretraining; else 0.15
SSM_LR = 0.25  # factor for a state space's own parameters: at most 1e-3 at the rates of the table, as S4 and S5 have it


def usual_protocol(arch: str, size: str) -> str:
    """As published; in other sizes all read the same."""
    return "lra" if size == "paper" and arch in recipes.OF_LRA else "s4"


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(
        argument,
        task="image",
        arch="s4d",
        protocol="",
        size="small",
        start="scratch",
        window=0,
        root="downloads",
    )
    name, protocols, steps, batch_size = choose("task", arg.task, TASKS)
    protocol = arg.protocol or usual_protocol(arg.arch, arg.size)
    section = choose("protocol", protocol, protocols)
    c = base.get_config()
    c.data.task = name
    c.data[name] = dict(section, protocol=protocol, root=arg.root)
    c.eval_batches, c.test_at = 0, "best"
    c.steps, c.batch_size = steps, batch_size
    c.optim.update(lr=2e-3, warmup=steps // 20, weight_decay=0.05, ssm_lr=SSM_LR)
    c.model.update(norm="layernorm", dropout=0.1)
    sizes = {"smoke": "tiny", "small": "small", "medium": "medium", "paper": "small"}
    archs.use_matched(c, arg.arch, choose("size", arg.size, sizes), both_ways=True)
    archs.read_bidirectionally(c)
    if arg.size in ("small", "medium"):
        c.model.dtype = "bfloat16"
    if arg.size == "medium":
        c.steps, c.optim.warmup, c.model.dropout = LONGER * steps, LONGER * steps // 20, 0.2
    if arg.size == "paper":
        recipes.use(c, arg.arch, "retrieval" if arg.task == "links" else arg.task)
        if protocol == "s4":
            c.data[name].update(PUBLISHED.get(arg.task, {}))
    if arg.size == "smoke":
        c.data[name].update(SMOKE.get(arg.task, {}))
        c.steps, c.batch_size = (20, 2) if arg.task in PIXELS else (40, 8)  # rows of a thousand pixels and more
        c.eval_batches, c.log_every, c.optim.warmup = 4, 10, 10
    c.checkpoint_every = max(c.steps // 20, 20)
    c.eval_every = max(c.steps // VALIDATIONS.get(arg.task, 20), 20)
    longest.use(c, c.data[name].get("length") or c.data[name].get("side", 32) ** 2)
    window.use(c, arg.window)
    if arg.task in PAIRS:
        c.model.kind = "towers"
    tokens = arg.task not in PIXELS or protocol == "lra"
    pretraining.use(c, arg.start, tokens, MASKED.get(arg.task, 0.15))
    return c
