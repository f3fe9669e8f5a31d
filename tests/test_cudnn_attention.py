"""cuDNN's calls as XLA will read them: made on any machine, run on a GPU by `experiments.bench`."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.ops import fused_attention
from model.ops.attention import attention, prepare
from model.ops.cudnn_attention import deterministic, flash_attention
from model.ops.fused_attention import cudnn
from model.ops.mask import CAUSAL, FULL, Mask, window

pytestmark = pytest.mark.quick
Q, KV = (jax.ShapeDtypeStruct((2, 64, heads, 32), jnp.bfloat16) for heads in (4, 2))


def calls(wanted: bool, **options) -> list[tuple[str, dict]]:
    """Name and settings of each call in a program with two attentions and their gradient."""

    def objective(q, k, v):
        y, _ = flash_attention(q, k, v, None, 0.1, **options)
        y, _ = flash_attention(y, k, v, None, 0.1, **options)
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


PADDED = dict.fromkeys(("q_segments", "k_segments"), (np.arange(64) < np.asarray([[40], [0]])).astype(np.int32))


@pytest.mark.parametrize(("mask", "told"), [(FULL, "PADDING"), (CAUSAL, "PADDING_CAUSAL")], ids=["full", "causal"])
def test_padding_behind_rows_is_told_by_their_lengths(mask: Mask, told):
    def objective(q, k, v):
        return jnp.sum(cudnn(*prepare(q, k, v, mask=mask, right_padded=True, **PADDED))[0].astype(jnp.float32))

    found = calls_of(jax.grad(objective, argnums=(0, 1, 2)))
    assert [name for name, _ in found] == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert {config["mask_type"] for _, config in found} == {told}


def test_rows_of_odd_length_are_one_longer():
    odd = jax.ShapeDtypeStruct((2, 63, 4, 32), jnp.bfloat16)
    for mask, told in ((FULL, "PADDING"), (CAUSAL, "CAUSAL")):
        function = jax.jit(lambda q, mask=mask: cudnn(*prepare(q, q, q, mask=mask))[0])
        text = function.trace(odd).lower(lowering_platforms=("cuda",)).as_text()
        assert "tensor<2x64x4x32xbf16>" in text and f"mask_type\\22: \\22{told}\\22" in text


@pytest.mark.few(4)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("n", [64, 63])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
def test_what_the_kernel_is_asked_for_is_attention(monkeypatch, mask, n, padded):
    """With the definition in the kernel's place: the lengths it is given, and what is cut off of its outputs."""

    def flash(q, k, v, lengths, scale, causal, window):
        assert q.shape[1] % 2 == k.shape[1] % 2 == 0 and (causal, window) == (mask == CAUSAL, 0)
        scores = scale * jnp.einsum("blgrk,bmgk->bgrlm", q.reshape(2, -1, 2, 2, 32), k)
        at = jnp.arange(k.shape[1])
        seen = at < (k.shape[1] if lengths is None else lengths[:, None, None, None, None])
        if causal:
            seen = seen & (at[:, None] >= at)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bgrlm,bmgk->blgrk", weights, v).reshape(q.shape), None

    monkeypatch.setattr(fused_attention, "flash_attention", flash)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, heads, 32)), jnp.float32) for heads in (4, 2, 2))
    options, real = dict(mask=mask), np.ones((2, n), bool)
    if padded:
        options |= {name: some[:, :n] for name, some in PADDED.items()} | dict(right_padded=True)
        real = PADDED["k_segments"][:, :n] > 0
    out, _ = cudnn(*prepare(q, k, v, **options))
    want = attention(q, k, v, **options, implementation="reference")
    assert np.isfinite(out).all(), "rows of padding alone too"
    np.testing.assert_allclose(out.reshape(q.shape)[real], want[real], atol=2e-5)
