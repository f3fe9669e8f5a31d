"""State spaces against their peers: Mamba's scan, RG-LRU's, Mamba-2's matrix products and S4's long convolution.

On a GPU the peers are Mamba's Triton kernels, where `mamba_ssm` is installed, and torch's FFT. Anywhere, the forms of
the scans are measured against each other.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.measurements import speed, torch_scan
from experiments.measurements.part import ALL, Part
from experiments.measurements.speed import Contender, Setting, compiled, place, sheet
from model.ops.conv import fft_conv
from model.ops.scan import linear_scan, selective_scan
from model.ops.ssd import ssd

# (batch, length) of each case; a size or two where a row is short, and one where it is long
SHAPES = {
    "gpu": {
        "mamba": [(8, 2048), (2, 8192), (1, 65_536)],
        "linear": [(32, 2048), (1, 65_536), (1, 1_048_576)],
        "mamba2": [(8, 2048), (2, 8192), (1, 65_536)],
        "convolution": [(2, 8192), (1, 65_536)],
    },
    "cpu": {case: [(1, 2048)] for case in ("mamba", "linear", "mamba2", "convolution")},
}
# Channels E, and of those with heads how many (H); N numbers of state a channel.
SIZES = {
    "gpu": {
        "mamba": dict(channels=2048, state=16, dtype="float32"),
        "linear": dict(channels=256, dtype="float32"),
        "mamba2": dict(channels=2048, heads=32, state=128, dtype="bfloat16"),
        "convolution": dict(channels=1024, dtype="float32"),
    },
    "cpu": {
        "mamba": dict(channels=256, state=16, dtype="float32"),
        "linear": dict(channels=256, dtype="float32"),
        "mamba2": dict(channels=256, heads=4, state=64, dtype="float32"),
        "convolution": dict(channels=128, dtype="float32"),
    },
}
PLAIN = ("associative", "chunked")
SCANS = {  # forms of those that have several
    "gpu": {"mamba": (*PLAIN, "fused"), "linear": (*PLAIN, "fused")},
    "cpu": {"mamba": (*PLAIN, "chunked_serial", "stepped"), "linear": (*PLAIN, "chunked_serial")},
}
SHEET = sheet({"case": "case", "batch": "batch", "length": "length"})


def settings() -> Iterator[Setting]:
    for case, shapes in SHAPES[place()].items():
        for batch, length in shapes:
            yield dict(case=case, batch=batch, length=length, **SIZES[place()][case])


def measure(rounds: int, part: Part = ALL) -> Iterator[dict[str, Any]]:
    return speed.measure(settings(), contenders, rounds, part)


def contenders(setting: Setting) -> dict[str, Callable[[], Contender]]:
    arrays, case = inputs(setting), setting["case"]
    ours = {"mamba": mamba, "linear": linear, "mamba2": mamba2, "convolution": fft_conv}[case]
    if forms := SCANS[place()].get(case):
        return {f"longview {form}": partial(enter, partial(ours, implementation=form), arrays) for form in forms}
    return {"longview": partial(enter, ours, arrays)} | torch_scan.contenders(case, arrays)


def enter(run: Callable, arrays: dict[str, np.ndarray], /) -> Contender:
    """Puts the arrays on the device; the first is what the output's cotangent is made from."""
    cotangent, *args = map(jnp.asarray, (next(iter(arrays.values())), *arrays.values()))
    return compiled(run, cotangent, *args)


def inputs(setting: Setting) -> dict[str, Any]:
    """Random arrays by the names that the papers give them."""
    rng = np.random.default_rng(0)
    lead, E, dtype = (setting["batch"], setting["length"]), setting["channels"], jnp.dtype(setting["dtype"])

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    def steps(*shape: int) -> np.ndarray:
        return np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape)).astype(np.float32)

    if setting["case"] == "convolution":
        return dict(u=normal(*lead, E), kernel=normal(setting["length"], E))
    if setting["case"] == "linear":
        return dict(a=rng.uniform(0.9, 1, (*lead, E)).astype(dtype), b=normal(*lead, E))
    N = setting["state"]
    if setting["case"] == "mamba":
        A = -np.tile(np.arange(1, N + 1, dtype=np.float32), (E, 1))
        return dict(x=normal(*lead, E), dt=steps(*lead, E), A=A, B=normal(*lead, N), C=normal(*lead, N))
    H = setting["heads"]
    A = -rng.uniform(1, 16, H).astype(np.float32)
    return dict(x=normal(*lead, H, E // H), dt=steps(*lead, H), A=A, B=normal(*lead, 1, N), C=normal(*lead, 1, N))


def mamba(x, dt, A, B, C, implementation):
    return selective_scan(x, dt, A, B, C, jnp.zeros((x.shape[0], *A.shape)), implementation=implementation)[0]


def linear(a, b, implementation):
    return linear_scan(a, b, jnp.zeros_like(b[:, 0]), implementation=implementation)[0]


def mamba2(x, dt, A, B, C):
    return ssd(x, dt, A, B, C, jnp.zeros((x.shape[0], *x.shape[2:], B.shape[-1])))[0]
