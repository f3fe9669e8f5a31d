"""A run saved by two processes with eight devices goes on in one process, on whatever mesh is left, as if nothing had
happened: the same parameters to the bit, the same data, the next loss within rounding.

`python -m tests.test_elastic WORKDIR` is one of the two processes.
"""

import hashlib
import shutil
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from tests.flags import FAST
from tests.processes import fork
from tests.test_hosts import known
from train import config as configs
from train import hosts, loop
from train.checkpoint import Checkpoints, step_folder
from train.log import read_metrics

pytestmark = pytest.mark.scale

SAVED, STEPS = 3, 5


def config(**mesh):
    small = {"model.width": 16, "model.layers": 1, "data.mqar.length": 16, "batch_size": 8, "optim.warmup": 1}
    when = {"steps": STEPS, "log_every": 1, "checkpoint_every": SAVED, "eval_every": 0}
    settings = small | when | {f"mesh.{axis}": size for axis, size in mesh.items()}
    return configs.load("configs/debug.py", [(key, str(value)) for key, value in settings.items()])


def digest(params) -> str:
    """Of the bits of all parameters, wherever they lie."""
    every = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        whole = leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        every.update(np.asarray(whole).tobytes())
    return every.hexdigest()


def without_evaluation(*args) -> dict[str, float]:
    return {"validation/accuracy": 0.0}


def one_of_two(workdir: str) -> None:
    save = Checkpoints.save

    def telling(self, step, state, *args, **options):
        print(f"saved {step} {digest(state.params)}", flush=True)
        save(self, step, state, *args, **options)

    Checkpoints.save, loop.validate = telling, without_evaluation
    with hosts.joined(True):
        loop.train(config(data=2, fsdp=4), workdir)


def made_by_two(folder) -> str:
    """Lets two processes make a run up to its first checkpoint and beyond; the bits that they saved there."""
    flags = f"--xla_force_host_platform_device_count=4 {FAST}"
    two = [fork("tests.test_elastic", str(folder), **place, XLA_FLAGS=flags) for place in known(2)]
    assert [process.wait(300) for process in two] == [0, 0], [process.stderr for process in two]
    first, second = ([line.split()[1:] for line in p.stdout.splitlines() if line.startswith("saved")] for p in two)
    assert first == second and int(first[0][0]) == SAVED
    shutil.rmtree(step_folder(folder / "checkpoints", STEPS))
    return first[0][1]


def go_on(folder, monkeypatch, **mesh) -> tuple:
    """Resumes in this process; the result, and what was restored: the step, its bits, how many devices hold it."""
    restore, found = Checkpoints.restore, []

    def noting(self, like, *args, **options):
        step, state = restore(self, like, *args, **options)
        places = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)}
        found.append((step, digest(state.params), places))  # before the next step takes them
        return step, state

    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "restore", noting)
        patched.setattr(loop, "validate", without_evaluation)
        patched.setattr(jax, "devices", lambda *backend: devices)
        result = loop.train(config(**mesh), str(folder))
    (only,) = found
    return result, only


def losses(folder) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_metrics(folder / "metrics.jsonl") if "loss" in event}


@pytest.mark.long
def test_a_run_goes_on_with_fewer_devices(tmp_path, monkeypatch):
    bits = made_by_two(tmp_path / "two")
    two = losses(tmp_path / "two")
    for mesh in (dict(data=1, fsdp=2, tensor=2), dict(data=1, fsdp=1, tensor=2), dict(data=1, fsdp=1)):
        devices = int(np.prod(list(mesh.values())))
        folder = shutil.copytree(tmp_path / "two", tmp_path / str(devices))
        result, restored = go_on(folder, monkeypatch, **mesh)
        assert restored == (SAVED, bits, {devices})
        one = losses(folder)
        assert one[SAVED + 1] == pytest.approx(two[SAVED + 1], rel=1e-6)
        assert one == pytest.approx(two, rel=1e-5) and len(one) == STEPS
        changed = {change["key"] for change in result["changes"] if change["step"] == SAVED}
        assert changed >= {"mesh.data", "mesh.fsdp"} and len(changed) == len(result["changes"])


if __name__ == "__main__":
    one_of_two(sys.argv[1])
