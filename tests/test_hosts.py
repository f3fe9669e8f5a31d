"""Two hosts, played by two processes on this machine: they begin alike or not at all, stop together, end together, and
train the run that one would.
"""

import contextlib
import signal
import socket
import time

import jax
import jax.numpy as jnp
import pytest

from model.errors import LESS_MEMORY, NoRoom, UserError, made_smaller_by, told
from tests.processes import fork
from train import join
from train.line import LOST
from train.log import read_metrics
from train.workdir import open_workdir

pytestmark = pytest.mark.scale

STEPS = 20
SETTINGS = {"steps": STEPS, "eval_every": 10, "eval_batches": 1, "checkpoint_every": 5, "model.width": 16}


def command(workdir, **more) -> list[str]:
    settings = SETTINGS | {"data.mqar.length": 16, "batch_size": 4} | more
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return ["train", "--config=configs/debug.py", f"--workdir={workdir}", *flags]


def known(size: int) -> list[dict[str, str]]:
    """What each of so many processes has to know to find the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES=str(size))
    return [shared | {"JAX_PROCESS_ID": str(rank)} for rank in range(size)]


def pair(*commands: list[str]) -> list[fork]:
    """A host for each command."""
    places = known(len(commands))
    return [fork(*words, "--distributed", **place) for words, place in zip(commands, places, strict=True)]


def losses(workdir) -> dict[int, float]:
    with contextlib.suppress(FileNotFoundError):
        return {line["step"]: line["loss"] for line in read_metrics(workdir / "metrics.jsonl") if "loss" in line}
    return {}


def train_until(workdir, step: int, hosts: list[fork]) -> None:
    while max(losses(workdir), default=0) < step and all(host.running() for host in hosts):
        time.sleep(0.01)
    assert all(host.running() for host in hosts), [host.stderr for host in hosts]


def complaint(host: fork) -> str:
    """The one line that a process ends with, besides what Gloo says when it connects."""
    (line,) = [line for line in host.stderr.splitlines() if line and not line.startswith("[Gloo]")]
    return line


def test_hosts_that_were_given_different_things_do_not_begin(tmp_path):
    hosts = pair(command(tmp_path / "run"), command(tmp_path / "run", **{"optim.lr": 0.002}))
    assert [host.wait(200) for host in hosts] == [2, 2]
    here = socket.gethostname()
    expected = f"error: process 1 on {here} differs from process 0: optim.lr is 0.002, not 0.001"
    assert [complaint(host) for host in hosts] == [expected] * 2
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_told_by_all_hosts(tmp_path):
    with open_workdir(tmp_path):
        hosts = pair(command(tmp_path), command(tmp_path))
        assert [host.wait(200) for host in hosts] == [2, 2]
    first, second = map(complaint, hosts)
    assert first == second and f"workdir {tmp_path} is in use by pid" in first


@pytest.mark.long
def test_signals_stop_all_and_a_lost_host_ends_all(tmp_path):
    workdir = tmp_path / "two"
    words = command(workdir)

    def stopped_at(hosts: list[fork]) -> int:
        assert [host.wait(60) for host in hosts] == [0, 0], [host.stderr for host in hosts]
        (step,) = {int(host.stdout.partition("stopped at step ")[2].split(",")[0]) for host in hosts}
        assert (workdir / "checkpoints" / f"{step:08d}" / "manifest.json").exists()
        return step

    hosts = pair(words, words)
    while not (workdir / ".lock").exists():  # both have yet to compile
        time.sleep(0.01)
    hosts[1].send(signal.SIGTERM)
    assert stopped_at(hosts) == 1

    hosts = pair(words, words)
    train_until(workdir, 4, hosts)
    hosts[0].send(signal.SIGINT)
    step = stopped_at(hosts)
    assert step >= 4

    for lost in (0, 1):
        hosts = pair(words, words)
        step += 2
        train_until(workdir, step, hosts)
        hosts[lost].send(signal.SIGKILL)
        start = time.monotonic()
        assert hosts[1 - lost].wait(60) == LOST
        assert time.monotonic() - start < 20
        assert f"process {lost} on {socket.gethostname()} is gone" in complaint(hosts[1 - lost])

    assert fork(*command(tmp_path / "one")).wait(200) == 0
    one, two = losses(tmp_path / "one"), losses(workdir)
    assert list(two) == list(range(1, len(two) + 1)) and len(two) >= step
    assert list(two.values()) == pytest.approx([one[step] for step in two], rel=1e-5)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":8476", "localhost:0", "localhost:77777", "a:b"])
def test_an_address_that_nobody_has_is_refused(address, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    with pytest.raises(UserError, match=f"JAX_COORDINATOR_ADDRESS is {address!r}; it takes HOST:PORT"):
        join.initialize()


def test_where_no_cluster_says_who_is_who_a_user_is_told_how_to(monkeypatch):
    def initialize(**given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError, match=r"be defined\.; set JAX_COORDINATOR_ADDRESS, .* leave out --distributed"):
        join.initialize()


def test_a_lack_of_memory_is_told_in_a_line_with_what_to_do():
    with pytest.raises(jax.errors.JaxRuntimeError) as found:
        jnp.zeros(2**50, jnp.uint8).block_until_ready()
    lacking = "out of memory: Out of memory allocating 1125899906842624 bytes"
    assert told(found.value) == (1, f"{lacking}; {LESS_MEMORY}")
    with pytest.raises(NoRoom) as found, made_smaller_by("lower --tokens"):
        jnp.zeros(2**50, jnp.uint8).block_until_ready()
    assert told(found.value) == (1, f"{lacking}; lower --tokens")
