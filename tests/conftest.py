"""Eight forced host devices for every test, a compilation cache shared by all workers, and a small text."""

import gc
import os
import tempfile

import numpy as np
import pytest

from tests.flags import FAST

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST} " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "longview-test-cache"))
os.environ.setdefault("PJRT_NPROC", "64")  # as in train.cli.widen_thread_pool
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
gc.set_threshold(200_000, 50, 1000)  # tracing makes many objects and few cycles


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_bytes(np.random.default_rng(1).integers(32, 127, 3000, dtype=np.uint8).tobytes())
    return path
