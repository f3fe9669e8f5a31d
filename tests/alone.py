"""A step that knows of no mesh, and the state it starts from: steps on meshes start there, and are held against it."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from data import pipeline
from model.groups import group_rules
from train import optim, sharding
from train.run import Run
from train.step import RunState, init_state, train_step


def start(run: Run) -> tuple[RunState, Callable[[RunState], tuple[RunState, dict]]]:
    """The state before the first step, and the step: to the state after it and what that measured."""
    c = run.config
    batch = pipeline.batch_at(run.task, c.data.seed, "train", c.batch_size, 0)
    tx = optim.optimizer(c.optim, c.steps, group_rules(c.model))
    seen = run.objective.view(batch, None)
    first = jax.device_get(jax.jit(lambda seed: nn.unbox(init_state(run.model, tx, seen, seed)))(np.uint32(c.seed)))
    step = jax.jit(train_step(run.model, run.objective, tx, optim.schedule(c.optim, c.steps), c.optim.accumulate))
    return first, lambda state: jax.device_get(step(state, batch))


def alone(run: Run) -> tuple[RunState, RunState, dict]:
    """The state before and after the first step, and what that measured."""
    first, step = start(run)
    return first, *step(first)


def nudged(first: RunState, seed: int) -> RunState:
    """With every parameter's last bit changed, up or down."""
    rng = np.random.default_rng(seed)

    def nudge(x: np.ndarray) -> np.ndarray:
        return x * (1 + rng.choice([-1, 1], x.shape) * np.finfo(np.float32).eps).astype(np.float32)

    return first.replace(params=jax.tree.map(nudge, first.params))


def placed(first: RunState, run: Run) -> RunState:
    """That state on the mesh of a run, as it would have been drawn there (tests/test_train.py)."""
    return jax.tree.map(lambda leaf, there: jax.device_put(leaf, there.sharding), first, run.abstract)


def one_step(run: Run, first: RunState) -> tuple[RunState, dict[str, Any]]:
    """On the mesh of a run."""
    batch = pipeline.Batch(run.task, run.config.data.seed, "train", run.config.batch_size, 0)
    return jax.device_get(run.train_step(placed(first, run), sharding.put_batch(batch, run.batch_sharding)))
