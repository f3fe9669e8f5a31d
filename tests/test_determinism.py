"""The bench of bits: it kills real runs, and sees the smallest difference."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import determinism, rows
from tests.processes import fork
from train.checkpoint import Checkpoints

SMALL = {"steps": 12, "batch_size": 2, "eval_batches": 1, "checkpoint_every": 3, "eval_every": 0, "model.width": 16}
SMALL |= {"model.layers": 1, "model.mlp": "none", "data.mqar.length": 16, "data.mqar.vocab_size": 32}


def test_a_run_is_killed_resumed_and_compared(tmp_path):
    overrides = [f"--config.{key}={value}" for key, value in SMALL.items()]
    out = tmp_path / "bits.jsonl"
    flags = ("--config=configs/debug.py", *overrides, "--kills=1", f"--out={out}")
    process = fork("experiments.bench", "determinism", *flags)
    assert process.wait(300) == 0, process.stderr
    (row,) = rows.read(out)
    assert (row["repeated"], row["resumed"], row["identical"]) == ("identical", "identical", True)
    assert (row["steps"], row["kills"], len(row["killed_at"]), row["device"]) == (12, 1, 1, "cpu")
    assert "killed after steps" in process.stdout
    assert "| identical | identical |" in out.with_suffix(".md").read_text()


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
def test_what_cannot_be_run_says_so_in_its_row(tmp_path):
    row = {"config": "a.py", "identical": False, "error": "a.py did not finish: it broke"}
    assert determinism.sentence(row) == "a.py: a.py did not finish: it broke"
    assert "| a.py | failed |" in determinism.table([row])
