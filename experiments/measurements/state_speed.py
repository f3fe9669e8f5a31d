"""Linear attention in fused kernels on a GPU: what decays and the delta rule cost beside the plain kind."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.measurements import speed
from experiments.measurements.part import ALL, Part
from experiments.measurements.sheet import Sheet
from experiments.measurements.speed import Contender, Setting
from model import placement
from model.errors import UserError
from model.ops.fused import AMPERE

HEADS, SIZE, DTYPE = 16, 128, "bfloat16"
SHAPES = ((2, 8192), (1, 65_536))  # rows, tokens
KINDS = ("plain", "head", "channels", "delta", "gated delta", "kda", "rwkv7")
RATIO = ("x plain", ".2f")
SHEET = Sheet(
    {"batch": "batch", "length": "length", "contender": "kind"},
    speed.FORWARD
    | {"forward_ratio": RATIO}
    | speed.GRADIENT
    | {"gradient_ratio": RATIO}
    | speed.MEMORY
    | speed.COMPILING,
)


def settings() -> Iterator[Setting]:
    """By kind too: all are known, so that one that is none can be told."""
    for batch, length in SHAPES:
        for kind in KINDS:
            yield dict(batch=batch, length=length, contender=kind)


def measure(rounds: int, part: Part = ALL) -> Iterator[dict[str, Any]]:
    """A row per shape and kind, and of every shape that is measured one of `plain`."""
    if placement.capability() < AMPERE:
        needed = f"gpu from {AMPERE[0]}.{AMPERE[1]}"
        raise UserError(f"bench state measures kernels for {needed}; this is the platform {placement.chip()}")
    kinds = [kind for kind in KINDS if kind == "plain" or part({"contender": kind})]
    for batch, length in SHAPES:
        setting = dict(batch=batch, length=length, heads=HEADS, size=SIZE, dtype=DTYPE)
        if not part(setting):
            continue
        rows = list(speed.measure([setting], partial(contenders, kinds), rounds))
        plain = rows[0]
        for row in rows:
            if "error" not in row and "error" not in plain:
                row |= {f"{name}_ratio": row[f"{name}_ms"] / plain[f"{name}_ms"] for name in ("forward", "gradient")}
            yield row


def contenders(kinds: Sequence[str], setting: Setting) -> dict[str, Callable[[], Contender]]:
    return {kind: partial(enter, kind, setting) for kind in kinds}


def enter(kind: str, setting: Setting) -> Contender:
    arrays = inputs(kind, setting)
    cotangent = jax.random.normal(jax.random.key(1), arrays["v"].shape, setting["dtype"])
    return speed.compiled(partial(run, kind), cotangent, arrays)


def run(kind: str, arrays: dict[str, jax.Array]) -> jax.Array:
    """Outputs from an empty state."""
    from model.ops import delta_rule, fused_channels, fused_delta, fused_state  # here: Pallas takes a second to load

    q, k, v, a = (arrays.get(name) for name in ("q", "k", "v", "a"))
    h0 = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[-1]))
    if kind == "kda":
        return delta_rule.delta_rule(q, k, v, a, h0, beta=arrays["beta"], implementation="fused")[0].astype(v.dtype)
    if kind == "rwkv7":
        removed = -k * arrays["gates"]
        return delta_rule.delta_rule(q, k, v, a, h0, a=removed, b=k, implementation="fused")[0].astype(v.dtype)
    if "delta" in kind:
        return fused_delta.fused_delta(q, k, v, arrays["beta"], a, h0, None, 64)[0]
    if kind == "channels":
        return fused_channels.fused_channels(q, k, v, a, h0, None, 64)[0]
    return fused_state.fused_state(q, k, v, a, h0, None, 128)[0]


def inputs(kind: str, setting: Setting) -> dict[str, jax.Array]:
    """Random arrays, made on the device; decays as a gate makes them whose bias is 3."""
    shape = tuple(setting[name] for name in ("batch", "length", "heads", "size"))
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, shape) for key in keys[:3])
    made = dict(q=q * shape[-1] ** -0.5, k=k / jnp.linalg.norm(k, axis=-1, keepdims=True), v=v)
    made = {name: leaf.astype(setting["dtype"]) for name, leaf in made.items()}
    if kind not in ("plain", "delta"):
        gates = jax.random.normal(keys[3], shape[:3] if kind in ("head", "gated delta") else shape)
        made["a"] = jax.nn.log_sigmoid(gates + 3)
    if kind in ("delta", "gated delta", "kda"):
        made["beta"] = jax.nn.sigmoid(jax.random.normal(keys[4], shape[:3]))
    if kind == "rwkv7":
        made["gates"] = jax.nn.sigmoid(jax.random.normal(keys[4], shape)).astype(setting["dtype"])
    return made
