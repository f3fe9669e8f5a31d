"""Pictures read pixel by pixel: MNIST, the same in a fixed random order, Fashion-MNIST, CIFAR-10 in colour or grey.

    python -m data.prepare mnist --root=downloads
    python -m train --config=configs/seqimage.py:task=smnist,arch=s4d --workdir=runs/smnist

Tasks: smnist, psmnist (784 pixels; set mnist), sfashion (784; fashion-mnist), scifar, scifar_grey (1,024; cifar10).
Pixels are real numbers; with `protocol=lra` those of one colour are tokens. Feeds the table `seqimage`. `size=small` is
for one accelerator, 20 epochs, as many as the Annotated S4's MNIST run has (https://github.com/srush/annotated-s4),
every architecture with as many parameters as attention of 4 layers and width 128 (but see configs/longest.py).
`size=paper` has the published recipes (configs/recipes.py): of smnist those of s4 (8,437 steps of 128 rows) and s5
(162,000 of 50), of scifar those of s4 and s4d, lru (180,000 of 50 each) and s5 (225,000). `size=smoke` shows on a CPU
that it runs.

`window` cuts what each layer sees (configs/window.py), `start` is for self-pretraining (configs/pretraining.py).
"""

from ml_collections import ConfigDict

from configs import archs, base, longest, pretraining, recipes, window
from configs.argument import parse
from model.errors import choose

TASKS = {  # the task, its section, training pictures, pixels
    "smnist": ("smnist", {}, 54_000, 784),
    "psmnist": ("psmnist", {}, 54_000, 784),
    "sfashion": ("sfashion", {}, 54_000, 784),
    "scifar": ("scifar", {}, 45_000, 1024),
    "scifar_grey": ("image", {}, 45_000, 1024),
}
EPOCHS, BATCH = 20, 100
MASKED = 0.5  # of a row in self-pretraining, as of Long Range Arena's pixels


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(
        argument,
        task="smnist",
        arch="s4d",
        protocol="s4",
        size="small",
        start="scratch",
        window=0,
        root="downloads",
    )
    name, section, n, pixels = choose("task", arg.task, TASKS)
    steps = EPOCHS * n // BATCH
    sizes = {"small": ("small", steps), "smoke": ("tiny", 20), "paper": ("small", steps)}
    model, steps = choose("size", arg.size, sizes)
    c = base.get_config()
    archs.use_matched(c, arg.arch, model, both_ways=True)
    c.model.update(norm="layernorm", dropout=0.1, dtype="bfloat16" if arg.size == "small" else "float32")
    archs.read_bidirectionally(c)
    c.data.task, c.data[name] = name, dict(section, protocol=arg.protocol, root=arg.root)
    c.steps, c.batch_size, c.test_at = steps, BATCH, "best"
    c.eval_batches = 0
    c.optim.update(lr=4e-3, warmup=steps // 20, weight_decay=0.05, ssm_lr=0.25)
    if arg.size == "paper":
        recipes.use(c, arg.arch, arg.task, recipes.IN_A_ROW)
    c.eval_every = c.checkpoint_every = max(c.steps // EPOCHS, 10)
    longest.use(c, pixels)
    window.use(c, arg.window)
    if arg.size == "smoke":
        c.batch_size, c.eval_batches = 4, 2
    pretraining.use(c, arg.start, arg.protocol == "lra", MASKED)
    return c
