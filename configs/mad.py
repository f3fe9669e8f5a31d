"""MAD, mechanistic architecture design: six small tasks, each varied one step at a time (arXiv:2403.17844).

    python -m train --config=configs/mad.py:task=recall,arch=mamba --workdir=runs/mad
    python -m train --config=configs/mad.py:task=recall,arch=mamba,change=length,to=512 --workdir=runs/mad-512

Tasks: recall, fuzzy_recall, noisy_recall, selective_copying, compression, memorization. `change` names a field of the
task and `to` its value. Feeds the table `mad`, whose score is the mean over the settings of a task, each of the run
that validates best. Layers are as published: a mixer and a SwiGLU each, two of both, attention with 16 rotary heads of
width 8 and Mamba with a state of 4, all in width 128; but its accuracy is the mean over classes, ours over answers.

`size=paper` is the published setting: batches of 128, 200 epochs, AdamW with a cosine in bfloat16, a grid of three
rates and two decays over 66 settings: 396 runs of up to 20,000 steps for each architecture. `size=small`, for one
accelerator, ends after 4,000 steps; `size=smoke` shows on a CPU that it runs. `window` cuts what each layer sees
(configs/window.py).
"""

from ml_collections import ConfigDict

from configs import archs, base, window
from configs.argument import parse
from model.errors import UserError, choose

EPOCHS = 200
FINAL = 1e-6  # the rate at which the cosine ends, as published
EXAMPLES = (6400, 3200, 1600, 800)
# Task -> field -> its baseline, then the values that it is changed to, as published.
TASKS = {
    "recall": dict(vocab_size=(16, 32, 64, 128), length=(128, 256, 512, 1024), n_train=(12_800, *EXAMPLES)),
    "fuzzy_recall": dict(vocab_size=(16, 32, 64, 128), length=(128, 256, 512, 1024), n_train=(12_800, *EXAMPLES)),
    "noisy_recall": dict(
        vocab_size=(32, 48, 80, 144),
        length=(128, 256, 512, 1024),
        n_train=(12_800, *EXAMPLES),
        noise=(0.2, 0.4, 0.6, 0.8),
    ),
    "selective_copying": dict(
        vocab_size=(16, 32, 64, 128), length=(256, 512, 1024), n_train=(12_800, *EXAMPLES), n_tokens=(16, 32, 64, 96)
    ),
    "compression": dict(vocab_size=(16, 32, 64, 128), length=(32, 64, 128, 256), n_train=(12_800, *EXAMPLES)),
    "memorization": dict(vocab_size=(256, 512, 1024, 2048, 4096, 8192), length=(32,), n_train=(256,)),
}
SIZES = {
    "smoke": dict(width=32, batch=32, steps=60, shorter=4, lr=3e-3),
    "small": dict(width=128, batch=128, steps=4000, lr=1e-3),
    "paper": dict(width=128, batch=128, steps=20_000, lr=5e-4, dtype="bfloat16"),
}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="recall", arch="mamba", change="", to="", size="small", window=0)
    size, fields = choose("size", arg.size, SIZES), choose("task", arg.task, TASKS)
    task = {name: values[0] for name, values in fields.items()}
    if "shorter" in size:
        task["length"] //= size["shorter"]
        task |= {"n_tokens": 4} if "n_tokens" in task else {}
    if arg.change:
        task[arg.change] = _number(arg.change, arg.to, choose("change", arg.change, task))
    elif arg.to:
        raise UserError(f"config argument to is {arg.to!r}, and no change is named; allowed: change={', '.join(task)}")
    c = base.get_config()
    archs.use(c, arg.arch)
    archs.use_layers(c, 2)
    c.model.mlp, c.model.tied, c.model.width = "swiglu", False, size["width"]
    c.model.dtype = size.get("dtype", "float32")
    c.model.update(attention=dict(n_heads=size["width"] // 8), mamba=dict(state=4))
    c.data.task = f"mad_{arg.task}"
    c.data[c.data.task] = task
    c.batch_size = size["batch"]
    c.steps = min(size["steps"], EPOCHS * task["n_train"] // c.batch_size)
    c.eval_every = c.checkpoint_every = 0 if arg.size == "smoke" else max(c.steps // 10, 1)
    c.test_at = "best"
    c.eval_batches = 2 if arg.size == "smoke" else 0
    c.optim.lr, c.optim.final_lr, c.optim.warmup, c.optim.weight_decay = size["lr"], FINAL / size["lr"], 0, 0.0
    c.optim.b2, c.optim.clip = 0.999, 0.0
    window.use(c, arg.window)
    return c


def _number(change: str, text: str, usual: int | float) -> int | float:
    try:
        return type(usual)(text)
    except ValueError:
        kind = "a whole number" if isinstance(usual, int) else "a number"
        raise UserError(f"config argument to is {text!r}; {change} takes {kind}, such as {usual}") from None
