"""Position encodings against transformers."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPTNeoXConfig, LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from model.ops.attention import attention
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


SCALINGS = {
    "none": (dict(rope_type="default"), {}),
    "linear": (dict(rope_type="linear", factor=4.0), dict(factor=4.0)),
    "dynamic_ntk": (dict(rope_type="dynamic", factor=2.0), dict(factor=2.0, original_length=16)),
    "yarn": (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        dict(factor=4.0, original_length=16),
    ),
    "llama3": (
        dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=16),
        dict(factor=4.0, original_length=16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_and_its_scalings(scaling):
    given, settings = SCALINGS[scaling]
    config = LlamaConfig(
        hidden_size=H * K,
        num_attention_heads=H,
        max_position_embeddings=16,
        rope_parameters=dict(given, rope_theta=10_000.0),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(L)[None])

    def theirs(q, k):
        return torch.stack(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2))

    agree(theirs, partial(rotated, scaling=scaling, **settings), normal(**PAIR))


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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_t5_buckets(causal):
    far = np.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(torch.tensor(far), bidirectional=not causal)
    buckets = T5Bias(32, 128, causal)(jnp.arange(32.0)[:, None], jnp.zeros((1, 1), jnp.int32), jnp.asarray(far)[None])
    np.testing.assert_array_equal(np.asarray(buckets).ravel(), theirs.numpy())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
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
        return attention(q, k, v, causal=causal, bias=bias, scale=1.0, implementation="tiled")

    agree(theirs, ours, {name: 0.5 * x for name, x in normal(**PAIR, v=(B, L, H, K), table=(32, H)).items()})
