"""Everything a config describes, built: task, mesh, model, optimizer, abstract state, compiled steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import logging
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

import data
from data import pipeline
from model import build, placement
from model.contract import RUNNING
from model.errors import UserError
from model.groups import group_rules
from model.ops.cudnn_attention import deterministic as deterministic_attention
from model.ops.fused import AMPERE
from model.paths import by_path
from model.stack import loops
from train import config as configs
from train import dispatch, hosts, sharding
from train.objective import Objective
from train.objectives import build as build_objective
from train.optim import holding, optimizer, schedule
from train.step import RunState, eval_step, init_state, several, train_step


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run that do not change while it runs."""

    config: ConfigDict
    task: data.Task
    mesh: Mesh
    batch_sharding: NamedSharding
    objective: Objective
    model: build.Model
    abstract: RunState  # shapes and shardings of the state
    init: Callable[[], RunState]
    train_step: Callable[[RunState, Any], tuple[RunState, dict]]  # donates the state
    most: int  # steps that the loop takes at once
    # Takes the first n of so many stacked batches, or the one batch as it is where one is the most; donates too.
    train_steps: Callable[[RunState, Any, int], tuple[RunState, dict]]
    eval_step: Callable[[Any, Any], dict]

    @property
    def params(self) -> int:
        """Numbers that are there to be trained."""
        found = by_path(self.abstract.params).items()
        return sum(math.prod(x.shape) for path, x in found if path.rpartition("/")[2] not in RUNNING)


def prepare(config: ConfigDict, task: data.Task | None = None, devices: Sequence[jax.Device] | None = None) -> Run:
    """Builds a run; nothing is compiled yet, and a mistake in the config has been told by the time this returns.

    Another task may be given than the config's, and other devices than this machine's.
    """
    configs.check(config)
    task = task or data.build(config.data.task, config.data[config.data.task].to_dict())
    mesh, rules = sharding.make_mesh(config.mesh, devices), sharding.rules_of(config.mesh)
    sharding.check_rules(mesh, rules)
    for split in ("validation", "test"):
        pipeline.check_countable(task, split, config.eval_batches)
    objective = build_objective(config.objective.to_dict(), task)
    for length in objective.lengths:
        sharding.check_batch(mesh, rules, config.batch_size, length, config.optim.accumulate)
    model = model_for(objective, config)
    tx = optimizer(config.optim, config.steps, group_rules(config.model))
    example = pipeline.batch_at(task, config.data.seed, "train", 1, 0)

    def init(seed: jax.Array) -> RunState:
        return init_state(model, tx, objective.view(example, None), seed)

    # The seed is an argument, so that runs differing in it share their compiled programs.
    seed = np.uint32(config.seed)
    with sharding.in_force(mesh, rules):  # what the mesh cannot share out is told here
        traced, boxed = jax.make_jaxpr(init, return_shape=True)(seed)
        warn_of_slowness()
    unboxed = nn.unbox(boxed)

    def draw(seed: jax.Array) -> RunState:
        """`init` without its boxes, and without going through the model once more."""
        return jax.tree.unflatten(jax.tree.structure(unboxed), jaxpr_as_fun(traced)(seed))

    shardings = sharding.shardings(boxed, mesh, rules)
    for line in sharding.kept_whole(boxed.params, mesh, rules) if jax.process_index() == 0 else ():
        logging.warning(line)
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), unboxed, shardings)

    rate = schedule(config.optim, config.steps)
    step = train_step(model, holding(objective, config.optim.frozen), tx, rate, config.optim.accumulate)
    replicated, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh, rules)
    options = dict(donate_argnums=0, out_shardings=(shardings, replicated))
    one_step = on_mesh(step, mesh, config, **options)
    params = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract.params))
    most = dispatch.most_steps(config, rows, params, max(objective.lengths), example)
    many_steps = on_mesh(several(step, most), mesh, config, **options)
    return Run(
        config=config,
        task=task,
        mesh=mesh,
        batch_sharding=rows,
        objective=objective,
        model=model,
        abstract=abstract,
        init=partial(on_mesh(draw, mesh, config, out_shardings=shardings), seed),
        train_step=one_step,
        most=most,
        train_steps=many_steps if most > 1 else lambda state, batch, n: one_step(state, batch),
        eval_step=on_mesh(eval_step(model, objective), mesh, config, out_shardings=replicated),
    )


def decided(config: ConfigDict, most: int) -> list[str]:
    """What a config leaves open, in a line each: what the platform in force makes of it."""
    layers = config.model.layers
    lines = [f"{layers} layers, {'looped over' if loops(layers) else 'unrolled'}"]
    lines = lines if config.model.scan is None and layers > 1 else []
    return lines + [f"{most} steps in a dispatch"] * (most > 1)


def say_what_is_decided(run: Run) -> None:
    if jax.process_index() == 0:
        with sharding.in_force(run.mesh, sharding.rules_of(run.config.mesh)):
            print(*(f"{line}\n" for line in decided(run.config, run.most)), sep="", end="", flush=True)


def warn_of_slowness() -> None:
    if placement.platform() == "gpu" and placement.capability() < AMPERE:
        chip, needed = placement.chip(), ".".join(map(str, AMPERE))
        logging.warning("%s: kernels need %s, so plain XLA takes their place, which is slower", chip, needed)


def model_for(objective: Objective, config: ConfigDict) -> build.Model:
    section = config.model.to_dict()
    objective.check_kind(section["kind"])
    model = build.build(section, objective.asked)
    objective.check_model(model, section)
    return model


def at_length(run: Run, length: int) -> Run:
    """The same model asked at another length: as many examples, in batches of about as many tokens.

    Where rows are compared with each other a batch has as many rows as before, else others would be asked.
    """
    c, mesh = run.config.copy_and_resolve_references(), run.mesh
    rules = sharding.rules_of(c.mesh)
    with sharding.in_force(mesh, rules):
        share = placement.shards("batch")  # a row for every device
    try:
        changed = run.task.resized(length)
        task = data.build(run.task.name, c.data[run.task.name].to_dict() | changed)
        objective = build_objective(c.objective.to_dict(), task)
        for each in objective.lengths:
            sharding.check_batch(mesh, rules, share, each, accumulate=1)
    except UserError as error:
        raise UserError(f"test_lengths has {length!r}: {error}") from None
    c.data[task.name].update(changed)
    if not objective.compares_rows:
        examples = c.batch_size * c.eval_batches
        room = c.batch_size // c.optim.accumulate * run.task.length // length
        c.batch_size = max((n for n in range(share, room + 1, share) if examples % n == 0), default=share)
        c.eval_batches, c.optim.accumulate = examples // c.batch_size, 1
    model = model_for(objective, c)  # the same parameters; where the tail begins may depend on the length
    step = on_mesh(eval_step(model, objective), mesh, c, out_shardings=sharding.replicated(mesh))
    return dataclasses.replace(run, config=c, task=task, objective=objective, model=model, eval_step=step)


def on_mesh(function: Callable, mesh: Mesh, config: ConfigDict, **options: Any) -> Callable:
    """Jitted, with the mesh and the axis rules in force while it is traced, and only then.

    On a GPU a deterministic run's programs get no operations whose bits depend on the order in which threads arrive.
    """
    exact, rules = config.deterministic, sharding.rules_of(config.mesh)

    @wraps(function)
    def traced(*args):
        with sharding.in_force(mesh, rules), deterministic_attention(exact):
            return function(*args)

    if exact and mesh.devices.flat[0].platform == "gpu":
        options["compiler_options"] = {"xla_gpu_exclude_nondeterministic_ops": True}
    return hosts.in_step(jax.jit(traced, **options))
