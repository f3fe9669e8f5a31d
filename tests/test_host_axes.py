"""Two hosts, played by two processes, train and evaluate as one does, whichever mesh axis lies across them."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.flags import FAST
from tests.processes import ROOT
from train.sharding import AXES

pytestmark = pytest.mark.scale


def launch(file, devices: int, *process: str, port: int) -> subprocess.Popen:
    environment = dict(
        os.environ,
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices} {FAST}",
        JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
    )
    command = [sys.executable, "-m", "tests.host_axes", str(file), *process]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict, dict]:
    """By one process with two devices, and by two with one each."""
    one, two = (tmp_path_factory.mktemp("axes") / name for name in ("one.json", "two.json"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for group in ([launch(one, 2, port=port)], [launch(two, 1, str(i), port=port) for i in range(2)]):
        for process in group:
            said, _ = process.communicate(timeout=400)
            assert process.returncode == 0, said
    return json.loads(one.read_text()), json.loads(two.read_text())


@pytest.mark.parametrize("axis", [*AXES, "batchnorm"])
def test_two_hosts_equal_one(axis, measured):
    one, two = (found[axis] for found in measured)
    for key, value in one.items():
        assert two[key] == pytest.approx(value, rel=1e-6), key
