"""Recall, selective copying and induction at laptop size: which architectures can, and which cannot.

    python -m train --config=configs/synthetic.py:task=mqar,arch=mamba --workdir=runs/mqar-mamba

Tasks: mqar, selective_copying, induction; these feed the table `quickstart`; a run takes 5 s to 2 minutes on a CPU
core. Attention and Mamba solve all three; S4D, which treats every token alike, fails selective copying. And copying (a
row from its start) and lookup ("what was the 13th token?").
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import choose

TASKS = {
    "mqar": dict(length=16, vocab_size=16, n_pairs=3),
    "selective_copying": dict(length=32, vocab_size=16, n_tokens=4),
    "induction": dict(length=32, vocab_size=16),
    "copying": dict(length=32, vocab_size=16, n_tokens=8),
    "lookup": dict(length=32, vocab_size=32, n_questions=4, digits=2),
}
# At 4e-3 one attention seed of two never left recall's plateau (experiments/results/quickstart-h200), and on induction
# ended at 88 %; at 2e-3 S4D does not learn induction in time.
LEARNING_RATES = {"mqar": 2e-3, "selective_copying": 4e-3, "induction": 3e-3, "copying": 4e-3, "lookup": 4e-3}


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, task="mqar", arch="mamba")
    c = base.get_config()
    archs.use_bare(c, arg.arch)
    c.data.task = arg.task
    c.data[arg.task] = choose("task", arg.task, TASKS)
    c.steps, c.batch_size = 1000, 64 if arg.task == "mqar" else 32
    c.log_every, c.eval_every, c.eval_batches = 10, 50, 8
    c.checkpoint_every = 0  # a save at every new best would cost such short runs more than it could spare them
    c.target = 0.998
    c.model.update(attention=dict(n_heads=2))
    # Two thousand numbers of state a layer for each recurrence.
    c.model.mamba, c.model.s4d = dict(state=16), dict(state=32)
    c.optim.lr = LEARNING_RATES[arg.task]
    c.optim.warmup, c.optim.weight_decay = 50, 0.01
    return c
