"""The bench of bits: it kills real runs, and sees the smallest difference."""

import json
from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.measurements import determinism
from experiments.running.runs import command
from model.errors import UserError
from tests.processes import fork
from train.checkpoint import Checkpoints

pytestmark = pytest.mark.scale

SMALL = {"steps": 12, "batch_size": 2, "eval_batches": 1, "checkpoint_every": 3, "eval_every": 0, "model.width": 16}
SMALL |= {"model.layers": 1, "model.mlp": "none", "data.mqar.length": 16, "data.mqar.vocab_size": 32}


class Forked(fork):
    """Seconds quicker to start than an interpreter, with what the bench asks of a subprocess.Popen."""

    def poll(self) -> int | None:
        return None if self.running() else self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    @property
    def returncode(self) -> int:
        return self.process.exitcode


@contextmanager
def forked(run, folder):
    process = Forked(*command(run, folder)[2:])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("norm", [{}, {"model.norm": "batchnorm", "model.causal": False}], ids=["rmsnorm", "batchnorm"])
def test_a_run_is_killed_resumed_and_compared(norm, monkeypatch):
    monkeypatch.setattr(determinism, "started", forked)
    row = determinism.measure("configs/debug.py", SMALL | norm, kills=1)
    assert (row["repeated"], row["resumed"], row["identical"]) == ("identical", "identical", True)
    assert (row["steps"], row["kills"], len(row["killed_at"]), row["device"]) == (12, 1, 1, "cpu")
    assert "12 steps" in determinism.sentence(row) and "| 1 | identical | identical |" in determinism.SHEET.table([row])


def test_a_run_that_breaks_is_a_row_and_a_mistake_is_told_at_once(tmp_path):
    out, words = tmp_path / "bits.jsonl", ("experiments.bench", "determinism", "--config=configs/debug.py")
    process = fork(*words, "--config.mesh.fsdp=64", f"--out={out}")
    assert process.wait(120) == 1, process.stderr
    row = json.loads(out.read_text())
    assert not row["identical"] and "needs a multiple of 64 devices" in row["error"]
    assert row["error"] in process.stdout and row["device"] is None
    assert "| configs/debug.py | failed |" in out.with_suffix(".md").read_text()
    with pytest.raises(UserError, match="closest: model"):
        determinism.measure("configs/debug.py", {"model.widht": 1}, kills=1)


def recorded(folder, losses, weight):
    """What a run leaves: its log and its last checkpoint."""
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": float(loss)}) + "\n" for step, loss in losses]
    (folder / "metrics.jsonl").write_text("".join(lines))
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, {"params": {"w": jnp.asarray([1.0, weight])}, "step": jnp.int32(3)})
    return folder


@pytest.mark.quick
def test_one_bit_is_a_difference(tmp_path):
    losses = [(1, np.float32(2.0)), (2, np.float32(1.9)), (3, np.float32(0.1))]
    nudged = [*losses[:1], (2, np.nextafter(np.float32(1.9), np.float32(0))), *losses[2:]]
    calm = recorded(tmp_path / "calm", losses, 0.5)
    for name, other, weight, told in [
        ("same", losses, 0.5, "identical"),
        ("nudged", nudged, 0.5, "from step 2"),
        ("short", losses[:2], 0.5, "from step 3"),
        ("twice", [*losses[:2], *losses[1:]], 0.5, "from step 2"),
        ("weights", losses, np.nextafter(np.float32(0.5), np.float32(1)), "checkpoint: params/w"),
    ]:
        assert determinism.compare(calm, recorded(tmp_path / name, other, weight)) == told


@pytest.mark.quick
def test_architectures_are_tried_by_their_names():
    """And by default those of the kernels of matrix states and of the delta rule too."""
    assert determinism.specs("gla, kda") == ["configs/debug.py:arch=gla", "configs/debug.py:arch=kda"]
    assert set(determinism.specs()) >= {f"configs/debug.py:arch={arch}" for arch in ("gla", "deltanet", "kda", "rwkv7")}
    with pytest.raises(UserError, match=r"unknown arch 'kdaa'.*closest: kda"):
        determinism.specs("gla,kdaa")


@pytest.mark.quick
def test_architectures_are_named_in_one_way():
    process = fork("experiments.bench", "determinism", "--archs=gla", "--config=configs/debug.py")
    assert process.wait(60) == 2
    assert "allowed: one of them; closest: --config=configs/debug.py:arch=gla" in process.stderr
