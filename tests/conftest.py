"""Eight forced host devices for every test, a compilation cache shared by all workers, and a small text."""

import gc
import os
import sys
import tempfile

import numpy as np
import pytest

from tests.flags import FAST

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST} " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "longview-test-cache"))
os.environ.setdefault("PJRT_NPROC", "64")  # as in train.cli.widen_thread_pool
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # programs need not say which line made what
# Else every process, and every command that a test starts, compiles all of our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.set_threshold(200_000, 50, 1000)  # tracing makes many objects and few cycles


@pytest.hookimpl(tryfirst=True)  # before -m chooses by what is marked here
def pytest_collection_modifyitems(items):
    """The laws of one mixer come one after another: they share programs, and neighbours go to one worker.

    What is long comes before all.
    """
    thin_out(items)
    laws = [i for i, item in enumerate(items) if item.path.name == "test_laws.py"]
    by_case = sorted((items[i] for i in laws), key=lambda item: str(item.callspec.params["case"]))
    for i, item in zip(laws, by_case, strict=True):
        items[i] = item
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def thin_out(items):
    """Of a test marked `few(n)`, all but n of its variants are left to `make scale`; `each`: n of each first word."""
    variants: dict[tuple, list] = {}
    for item in items:
        if mark := item.get_closest_marker("few"):
            word = item.callspec.id.partition("-")[0] if mark.kwargs.get("each") else ""
            variants.setdefault((item.path, item.originalname, word), []).append(item)
    for found in variants.values():
        n = found[0].get_closest_marker("few").args[0]
        kept = {i * len(found) // n for i in range(n)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.scale)


@pytest.fixture(autouse=True, scope="session")
def in_process():
    """Examples are made in the process that tests look into; tests/test_workers.py is about those that are not."""
    from data import pipeline  # once the environment above is set

    pipeline.WORKERS.count = 0


@pytest.fixture(autouse=True, scope="session")
def triton_dialect():
    """JAX keeps Triton's dialect where MLIR does not look, which it does anew for every type that a kernel names."""
    from jaxlib.triton import dialect  # once the environment above is set

    sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_bytes(np.random.default_rng(1).integers(32, 127, 3000, dtype=np.uint8).tobytes())
    return path


@pytest.fixture(scope="session")
def sets_root(tmp_path_factory):
    """A folder with every set that tasks read, in small."""
    from tests import sets  # once the environment above is set

    root = tmp_path_factory.mktemp("sets")
    sets.write(root)
    return root


@pytest.fixture(scope="module")
def quickly_compiled():
    """For modules where nothing runs long enough to be worth optimising."""
    import jax  # once the environment above is set

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def quick_draws(monkeypatch):
    """Models start from parameters drawn by tests.draws, where it does not matter by what; or from none."""
    from tests.draws import quickly  # once the environment above is set

    quickly(monkeypatch)
