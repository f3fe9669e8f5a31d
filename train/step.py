"""One training step and one evaluation step, as pure functions of the run's state and a batch."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from model.build import Model
from model.paths import as_tree, by_path
from train.objective import Batch, Objective, Sums, arguments


@struct.dataclass
class RunState:
    """Everything that a run carries from step to step; what is saved, and all that is needed to go on."""

    seed: jax.Array  # uint32; with the step, all that randomness in training depends on
    step: jax.Array  # int32, updates tried so far
    params: Any
    opt_state: Any
    data_offset: jax.Array  # int32, batches skipped by roll-backs
    nonfinite: jax.Array  # int32, steps whose loss, gradient or update was not finite
    rollbacks: jax.Array  # int32, returns to an earlier checkpoint


def init_state(model: Model, tx: optax.GradientTransformation, batch: Batch, seed: jax.Array) -> RunState:
    """The state before the first step; parameters still boxed with their logical axis names."""
    params = model.init(jax.random.key(seed), batch["inputs"], **arguments(batch))["params"]
    zero = jnp.zeros((), jnp.int32)
    counts = dict(step=zero, data_offset=zero, nonfinite=zero, rollbacks=zero)
    return RunState(seed=jnp.asarray(seed, jnp.uint32), params=params, opt_state=tx.init(params), **counts)


def train_step(
    model: Model,
    objective: Objective,
    tx: optax.GradientTransformation,
    lr: optax.Schedule,
    accumulate: int = 1,
) -> Callable[[RunState, Batch], tuple[RunState, Sums]]:
    """The update. Randomness is a function of (seed, step), so nothing random is carried.

    An update that is not finite, or would leave a state that is not, is counted and not applied, so that the state is
    good whatever the loop does next.
    """

    def gradient(params, batch, rng):
        """Of the loss's sum: divided by its count once all parts of a batch are added up."""

        def total(params):
            sums = objective(model, params, batch, rng)
            return sum(pair[0] for name, pair in sums.items() if name == "loss" or name.startswith("losses/")), sums

        return jax.grad(total, has_aux=True)(params)

    def step(state: RunState, batch: Batch) -> tuple[RunState, Sums]:
        rng = jax.random.fold_in(jax.random.key(state.seed), state.step)
        if accumulate == 1:
            grads, sums = gradient(state.params, batch, rng)
        else:
            grads, sums = accumulated(gradient, state.params, batch, rng, accumulate)
        grads = jax.tree.map(lambda grad: grad / jnp.maximum(sums["loss"][1], 1.0), grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if running := sums.pop("running", None):
            params = as_tree(by_path(params) | by_path(running))
        grad_norm = optax.global_norm(grads)
        finite = jnp.isfinite(sums["loss"][0]) & jnp.isfinite(grad_norm) & all_finite((params, opt_state))
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        one = jnp.ones((), jnp.float32)
        sums |= {"grad_norm": (grad_norm, one), "lr": (lr(scheduled(state)) * one, one)}
        sums["finite"] = (finite.astype(jnp.float32), one)
        state = state.replace(
            step=state.step + 1, params=params, opt_state=opt_state, nonfinite=state.nonfinite + ~finite
        )
        return state, sums

    return step


def scheduled(state: RunState) -> jax.Array:
    """Where in its schedule an optimizer is: an update that was not applied has left it where it was."""
    counts = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")
    return counts[-1][1] if counts else state.step


def several(
    step: Callable[[RunState, Batch], tuple[RunState, Sums]], most: int
) -> Callable[[RunState, Batch, int], tuple[RunState, Sums]]:
    """Up to `most` steps at once: the first n of batches stacked `[most, ...]`; their sums are stacked alike.

    All numbers of steps share one program, so that the bits of a step do not depend on which others came with it. It
    goes through all batches and drops what comes after the n-th: a count of rounds that is known only while it runs
    would have a GPU ask its host before each.
    """

    def steps(state: RunState, batches: Batch, n: int) -> tuple[RunState, Sums]:
        def one(state, xs):
            i, batch = xs
            new, sums = step(state, batch)
            return jax.tree.map(lambda new, old: jnp.where(i < n, new, old), new, state), sums

        return jax.lax.scan(one, state, (jnp.arange(most), batches))

    return steps


def all_finite(tree: Any) -> jax.Array:
    """Whether every number in a tree is finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    good = jnp.stack([jnp.isfinite(x).all() for x in floats]).astype(jnp.float32)
    # A product, since that is not fused: else what is made of every leaf is made anew in the update of each, and the
    # time to compile grows with the square of their number.
    return jnp.dot(good, good) == len(floats)


def accumulated(gradient, params, batch, rng, n):
    """Gradients and sums over n micro-batches, equal to those of the whole batch.

    But for losses that are no sums over rows: what experts pay for their balance is of a micro-batch.
    """
    # Rows n apart go together, so that every micro-batch stays spread over the devices.
    micro = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0), batch)

    def add(total, xs):
        i, part = xs
        part = jax.tree.map(lambda x: nn.with_logical_constraint(x, ("batch",) + (None,) * (x.ndim - 1)), part)
        return jax.tree.map(jnp.add, total, gradient(params, part, jax.random.fold_in(rng, i))), None

    first = jax.tree.map(lambda x: x[0], micro)
    shapes = jax.eval_shape(gradient, params, first, rng)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, (jnp.arange(n), micro))
    return total


def eval_step(model: Model, objective: Objective) -> Callable[[Any, Batch], Sums]:
    """Sums over one batch."""

    def step(params: Any, batch: Batch) -> Sums:
        return objective(model, params, batch, None)

    return step
