"""Goes on from weights, on any task: another run's, or a folder of safetensors with its config.json.

    python -m train --config=configs/finetune.py:path=runs/a,task=induction --workdir=runs/b
    python -m train --config=configs/finetune.py:path=DIR,task=text --config.data.text.path=book.txt --workdir=runs/c

Takes `path`, `task` (of a run, without it, its own) and `step` (of a run: best, latest or a number). The model is the
one of the weights; `--config.init.fresh` names parts that are to be drawn anew, `--config.optim.frozen` those that are
not to be trained. Feeds no table.
"""

from pathlib import Path

from flax.traverse_util import unflatten_dict
from ml_collections import ConfigDict

from configs import base
from configs.argument import parse
from model.errors import UserError
from model.weights.folder import open_weights
from train.workdir import read_json


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, path="", task="", step="latest")
    if not arg.path:
        raise UserError("configs/finetune.py needs weights; e.g. --config=configs/finetune.py:path=runs/a")
    c = base.get_config()
    run = Path(arg.path) / "config.json" if (Path(arg.path) / "checkpoints").is_dir() else None
    if run:
        given = read_json(run, model=dict, data=dict)
    else:
        given = {"model": unflatten_dict(open_weights(arg.path).settings, sep=".")}
        if not arg.task:
            raise UserError(f"the weights in {arg.path} come without a task; e.g. path={arg.path},task=text")
    c.model = given["model"]
    c.data = {"task": arg.task} if arg.task else given["data"]
    with c.init.ignore_type():
        c.init.path, c.init.step = arg.path, int(arg.step) if arg.step.isdecimal() else arg.step
    c.optim.lr = 1e-4
    return c
