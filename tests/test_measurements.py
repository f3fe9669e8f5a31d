"""Measuring: the real loop, whole rows whatever the disk does, and starts with an empty cache."""

import json
import subprocess
import sys

import pytest

from experiments.measurements import startup
from model.errors import UserError
from tests.processes import ROOT, call
from tests.test_experiments import TINY

DEBUG = "configs/debug.py"


@pytest.mark.scale
def test_overhead_is_measured_on_the_real_loop(tmp_path):
    file = tmp_path / "new" / "bench.jsonl"
    code, printed, _ = call(
        "experiments.bench", "loop", f"--config={DEBUG}", *TINY, "--steps=20", "--rounds=2", f"--out={file}"
    )
    assert code == 0
    (found,) = map(json.loads, file.read_text().splitlines())
    # Wide bounds: on a busy machine either side may have the bad luck.
    assert found["step_ms"] > 0 < found["loop_ms"]
    assert -2 < found["lowest"] <= found["overhead"] <= found["highest"] < 1
    assert f"{DEBUG}: {found['overhead']:.1%} overhead" in printed


STUB = """
import resource, signal
from experiments import bench
from train import cli

def rows():
    yield {"n": 1}, "one"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    yield {"n": 2}, "two"

bench.BENCHES["features"] = bench.Bench(rows, ("out",), lambda rows: "row\\n" * 20 * len(rows))
cli.run(bench.main)
"""


@pytest.mark.parametrize(("room", "full"), [(100, "rows.jsonl"), (1000, "")])
def test_rows_of_a_bench_stay_when_the_disk_is_full(room, full, tmp_path):
    file = tmp_path / "rows.jsonl"
    words = [sys.executable, "-c", STUB.replace("ROOM", str(room)), "features", f"--out={file}"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = [json.loads(line)["n"] for line in file.read_text().splitlines()]
    if full:
        assert ended.returncode == 2 and f"cannot write {tmp_path / full}: File too large" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
    assert found == ([1] if full else [1, 2])
    assert (tmp_path / "rows.md").read_text() == "row\n" * 20 * len(found)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "rows.md"}


PART = """
from experiments import bench
from experiments.measurements import attention_speed
from train import cli

def measure(rounds, part):
    rows = ({"case": case, "n": 2048, "contender": "xla", "forward_ms": MS} for case in ("causal", "fire"))
    yield from filter(part, rows)

attention_speed.measure = measure
cli.run(bench.main)
"""


def test_a_part_is_measured_anew_among_the_rows_of_before(tmp_path):
    file = tmp_path / "rows.jsonl"

    def measured(ms, *only):
        words = [sys.executable, "-c", PART.replace("MS", str(ms)), "attention", f"--out={file}", *only]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)

    for ms, only in ((1, ()), (2, ("--only=case=fire",))):
        assert measured(ms, *only).returncode == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["case"], row["forward_ms"]) for row in rows] == [("causal", 1), ("fire", 2)]
    assert file.with_suffix(".md").read_text().count("| xla |") == 2
    file.write_text(json.dumps(rows[0] | {"device": "H200"}))
    refused = measured(3, "--only=case=fire")
    assert (refused.returncode, refused.stdout) == (2, "") and "has rows of device H200, and these" in refused.stderr


def test_startup_is_timed_twice_with_one_new_cache(monkeypatch, tmp_path):
    """A stand-in that is slow as long as the cache is empty, and notes whether it was."""
    program = (
        "import os, pathlib, sys, time\n"
        "cache = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])\n"
        "print(cache.exists(), file=open(sys.argv[2], 'a'))\n"
        "time.sleep(0 if cache.exists() else 1)\n"
        "cache.mkdir(exist_ok=True)\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "folder.mkdir()\n"
        "(folder / 'metrics.jsonl').write_text('{}')\n"
        "time.sleep(60)\n"
    )
    seen = tmp_path / "seen"
    monkeypatch.setattr(startup, "command", lambda run, folder: [sys.executable, "-c", program, str(folder), str(seen)])
    found = startup.measure(DEBUG, {})
    assert seen.read_text().split() == ["False", "True"] and found["first_s"] > 1 and found["second_s"] > 0
    assert found["ratio"] == pytest.approx(found["second_s"] / found["first_s"])
    monkeypatch.setattr(startup, "command", lambda run, folder: [sys.executable, "-c", "raise SystemExit('it broke')"])
    with pytest.raises(UserError, match="it broke"):
        startup.measure(DEBUG, {})
