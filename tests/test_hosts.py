"""Two hosts, played by two processes on this machine, train the run that one would."""

import os
import socket
import subprocess
import sys

import pytest

from tests.flags import FAST
from train.log import read


def launch(workdir, process: int | None, port: int) -> subprocess.Popen:
    flags = ["--config.steps=6", "--config.eval_every=3", "--config.checkpoint_every=3", "--config.model.width=16"]
    devices = f"--xla_force_host_platform_device_count={2 if process is None else 1}"
    environment = dict(os.environ, XLA_FLAGS=f"{devices} {FAST}")
    if process is not None:
        flags.append("--distributed")
        environment |= dict(
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(process)
        )
    command = [sys.executable, "-m", "train", "--config=configs/debug.py", f"--workdir={workdir}", *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_hosts_equal_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    alone = launch(tmp_path / "one", None, port)
    assert alone.wait(200) == 0, alone.stdout.read()
    hosts = [launch(tmp_path / "two", i, port) for i in range(2)]
    for host in hosts:
        assert host.wait(200) == 0, host.stdout.read()
    one, two = (
        [(e["step"], e["loss"]) for e in read(tmp_path / name / "metrics.jsonl") if "loss" in e]
        for name in ("one", "two")
    )
    assert [step for step, _ in two] == list(range(1, 7))
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-6)
