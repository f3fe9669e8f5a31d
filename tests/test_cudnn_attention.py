"""cuDNN's calls as XLA will read them: made on any machine, run on a GPU by `experiments.bench determinism`."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from model.ops.attention import prepare
from model.ops.cudnn_attention import deterministic, flash_attention
from model.ops.fused_attention import cudnn
from model.ops.mask import CAUSAL, FULL, Mask, window

pytestmark = pytest.mark.quick
Q, KV = (jax.ShapeDtypeStruct((2, 64, heads, 32), jnp.bfloat16) for heads in (4, 2))


def calls(wanted: bool, **options) -> list[tuple[str, dict]]:
    """Name and settings of each call in a program with two attentions and their gradient."""

    def objective(q, k, v):
        y, _ = flash_attention(q, k, v, 0.1, **options)
        y, _ = flash_attention(y, k, v, 0.1, **options)
        return jnp.sum(y.astype(jnp.float32))

    with deterministic(wanted):
        return calls_of(jax.grad(objective, argnums=(0, 1, 2)))


def calls_of(function) -> list[tuple[str, dict]]:
    text = jax.jit(function).trace(Q, KV, KV).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'@__cudnn\$(\w+)\(.*?backend_config = "(.*?)", operand', text)
    return [(name, json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]) for name, config in found]


@pytest.mark.parametrize("wanted", [True, False])
def test_every_gradient_is_told_to_be_deterministic(wanted):
    """Not the first alone: XLA looks up calls by their settings, and would not find the others."""
    backward = [config for name, config in calls(wanted, causal=True) if name == "fmhaSoftmaxBackward"]
    assert [config.get("force_deterministic", False) for config in backward] == [wanted] * 2


def test_masks():
    assert {config["mask_type"] for _, config in calls(True, causal=False)} == {"NO_MASK"}
    windowed = [config for _, config in calls(True, causal=True, window=10)]
    assert {(config["mask_type"], config["sliding_window_length"]) for config in windowed} == {("CAUSAL", 10)}


@pytest.mark.parametrize(
    ("mask", "told"),
    [(FULL, ("NO_MASK", 0)), (CAUSAL, ("CAUSAL", 0)), (CAUSAL & window(10), ("CAUSAL", 10))],
    ids=["full", "causal", "window"],
)
def test_a_band_in_its_terms(mask: Mask, told):
    ((_, config),) = calls_of(lambda q, k, v: cudnn(*prepare(q, k, v, mask=mask))[0])
    assert (config["mask_type"], config["sliding_window_length"]) == told
