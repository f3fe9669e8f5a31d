"""One short run for every mesh axis, each two devices wide: `python -m tests.host_axes FILE [PROCESS]`.

And one across `data` whose norms are over the batch. Alone it has both devices. As process 0 or 1 of two it has one,
and the axis lies across the processes; the coordinator is named by JAX_COORDINATOR_ADDRESS. Process 0 writes what the
runs measured.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax

from data import pipeline
from model.contract import RUNNING
from model.paths import by_path
from tests.draws import HASH
from train import config as configs
from train.evaluate import means, scalars, tally
from train.feed import Feed
from train.run import prepare
from train.sharding import AXES

SMALL = {"model.layers": 1, "model.width": 16, "model.position": "none", "model.mlp": "none"}  # quick to compile
SMALL |= {"data.mqar.length": 16, "eval_batches": 2, "steps": 3}
ROWS = {"data": 6, "fsdp": 6, "expert": 6}  # what shares out rows; the others get a batch that two do not divide


def measured(axis: str, **more: Any) -> dict[str, list[float] | float]:
    asked = SMALL | {"mesh.data": 1, f"mesh.{axis}": 2, "batch_size": ROWS.get(axis, 5)} | more
    run = prepare(configs.load("configs/debug.py", [(key, str(value)) for key, value in asked.items()]))
    c, state, steps = run.config, run.init(), []
    with Feed(run, state) as feed:
        for _ in range(c.steps):
            state, sums = run.train_step(state, next(feed))
            steps.append(jax.device_get(sums))
    batches = pipeline.eval_batches(run.task, c.data.seed, "validation", c.batch_size, c.eval_batches)
    found = {key: [float(sums[key][0] / sums[key][1]) for sums in steps] for key in ("loss", "grad_norm")}
    paths = by_path(state.params).items()
    found |= {path: jax.device_get(x).ravel().tolist() for path, x in paths if path.rpartition("/")[2] in RUNNING}
    return found | scalars(means(tally(run.eval_step, state.params, batches, run.batch_sharding)), "validation")


if __name__ == "__main__":
    file, *process = sys.argv[1:]
    if process:
        jax.distributed.initialize(num_processes=2, process_id=int(process[0]))
    assert jax.device_count() == 2
    jax.random.key = functools.partial(jax.random.key, impl=HASH)
    everything = {axis: measured(axis) for axis in AXES}
    everything["batchnorm"] = measured("data", **{"model.norm": "batchnorm", "model.causal": False})
    if jax.process_index() == 0:
        Path(file).write_text(json.dumps(everything))
