"""How the processes of a job find each other: `jax.distributed`, quietly, and a line of our own beside it."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import jax
from jax._src import distributed  # for the key-value store, as Orbax does: there is no public way to it
from jax._src.lib import _jax

from model.errors import UserError
from train import line
from train.door import open_door

JOINING = 300  # seconds that processes have to find each other


def initialize() -> None:
    """TPU pods, Slurm and the like say who is who; elsewhere JAX_COORDINATOR_ADDRESS and these variables do."""
    given = {}
    for name, variable in {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}.items():
        try:
            given |= {name: int(os.environ[variable])} if variable in os.environ else {}
        except ValueError:
            raise UserError(f"{variable} is {os.environ[variable]!r}; it takes a whole number") from None
    check_address(os.environ.get("JAX_COORDINATOR_ADDRESS"))
    jax.config.update("jax_enable_preemption_service", False)  # signals are train.workdir.graceful_stop's
    # JAX's own watch ends a process with pages of stacks. Ours is quicker, so its limits only have to be longer.
    limits = dict(initialization_timeout=2 * JOINING, heartbeat_timeout_seconds=int(2 * line.PATIENCE))
    with _joining(), _shielded():
        try:
            jax.distributed.initialize(**given, **limits)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"cannot join the other processes: {' '.join(str(error).split())}{_hint()}") from error


def _hint() -> str:
    """What to do where no cluster says who is who."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        return ""
    return "; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave out --distributed"


def check_address(address: str | None) -> None:
    """Refuses an address that nobody could be reached at; none is for the cluster to give."""
    host, _, port = ("localhost:1" if address is None else address).rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise UserError(f"JAX_COORDINATOR_ADDRESS is {address!r}; it takes HOST:PORT, such as 10.0.0.1:8476")


def size() -> int:
    """How many processes have joined; asking does not wake the devices."""
    return distributed.global_state.num_processes or 1


@contextlib.contextmanager
def _joining() -> Iterator[None]:
    """Says that others are waited for, and gives up in the end."""
    done = threading.Event()

    def watch() -> None:
        if not done.wait(line.HUSH):
            print("waiting for the other processes of the job to join", file=sys.stderr, flush=True)
        if not done.wait(JOINING - line.HUSH):
            where = os.environ.get("JAX_COORDINATOR_ADDRESS", "the address that the cluster gives")
            line.end_process(
                line.LOST, f"error: not all processes of the job have joined at {where} within {JOINING} s"
            )

    threading.Thread(target=watch, name="joining", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """JAX's client aborts this process, with stacks, in the moment that the first one dies.

    So it is connected through a door of ours, which stays open: the line has seen the same, and ends us in good order.
    """
    connect = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = lambda address, *args, **options: connect(
        open_door(address), *args, **options
    )
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = connect


def open_line() -> line.Line:
    """The line to the other processes, which all open it at the same time."""
    state, key = distributed.global_state, "longview/line"
    with _joining():
        if state.process_id == 0:
            listener, invitation = line.listen()
            state.client.key_value_set(key, invitation)
            return line.answer(listener, size(), invitation)
        invitation = state.client.blocking_key_value_get(key, 2000 * JOINING)
        host = state.coordinator_address.rpartition(":")[0].strip("[]")
        try:
            return line.call(host, invitation, state.process_id)
        except OSError as error:
            at = f"{host} port {invitation.split()[0]}"
            line.end_process(line.LOST, f"error: cannot reach process 0 at {at}: {error.strerror or error}")
