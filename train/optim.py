"""AdamW with schedules, clipping, and groups of parameters that mixers ask to treat apart.

Groups: `decay` (the default), `no_decay`, and `ssm` (no decay, learning rate times `optim.ssm_lr`). A config may put
parameters into others than their mixers do.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from model.build import Model
from model.errors import UserError
from model.paths import as_tree, by_path, matching
from train.objective import Batch, Sums

Sought = Callable[[Model, Any, Batch, jax.Array | None], Sums]  # what an objective is to a step
GROUPS = ("decay", "no_decay", "ssm")


def schedule(config: Mapping[str, Any], steps: int) -> optax.Schedule:
    """A linear warm-up, then constant, a cosine to `final_lr`, or the inverse square root of the step."""
    lr, warmup = config["lr"], config["warmup"]
    if config["schedule"] == "cosine":
        after = optax.cosine_decay_schedule(lr, max(steps - warmup, 1), alpha=config["final_lr"])
    elif config["schedule"] == "rsqrt":
        after = rsqrt(lr, max(warmup, 1))
    else:
        after = optax.constant_schedule(lr)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(lr / warmup, lr, max(warmup - 1, 1)), after], [warmup])


def rsqrt(lr: float, warmup: int) -> optax.Schedule:
    """`lr` when the warm-up ends, then falling with the inverse square root of the step."""
    return lambda step: lr * (warmup / (jnp.maximum(step, 0) + warmup)) ** 0.5


def path_name(path: tuple) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def groups(params: Any, rules: list[tuple[str, str]], instead: Sequence[tuple[str, str]] = ()) -> Any:
    """The group of every parameter; two rules that disagree on one are an error in a mixer. Boxed ones count as one.

    Of the patterns `instead`, a config's own, the last that names a parameter is before all rules.
    """

    def group(path, _):
        name = path_name(path)
        if given := [group for pattern, group in instead if re.fullmatch(pattern, name)]:
            return given[-1]
        found = {group for pattern, group in rules if re.fullmatch(pattern, name)}
        if len(found) > 1 or not found <= set(GROUPS):
            raise ValueError(f"parameter {name} is claimed by groups {sorted(found)}; it needs exactly one of {GROUPS}")
        return found.pop() if found else "decay"

    return jax.tree_util.tree_map_with_path(group, params, is_leaf=is_box)


def is_box(x: Any) -> bool:
    return isinstance(x, nn.meta.AxisMetadata)


def names_of(params: Any) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)]


def optimizer(config: Mapping[str, Any], steps: int, rules: list[tuple[str, str]]) -> optax.GradientTransformation:
    """Clip, Adam, decay, per-group rates, schedule: in that order."""
    c = config

    def decayed(params):
        return jax.tree.map(lambda group: group == "decay", groups(params, rules, c["groups"]))

    def scale_groups(updates, params):
        factor = {"decay": 1.0, "no_decay": 1.0, "ssm": c["ssm_lr"]}
        return jax.tree.map(lambda u, group: u * factor[group], updates, groups(params, rules, c["groups"]))

    parts = [optax.clip_by_global_norm(c["clip"])] if c["clip"] else []
    parts += [
        optax.scale_by_adam(c["b1"], c["b2"], c["eps"]),
        optax.add_decayed_weights(c["weight_decay"], mask=decayed),
    ]
    if c["ssm_lr"] != 1.0:
        parts.append(optax.stateless(scale_groups))
    tx = optax.chain(*parts, optax.scale_by_learning_rate(schedule(c, steps)))
    if c["frozen"]:
        tx = optax.masked(tx, lambda params: trained(params, c["frozen"]))

    def init(params):
        matching([pattern for pattern, _ in c["groups"]], names_of(params), "optim.groups")
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)


def trained(params: Any, frozen: Sequence[str]) -> Any:
    """Whether each parameter is trained; `frozen` are patterns of those that are not. Boxed ones count as one."""
    names = names_of(params)
    held = matching(frozen, names, "optim.frozen")
    if len(held) == len(names):
        raise UserError(f"optim.frozen {tuple(frozen)} are all {len(names)} parameters; leave one to be trained")
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path) not in held, params, is_leaf=is_box)


def holding(objective: Sought, frozen: Sequence[str]) -> Sought:
    """The same objective, from which frozen parameters get no gradient: it is neither computed nor counted.

    Nor are those that it measures measured anew.
    """

    def held(model: Model, params: Any, batch: Batch, rng: jax.Array | None) -> Sums:
        mask = trained(params, frozen)
        sums = objective(
            model, jax.tree.map(lambda x, on: x if on else jax.lax.stop_gradient(x), params, mask), batch, rng
        )
        if "running" in sums:
            on = by_path(mask)
            sums["running"] = as_tree({path: x for path, x in by_path(sums["running"]).items() if on[path]})
        return sums

    return held if frozen else objective
