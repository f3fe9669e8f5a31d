"""Steps that the TPU's own compiler compiles, where it is installed: no TPU is needed."""

import importlib.util

import pytest

from tests.processes import run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs the TPU\'s compiler: pip install "jax[tpu]", on x86 Linux'
)
ONE_LAYER = ("--config.model.width=256", "--config.model.layers=1", "--config.model.dtype=bfloat16")
SPLASH = ("--config.data.mqar.length=256", "--config.model.attention.n_heads=4", "--config.batch_size=4")


def compiled(topology: str, *overrides: str):
    """The lines told, and the code; each in a process of its own: how many devices a CPU plays is decided once."""
    ended = run("train", "--config=configs/debug.py", "--compile_only", f"--topology={topology}", *overrides)
    assert "by the TPU's compiler" in ended.stdout or ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout.splitlines(), ended.returncode


def flops(line: str) -> tuple[float, float]:
    """Those that the program has, and those that it cannot do without."""
    return float(line.split()[1]), float(line.partition("round; ")[2].split()[0])


@pytest.mark.parametrize(("topology", "far"), [("v5e:2x2", False), ("2xv5e:1x1", True)])
def test_a_step_is_compiled_and_all_of_it_is_read(topology, far):
    lines, code = compiled(topology, *ONE_LAYER, *SPLASH)
    products = next(line for line in lines if line.startswith("products"))
    had, needed = flops(products)
    assert needed < had < 1.5 * needed  # kernels' too: a score that the mask hides is multiplied as well
    assert not any("calls of kernels" in line or "nobody knows" in line for line in lines)
    assert any("over data" in line and ("between slices" in line) == far for line in lines)
    assert (lines[-1], code) == ("fits", 0)


def test_no_room_is_told():
    lines, code = compiled("v5e:1x1", "--config.batch_size=65536", "--config.model.width=1024")
    assert "the TPU compiler finds no room (Ran out of memory" in lines[1] and "an estimate" in lines[1]
    assert lines[-1].startswith("does not fit") and code == 1
