"""Attention against its peers: time and memory, forward and with gradient, every contender in one run.

On a GPU the peers are torch's: scaled-dot-product attention through cuDNN and compiled flex_attention, where torch is
installed. Anywhere, the implementations of the op are measured against each other.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import torch_attention
from model.errors import UserError
from model.ops.attention import IMPLEMENTATIONS, Bias, attention
from model.score_bias import T5Bias, alibi_bias, alibi_slopes

WINDOW, SOFT_CAP = 4096, 50.0
CASES = ("causal", "window", "alibi", "t5", "soft cap", "sinks")
# length -> batch; the shapes that fused kernels are usually shown at, and one for a CPU
SHAPES = {
    "gpu": dict(batches={8192: 2, 32_768: 1}, heads=16, head_dim=128, dtype="bfloat16"),
    "cpu": dict(batches={2048: 1}, heads=8, head_dim=64, dtype="float32"),
}
DENSE_BYTES = 2**34  # scores that the dense form may hold at once
LEAST = 0.2  # seconds that a round lasts


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """A row per contender, case and length."""
    shape = SHAPES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    for n, batch in shape["batches"].items():
        for case in CASES:
            setting = dict(case=case, n=n, batch=batch, **{key: shape[key] for key in ("heads", "head_dim", "dtype")})
            for name, (forward, gradient, memory) in contenders(setting).items():
                times = dict(forward_ms=1e3 * timed(forward, rounds), gradient_ms=1e3 * timed(gradient, rounds))
                yield setting | dict(contender=name, temp_mib=memory() / 2**20, **times)


Contender = tuple[Callable[[], Any], Callable[[], Any], Callable[[], float]]


def contenders(setting: dict[str, Any]) -> dict[str, Contender]:
    """Name -> forward, gradient, bytes beside inputs and outputs that the gradient needs."""
    n, batch, heads = (setting[key] for key in ("n", "batch", "heads"))
    found = {}
    for name in IMPLEMENTATIONS:
        dense = name == "xla" and 4 * batch * heads * n * n > DENSE_BYTES
        if name != "reference" and not dense:
            try:
                found[f"longview {name}"] = ours(setting, name)
            except UserError:  # it cannot serve this call
                continue
    return found | torch_attention.contenders(setting, WINDOW, SOFT_CAP)


def ours(setting: dict[str, Any], implementation: str) -> Contender:
    rng = np.random.default_rng(0)
    shape = (setting["batch"], setting["n"], setting["heads"], setting["head_dim"])
    q, k, v, d = (jnp.asarray(rng.normal(size=shape), setting["dtype"]) for _ in range(4))
    shared = {
        "alibi": jnp.asarray(alibi_slopes(setting["heads"]), jnp.float32),
        "t5": jnp.asarray(rng.normal(size=(32, setting["heads"])), jnp.float32),
        "sinks": jnp.zeros(setting["heads"], jnp.float32),
    }.get(setting["case"])

    def run(q, k, v, shared):
        options = {
            "window": dict(window=WINDOW),
            "alibi": dict(bias=Bias(shared, alibi_bias)),
            "t5": dict(bias=Bias(shared, T5Bias(32, 128, causal=True))),
            "soft cap": dict(soft_cap=SOFT_CAP),
            "sinks": dict(sinks=shared),
        }.get(setting["case"], {})
        return attention(q, k, v, **options, implementation=implementation)

    def pulled(q, k, v, shared, d):
        return jax.vjp(run, q, k, v, shared)[1](d)

    forward = jax.jit(run).lower(q, k, v, shared).compile()
    gradient = jax.jit(pulled).lower(q, k, v, shared, d).compile()
    return (
        partial(forward, q, k, v, shared),
        partial(gradient, q, k, v, shared, d),
        lambda: gradient.memory_analysis().temp_size_in_bytes,
    )


def timed(function: Callable[[], Any], rounds: int) -> float:
    """Seconds a call: the best of some rounds, each a queue of calls long enough for launching not to show."""
    torch_attention.wait(jax.block_until_ready(function()))
    start = time.perf_counter()
    torch_attention.wait(jax.block_until_ready(function()))
    calls = max(1, int(LEAST / (time.perf_counter() - start)))
    best = np.inf
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            last = function()
        torch_attention.wait(jax.block_until_ready(last))
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per case and contender."""
    head = "| n | case | contender | forward ms | with gradient ms | temporary MiB |\n|---|---|---|---|---|---|\n"
    lines = [
        f"| {r['n']:,} | {r['case']} | {r['contender']} | {r['forward_ms']:.2f} | {r['gradient_ms']:.2f} "
        f"| {r['temp_mib']:,.0f} |\n"
        for r in rows
    ]
    return head + "".join(lines)
