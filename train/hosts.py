"""The processes of one run, a host or a device each: they join, decide together, and end together."""

import contextlib
import os
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def joined(distributed: bool) -> Iterator[None]:
    """Joins the other processes of the job for the length of the block, if asked to."""
    if distributed:
        _initialize()
    yield


def _initialize() -> None:
    """TPU pods, Slurm and the like say who is who; elsewhere JAX_COORDINATOR_ADDRESS and these variables do."""
    numbers = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    given = {name: int(os.environ[variable]) for name, variable in numbers.items() if variable in os.environ}
    jax.distributed.initialize(**given)
