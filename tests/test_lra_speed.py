"""Steps a second and memory by length: measured like a run, shown in two tables of the same rows."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from data.pipeline import Batch
from experiments.measurements import steps
from experiments.running import campaign, folders
from experiments.running.runs import RunSpec, command, texts
from experiments.tables import rows
from experiments.tables.definitions import TABLES
from experiments.tables.table import layout
from model.mixers import MIXERS
from tests.processes import ROOT, call
from tests.test_report import row
from train import config as configs
from train.run import prepare
from train.sharding import put_batch

CONFIG = "configs/lra_speed.py:arch=s4d,length=16,size=smoke"


@pytest.mark.scale
def test_a_measurement_leaves_a_row_like_a_runs(tmp_path):
    run = RunSpec(CONFIG, {"model.width": 8}, {"arch": "s4d"}, program="experiments.measurements.steps")
    ((name, item),) = campaign.plan([run], tmp_path).items()
    folders.claim(tmp_path / name, item.run, item.config_hash)
    module, *flags = command(item.run, tmp_path / name)[2:]
    code, printed, told = call(module, *flags)
    assert code == 0, told
    found = rows.row_of(tmp_path / name)
    assert (found["status"], found["config_hash"]) == ("finished", item.config_hash)
    assert found["metrics"]["steps_per_s"] > 0 and found["metrics"]["memory_gb"] == found["metrics"]["compiled_gb"]
    assert "steps/s" in printed and "GB by the compiler" in printed
    assert call(module, flags[0])[0] == 2, "without a folder there is nothing to do"


def test_a_row_says_who_counted_its_memory(monkeypatch):
    """Some devices tell of their memory, and not the most that was in use."""
    run = prepare(configs.load(CONFIG, [("model.width", "8"), ("steps", "2"), ("batch_size", str(jax.device_count()))]))
    for told, who in (
        ({"bytes_limit": 9}, "the compiler"),
        ({"peak_bytes_in_use": 7}, "the device"),
        (None, "the compiler"),
    ):
        monkeypatch.setattr(steps.jax, "local_devices", lambda told=told: [SimpleNamespace(memory_stats=lambda: told)])
        found = steps.measure(run)
        assert found["memory_counted"] == f"by {who}"
        assert (found["metrics"]["memory_gb"] == 7e-9) == (who == "the device")


@pytest.mark.scale
def test_memory_is_what_the_compiled_step_needs():
    found = []
    for length in (128, 1024):
        spec = f"configs/lra_speed.py:arch=s4d,length={length},size=smoke"
        run = prepare(configs.load(spec, [("batch_size", str(jax.device_count())), ("model.layers", "1")]))
        batch = put_batch(Batch(run.task, 0, "train", run.config.batch_size, 0), run.batch_sharding)
        found.append(steps.compiled_bytes(run.train_step.lower(run.abstract, batch).compile()))
    # Parameters and Adam's two moments of them, and activations of a row on each device, eight times as long.
    assert found[0] > 3 * 4 * run.params and 2 * found[0] < found[1] < 9 * found[0]


@pytest.mark.quick
def test_runs_are_of_published_sizes_and_stand_beside_published_numbers():
    speed = TABLES["lra_speed"]
    for run in speed.runs("small"):
        c = configs.load(run.config, texts(run))
        assert (c.batch_size, c.model.width, c.model.layers, c.data.majority.length) == (
            32,
            256,
            4,
            run.labels["length"],
        )
        assert c.model.causal == any(MIXERS[name].forward_only for name in c.model.mixers)
    assert layout(speed, "small").published["attention", "4096"].value == 1.4
    assert speed.also["memory_gb"]("small")["local", "3072"].value == 1.06
    assert not layout(speed, "smoke").published


def test_speed_and_memory_are_of_the_same_runs(tmp_path, monkeypatch):
    """Every run has its result already, so nothing is measured."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    out = Path("runs", "lra_speed-smoke")
    for name, item in campaign.plan(TABLES["lra_speed"].runs("smoke"), out).items():
        folders.claim(out / name, item.run, item.config_hash)
        figures = {"steps_per_s": 12.5, "memory_gb": item.run.labels["length"] / 1024}
        made = row(dict(item.run.labels), 0, 0.5, baselines={}) | {"metrics": figures}
        folders.write_json(out / name / "result.json", made | {"config_hash": item.config_hash})
    words = [sys.executable, "-m", "experiments.reproduce", "lra_speed", "--scale=smoke"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    speed, memory = ((folder / "table.md").read_text() for folder in (out, out / "memory_gb"))
    assert "| attention | 12.5 | 12.5 |" in speed and "| attention | 0.25 | 0.5 |" in memory
    assert done.stdout.count("24 finished before") == 1
