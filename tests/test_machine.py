"""Runs at once share out a machine's cores and accelerators, and two launchers keep out of each other's way."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.running import folders, launch
from experiments.running.launch import Job, local
from experiments.running.machine import Claims, Machine, Slots, environment, look, share, shares
from experiments.running.runs import RunSpec
from model.errors import UserError
from tests.processes import wait_until

CORES = tuple(sorted(os.sched_getaffinity(0)))
GPUS = {"nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm"}


def dev(folder: Path, nodes) -> Path:
    for name in nodes:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.quick
@pytest.mark.parametrize(
    ("nodes", "environ", "variable", "devices"),
    [
        (GPUS, {}, "CUDA_VISIBLE_DEVICES", "0123"),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "5, 2"}, "CUDA_VISIBLE_DEVICES", "52"),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, "CUDA_VISIBLE_DEVICES", "1"),
        (GPUS, {"CUDA_VISIBLE_DEVICES": ""}, "", ""),
        (GPUS, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "", ""),
        (GPUS, {"JAX_PLATFORMS": "cpu"}, "", ""),
        ({"kfd", "dri/renderD128", "dri/renderD129", "dri/card0"}, {}, "HIP_VISIBLE_DEVICES", "01"),
        ({"kfd", "dri/renderD128"}, {"ROCR_VISIBLE_DEVICES": "3"}, "ROCR_VISIBLE_DEVICES", "3"),
        ({"dri/renderD128"}, {}, "", ""),  # a laptop's graphics
        ({f"accel{i}" for i in range(4)}, {}, "TPU_VISIBLE_CHIPS", "0123"),
        ({"vfio/vfio", *(f"vfio/{i}" for i in range(8))}, {}, "TPU_VISIBLE_CHIPS", "01234567"),
        ({"vfio/vfio", "vfio/14"}, {}, "", ""),  # some other hardware
        ({"null"}, {"CUDA_VISIBLE_DEVICES": "0"}, "", ""),
    ],
)
def test_accelerators_are_found_without_touching_them(nodes, environ, variable, devices, tmp_path):
    found = look(environ, dev(tmp_path, nodes))
    assert (found.variable, found.devices, found.cores) == (variable, tuple(devices), CORES)
    assert found.slots == (len(devices) or min(len(CORES), 8))


@pytest.mark.quick
def test_cores_are_shared_out():
    cores = list(range(8))
    parts = [share(cores, slot, 3) for slot in range(3)]
    assert sorted(core for part in parts for core in part) == cores
    assert min(map(len, parts)) >= 2
    assert share(cores, 11, 12) == tuple(cores)


@pytest.mark.quick
def test_devices_are_shared_out(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)

    def variables(machine: Machine, slots: int) -> list[dict]:
        return [environment(machine, given) for given in shares(machine, slots)]

    gpus = Machine(tuple(range(16)), ("4", "5", "7"), "CUDA_VISIBLE_DEVICES")
    assert variables(gpus, 3) == [{"CUDA_VISIBLE_DEVICES": device} for device in "457"]
    assert variables(gpus, 1) == [{}]  # all of them, as when it is started by hand
    assert variables(gpus, 2) == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5,7"}]
    # More runs than devices: in turn, and those on one device share its memory.
    assert variables(gpus, 4) == [
        {"CUDA_VISIBLE_DEVICES": "4", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.450"},
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "7"},
        {"CUDA_VISIBLE_DEVICES": "4", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.450"},
    ]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")
    assert variables(gpus, 4)[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.1"
    assert variables(Machine((0, 1)), 2) == [{}, {}]

    chips = Machine(tuple(range(16)), ("0", "1", "2", "3"), "TPU_VISIBLE_CHIPS")
    assert variables(chips, 1) == [{}]
    made = variables(chips, 2)
    assert [run["TPU_VISIBLE_CHIPS"] for run in made] == ["0", "1"]
    assert len({run["TPU_PROCESS_PORT"] for run in made}) == 2
    with pytest.raises(UserError, match=r"--jobs=5, but a TPU chip serves one run .*closest: 4"):
        shares(chips, 5)


REPORT = """
import json, os, pathlib, sys, time
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
names = ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION")
seen = {"cores": sorted(os.sched_getaffinity(0)), **{name: os.environ.get(name) for name in names}}
(folder / "part.json").write_text(json.dumps(seen))
(folder / "part.json").rename(folder / "seen.json")  # there at once and whole: the tests look while this runs
time.sleep(seconds)
(folder / "result.json").write_text(json.dumps({"config_hash": "abc"}))
"""


def job(out: Path, name: str, seconds: float = 0.5) -> Job:
    folders.claim(out / name, RunSpec("configs/debug.py", {}, {"name": name}), "abc")
    return Job(name, [sys.executable, "-c", REPORT, str(out / name), str(seconds)], out / name)


def seen(out: Path, name: str) -> dict:
    return json.loads((out / name / "seen.json").read_text())


@pytest.fixture
def two_gpus(tmp_path, monkeypatch) -> Machine:
    """A machine with a folder of claims to itself, which no other test's launcher looks at."""
    machine = Machine(CORES, ("2", "3"), "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(launch, "look", lambda: machine)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    return machine


def test_every_slot_has_its_device_and_its_cores(two_gpus, tmp_path):
    assert {event.kind for event in local([job(tmp_path, name) for name in "ab"], two_gpus.slots)} >= {"start", "done"}
    a, b = seen(tmp_path, "a"), seen(tmp_path, "b")
    assert [run["CUDA_VISIBLE_DEVICES"] for run in (a, b)] == ["2", "3"]
    assert [run["XLA_PYTHON_CLIENT_MEM_FRACTION"] for run in (a, b)] == [None, None]
    assert tuple(sorted(a["cores"] + b["cores"])) == CORES or len(CORES) == 1
    assert Claims().take(["cuda-2", "cuda-3", *(f"core-{core}" for core in CORES)]), "let go of at the end"


def test_eight_runs_keep_four_devices_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "look", lambda: Machine(CORES, tuple("0123"), "CUDA_VISIBLE_DEVICES"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jobs = [job(tmp_path, f"run{i}", 1.2 + 0.4 * (i % 2)) for i in range(8)]  # they do not end together
    running, most = set(), 0
    for event in local(jobs):
        running |= {event.name} if event.kind == "start" else set()
        running -= {event.name} if event.kind == "done" else set()
        on = [
            seen(tmp_path, name)["CUDA_VISIBLE_DEVICES"] for name in running if (tmp_path / name / "seen.json").exists()
        ]
        assert len(on) == len(set(on)), "two runs on one device"
        most = max(most, len(on))
    assert most == 4 and all(folders.finished(one.folder) for one in jobs)
    used = [seen(tmp_path, one.name)["CUDA_VISIBLE_DEVICES"] for one in jobs]
    assert set(used) == set("0123")


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")
def test_a_second_launcher_takes_what_the_first_leaves(two_gpus, tmp_path):
    other = Slots(two_gpus, 2)
    held = other.take(0)
    assert held is not None and held.cores == share(CORES, 0, 2)
    events = local([job(tmp_path, name, 0.1) for name in "ab"], 2)
    kinds = [(event.kind, event.name) for event in events if event.kind != "tick"]
    # One after the other on the device that is left, on the cores that are.
    assert [seen(tmp_path, name)["CUDA_VISIBLE_DEVICES"] for name in "ab"] == ["3", "3"]
    assert [seen(tmp_path, name)["cores"] for name in "ab"] == [list(share(CORES, 1, 2))] * 2
    assert kinds[0] == ("start", "a") and kinds[1] == ("wait", "b") and kinds[-1] == ("done", "b")

    assert other.take(1) is not None
    waiting = local([job(tmp_path, "c", 0.1)], 2)
    assert [(event.kind, event.detail) for event, _ in zip(waiting, range(1), strict=False)] == [
        ("wait", launch.NO_DEVICE)
    ]
    other.keep(())
    assert [event.kind for event in waiting if event.kind not in ("tick", "wait")] == ["start", "done"]


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")
def test_cores_that_another_launcher_has_are_not_waited_for(two_gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "look", lambda: Machine(CORES))
    other = Slots(Machine(CORES), 2)
    assert other.take(0) is not None
    list(local([job(tmp_path, name, 0.1) for name in "ab"], 2))
    assert [seen(tmp_path, name)["cores"] for name in "ab"] == [list(CORES), list(share(CORES, 1, 2))]


def test_a_run_holds_its_device_when_its_launcher_is_gone(two_gpus, tmp_path):
    program = (
        "import os, signal, subprocess, sys\n"
        "from pathlib import Path\n"
        "from experiments.running.machine import Claims, Machine, Slots\n"
        "machine = Machine((0, 1), ('2', '3'), 'CUDA_VISIBLE_DEVICES')\n"
        "grant = Slots(machine, 2, Claims(Path(sys.argv[1]))).take(0)\n"
        "run = subprocess.Popen(['sleep', '60'], pass_fds=grant.files, start_new_session=True, stdout=2)\n"
        "print(run.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / f"longview-{os.getuid()}"
    dead = subprocess.run([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, timeout=120)
    assert dead.returncode == -signal.SIGKILL
    here = Slots(two_gpus, 2)
    assert here.take(0) is None and here.take(1) is not None
    os.kill(int(dead.stdout), signal.SIGKILL)
    wait_until(lambda: here.take(0) is not None)


@pytest.mark.quick
def test_without_a_place_for_locks_nothing_is_claimed(tmp_path):
    (tmp_path / "file").touch()
    claims = Claims(tmp_path / "file")  # where a folder should be
    assert claims.take(["cuda-0"]) and Claims(tmp_path / "file").take(["cuda-0"])
    assert claims.files(["cuda-0"]) == ()
