"""Attention against its peers.

On a GPU the peers are torch's: scaled-dot-product attention through cuDNN and compiled flex_attention, where torch is
installed. Anywhere, the implementations of the op are measured against each other.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from experiments.measurements import torch_attention
from experiments.measurements.speed import Contender, Setting, compiled
from model.ops.attention import IMPLEMENTATIONS, Bias, attention
from model.ops.mask import CAUSAL, window
from model.positions.score_bias import ALiBiBias, T5Bias, alibi_slopes

WINDOW, SOFT_CAP = 4096, 50.0
CASES = ("causal", "window", "alibi", "t5", "soft cap", "sinks")
# length -> batch; the shapes that fused kernels are usually shown at, and one for a CPU
SHAPES = {
    "gpu": dict(batches={8192: 2, 32_768: 1}, heads=16, head_dim=128, dtype="bfloat16"),
    "cpu": dict(batches={2048: 1}, heads=8, head_dim=64, dtype="float32"),
}
DENSE_BYTES = 2**32  # scores that the dense form may hold at once
LEAD = {"n": "n", "case": "case"}


def settings() -> Iterator[Setting]:
    shape = SHAPES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    for n, batch in shape["batches"].items():
        for case in CASES:
            yield dict(case=case, n=n, batch=batch, **{key: shape[key] for key in ("heads", "head_dim", "dtype")})


def contenders(setting: Setting) -> dict[str, Callable[[], Contender]]:
    n, batch, heads = (setting[key] for key in ("n", "batch", "heads"))
    left_out = {"reference"} | ({"xla"} if 4 * batch * heads * n * n > DENSE_BYTES else set())
    named = {f"longview {name}": partial(ours, setting, name) for name in IMPLEMENTATIONS if name not in left_out}
    return named | torch_attention.contenders(setting, WINDOW, SOFT_CAP)


def ours(setting: Setting, implementation: str) -> Contender:
    shape = (setting["batch"], setting["n"], setting["heads"], setting["head_dim"])
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, d = (jax.random.normal(key, shape, setting["dtype"]) for key in keys[:4])
    slopes = jnp.asarray(alibi_slopes(setting["heads"]), jnp.float32)
    trained = {
        "t5": [jax.random.normal(keys[4], (32, setting["heads"]))],
        "sinks": [jnp.zeros(setting["heads"], jnp.float32)],
    }.get(setting["case"], [])
    options = {
        "causal": lambda: {},
        "window": lambda: dict(mask=CAUSAL & window(WINDOW)),
        "alibi": lambda: dict(bias=Bias({"m": slopes}, ALiBiBias(), {"m": ("heads",)})),
        "t5": lambda table: dict(bias=Bias({"table": table}, T5Bias(32, 128, causal=True), {"table": (None, "heads")})),
        "soft cap": lambda: dict(soft_cap=SOFT_CAP),
        "sinks": lambda sinks: dict(sinks=sinks),
    }[setting["case"]]

    def run(q, k, v, *trained):
        return attention(q, k, v, **options(*trained), implementation=implementation)

    return compiled(run, d, q, k, v, *trained)
