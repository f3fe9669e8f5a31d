"""Position encodings against transformers."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPTNeoXConfig, LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from model.ops.attention import attention
from model.ops.mask import CAUSAL, FULL
from model.positions import POSITIONS
from model.positions.score_bias import T5Bias
from tests.parity.agreement import agree, normal

B, L, H, K = 2, 64, 4, 16
PAIR = dict(q=(B, L, H, K), k=(B, L, H, K))


def rotated(q, k, **settings):
    """Queries and keys one after the other, `[2, B, L, H, K]`."""
    position, at = POSITIONS["rope"](**settings), jnp.arange(L)[None]
    turn = partial(position.apply, {}, positions=at, span=L)
    return jnp.stack([turn(q, method="rotate_queries"), turn(k, method="rotate_keys")])


LENGTH = dict(original_max_position_embeddings=16)
OURS = dict(factor=4.0, original_length=16)
LONG = dict(
    short_factor=(1.0, 1.02, 1.1, 1.3, 1.4, 1.5, 1.9, 2.0), long_factor=(1.0, 1.5, 3.0, 5.0, 9.0, 20.0, 30.0, 64.0)
)
# Of each: its scaling here, its parameters there, and what differs from the defaults here.
SCALINGS = {
    "none": ("none", dict(rope_type="default"), {}),
    "linear": ("linear", dict(rope_type="linear", factor=4.0), dict(factor=4.0)),
    "dynamic_ntk": ("dynamic_ntk", dict(rope_type="dynamic", factor=2.0), dict(factor=2.0, original_length=16)),
    "yarn": ("yarn", dict(rope_type="yarn", factor=4.0, **LENGTH), OURS),
    "llama3": (
        "llama3",
        dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **LENGTH),
        OURS,
    ),
    "longrope": ("longrope", dict(rope_type="longrope", factor=4.0, **LENGTH, **LONG), OURS | LONG),
}
# Settings of their own, away from the defaults.
for name, scaling, own in (
    ("yarn betas", "yarn", dict(beta_fast=4.0, beta_slow=0.3)),
    ("yarn not truncated", "yarn", dict(truncate=False, beta_slow=0.3)),
    ("yarn of DeepSeek", "yarn", dict(mscale=0.707, mscale_all_dim=0.707)),
    ("yarn mscale", "yarn", dict(mscale=1.3, mscale_all_dim=0.4)),
    ("llama3 bounds", "llama3", dict(low_freq_factor=0.2, high_freq_factor=1.5)),
):
    SCALINGS[name] = (scaling, SCALINGS[scaling][1] | own, OURS | own)


def llama(given):
    return LlamaConfig(
        hidden_size=H * K,
        num_attention_heads=H,
        max_position_embeddings=16,
        rope_parameters=dict(given, rope_theta=10_000.0),
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_and_its_scalings(name):
    scaling, given, settings = SCALINGS[name]
    cos, sin = LlamaRotaryEmbedding(llama(given))(torch.zeros(1), torch.arange(L)[None])

    def theirs(q, k):
        return torch.stack(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2))

    agree(theirs, partial(rotated, scaling=scaling, **settings), normal(**PAIR))


@pytest.mark.parametrize("span", [16, 17, 64])
@pytest.mark.parametrize("name", list(SCALINGS)[1:])
def test_frequencies_and_attention_factors(name, span):
    scaling, given, settings = SCALINGS[name]
    speeds, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](llama(given), torch.device("cpu"), seq_len=span)
    found, temperature = POSITIONS["rope"](scaling=scaling, **settings).frequencies(K, span)
    np.testing.assert_allclose(found, speeds.double().numpy(), rtol=1e-6)
    assert temperature == pytest.approx(factor, rel=1e-6)


def test_partial_rotary():
    config = GPTNeoXConfig(hidden_size=H * K, num_attention_heads=H, rope_parameters=dict(
        rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.25))  # fmt: skip
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(torch.zeros(1), torch.arange(L)[None])

    def theirs(q, k):
        return torch.stack(neox.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2))

    agree(theirs, partial(rotated, fraction=0.25), normal(**PAIR))


def test_interleaved_layout():
    sin, cos = gptj.create_sinusoidal_positions(L, K)[None].chunk(2, dim=-1)

    def theirs(q, k):
        return torch.stack([gptj.apply_rotary_pos_emb(x, sin, cos) for x in (q, k)])

    agree(theirs, partial(rotated, layout="interleaved"), normal(**PAIR))


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi(heads):
    shape = (B, L, heads, K)
    bias = build_alibi_tensor(torch.ones(1, L), heads, torch.float32)[None] + torch.full((L, L), -torch.inf).triu(1)

    def theirs(q, k, v):
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias).transpose(1, 2)

    bias_of_ours = POSITIONS["alibi"]().bias(heads, True)
    agree(theirs, partial(attention, bias=bias_of_ours, implementation="tiled"), normal(q=shape, k=shape, v=shape))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_t5_buckets(causal):
    far = np.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(torch.tensor(far), bidirectional=not causal)
    buckets = T5Bias(32, 128, causal)(
        {"table": jnp.arange(32.0)[:, None]}, jnp.zeros((1, 1), jnp.int32), jnp.asarray(far)[None]
    )
    np.testing.assert_array_equal(np.asarray(buckets).ravel(), theirs.numpy())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_t5_bias(causal):
    config = T5Config(d_model=H * K, d_kv=K, num_heads=H, is_decoder=causal)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    mask = torch.full((L, L), -torch.inf).triu(1) if causal else torch.zeros(L, L)

    def theirs(q, k, v, table):
        names = {"relative_attention_bias.weight": table}
        with torch.nn.utils.stateless._reparametrize_module(module, names):
            bias = module.compute_bias(L, L) + mask
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, attn_mask=bias, scale=1.0).transpose(1, 2)

    def ours(q, k, v, table):
        bias = POSITIONS["t5"]().apply({"params": {"table": table}}, H, causal, method="bias")
        return attention(q, k, v, mask=CAUSAL if causal else FULL, bias=bias, scale=1.0, implementation="tiled")

    agree(theirs, ours, {name: 0.5 * x for name, x in normal(**PAIR, v=(B, L, H, K), table=(32, H)).items()})
