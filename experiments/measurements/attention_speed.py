"""Attention against its peers.

On a GPU the peers are torch's: scaled-dot-product attention through cuDNN and compiled flex_attention, where torch is
installed. Anywhere, the implementations of the op are measured against each other.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.measurements import speed, torch_attention
from experiments.measurements.part import ALL, Part
from experiments.measurements.speed import Contender, Setting, compiled, place, sheet
from model.ops.attention import IMPLEMENTATIONS, Bias, attention
from model.ops.mask import CAUSAL, Prefix, block_matrix, window
from model.ops.patterns import BigBird
from model.positions.score_bias import FIRE_SHARED, ALiBiBias, FIREBias, KerpleLog, T5Bias, alibi_slopes

WINDOW, SOFT_CAP = 4096, 50.0
DOCUMENTS, PREFIX = 8, 1024  # documents in a packed row, tokens that all see
BIGBIRD = BigBird(64, first=2, near=2, random=3, seed=0)
PATTERNS = ("bigbird",)
CASES = ("causal", "window", "alibi", "kerple", "fire", "t5", "soft cap", "sinks", "packed", "prefix", "bigbird")
# length -> batch; the shapes that fused kernels are usually shown at, and one for a CPU
SHAPES = {
    "gpu": dict(batches={8192: 2, 32_768: 1}, heads=16, head_dim=128, dtype="bfloat16"),
    "cpu": dict(batches={2048: 1}, heads=8, head_dim=64, dtype="float32"),
}
DENSE_BYTES = 2**32  # scores that the dense form may hold at once
SHEET = sheet({"n": "n", "case": "case"})


def settings() -> Iterator[Setting]:
    shape = SHAPES[place()]
    for n, batch in shape["batches"].items():
        for case in CASES:
            yield dict(case=case, n=n, batch=batch, **{key: shape[key] for key in ("heads", "head_dim", "dtype")})


def measure(rounds: int, part: Part = ALL) -> Iterator[dict[str, Any]]:
    return speed.measure(settings(), contenders, rounds, part)


def contenders(setting: Setting) -> dict[str, Callable[[], Contender]]:
    n, batch, heads = (setting[key] for key in ("n", "batch", "heads"))
    left_out = {"reference"} | ({"xla"} if 4 * batch * heads * n * n > DENSE_BYTES else set())
    left_out |= set() if setting["case"] in PATTERNS else {"blocks"}
    named = {f"longview {name}": partial(ours, setting, name) for name in IMPLEMENTATIONS if name not in left_out}
    return named | torch_attention.contenders(setting, partial(seen, setting), SOFT_CAP)


def seen(setting: Setting, torch: Any) -> Callable:
    """Who sees whom, as torch's `flex_attention` asks."""
    n, block = setting["n"], BIGBIRD.n
    if setting["case"] == "bigbird":
        table = torch.tensor(block_matrix(BIGBIRD, n // block, n // block, block, block), device="cuda")
    return {
        "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
        "packed": lambda b, h, i, j: (i >= j) & (i // (n // DOCUMENTS) == j // (n // DOCUMENTS)),
        "prefix": lambda b, h, i, j: (i >= j) | (j < PREFIX),
        "bigbird": lambda b, h, i, j: (i >= j) & table[i // block, j // block],
    }.get(setting["case"], lambda b, h, i, j: i >= j)


def fire(*params: jax.Array) -> dict[str, Bias]:
    axes = [(None,) * (x.ndim - 1) + ("heads",) for x in params]
    names = (*FIRE_SHARED, "out")
    return dict(bias=Bias(dict(zip(names, params, strict=True)), FIREBias(), dict(zip(names, axes, strict=True))))


def ours(setting: Setting, implementation: str) -> Contender:
    shape = (setting["batch"], setting["n"], setting["heads"], setting["head_dim"])
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, d = (jax.random.normal(key, shape, setting["dtype"]) for key in keys[:4])
    slopes = jnp.asarray(alibi_slopes(setting["heads"]), jnp.float32)
    heads = setting["heads"]
    trained = {
        "kerple": [jnp.zeros(heads), jnp.zeros(heads)],
        "fire": [jnp.zeros(heads), jnp.full(heads, 6.0), *jax.random.normal(keys[4], (3, 32, heads))],
        "t5": [jax.random.normal(keys[4], (32, heads))],
        "sinks": [jnp.zeros(heads, jnp.float32)],
    }.get(setting["case"], [])
    segments, at = (x[None] for x in jnp.divmod(jnp.arange(setting["n"], dtype=jnp.int32), setting["n"] // DOCUMENTS))
    packed = dict(q_segments=segments + 1, k_segments=segments + 1, q_positions=at, k_positions=at, gapless=True)
    options = {
        "causal": lambda: {},
        "window": lambda: dict(mask=CAUSAL & window(WINDOW)),
        "alibi": lambda: dict(bias=Bias({"m": slopes}, ALiBiBias(), {"m": ("heads",)})),
        "kerple": lambda r1, r2: dict(bias=Bias(dict(r1=r1, r2=r2), KerpleLog(), dict(r1=("heads",), r2=("heads",)))),
        "fire": fire,
        "t5": lambda table: dict(bias=Bias({"table": table}, T5Bias(32, 128, causal=True), {"table": (None, "heads")})),
        "soft cap": lambda: dict(soft_cap=SOFT_CAP),
        "sinks": lambda sinks: dict(sinks=sinks),
        "packed": lambda: packed,
        "prefix": lambda: dict(mask=CAUSAL | Prefix(PREFIX)),
        "bigbird": lambda: dict(mask=CAUSAL & BIGBIRD),
    }[setting["case"]]

    def run(q, k, v, *trained):
        return attention(q, k, v, **options(*trained), implementation=implementation)

    return compiled(run, d, q, k, v, *trained)
