"""How many steps the devices are given at once, so that those of small models do not wait for the host after each."""

import operator

import jax
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from data.task import Example
from train.objective import Sums

# Evaluations and checkpoints are due every so many tens of steps: groups of ten are seldom cut short by them.
MOST = 10
# Operations of a step on one device: a millisecond's, at 1e14 a second. While a device is busy for longer, its host
# has long asked for the next step; then groups would only make a stop wait, and waste what short ones leave unused.
SMALL = 1e11
ROOM = 128 << 20  # bytes that batches waiting on a device may take


def most_steps(c: ConfigDict, rows: NamedSharding, params: int, length: int, example: Example) -> int:
    """How many steps one program takes at most.

    Bits are those of a program, so this follows from the config and the devices, and nothing measured has a say in it.
    On a CPU it is one: nobody waits there, and a loop around the step slows it down.
    """
    if c.steps_per_dispatch:
        return c.steps_per_dispatch
    devices = rows.mesh.devices
    if devices.flat[0].platform == "cpu" or operations(c, params, length) / devices.size > SMALL:
        return 1
    held = rows.shard_shape((c.batch_size,))[0] * sum(array.nbytes for array in example.values())
    return int(np.clip(ROOM // held, 1, MOST))


def operations(c: ConfigDict, params: int, length: int) -> float:
    """About how many a step takes: six a token and parameter, and the scores as if every layer had them."""
    return c.batch_size * length * (6.0 * params + 12.0 * length * c.model.width * c.model.layers)


def steps_from(step: int, c: ConfigDict, most: int) -> int:
    """How many steps are taken at once after a step: as many as there are until something is due, at most `most`.

    A function of the step alone: what makes batches ahead of the loop divides them as the loop does.
    """
    due = [every - step % every for every in (c.eval_every, c.checkpoint_every) if every]
    return min(most, c.steps - step, *due)


def apart(sums: Sums, n: int, most: int) -> list[Sums]:
    """The sums of each of the n steps that were taken at once."""
    return [sums] if most == 1 else [jax.tree.map(operator.itemgetter(i), sums) for i in range(n)]
