"""Sparse attention against transformers."""

import jax.numpy as jnp
import numpy as np
import torch
from transformers import BigBirdConfig, LongformerConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from model.contract import Context
from model.mixers.longformer import Longformer
from model.ops.attention import attention
from model.ops.patterns import Table
from tests.parity.agreement import agree, normal

B, D, H = 2, 16, 2
K = D // H


def test_longformer():
    """Windows of 4 to each side; global are the first 3 tokens, by projections of their own."""
    L, first = 32, 3
    names = dict(q="query", k="key", v="value", global_q="query_global", global_k="key_global", global_v="value_global")
    config = LongformerConfig(
        hidden_size=D, num_attention_heads=H, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    module = LongformerSelfAttention(config, 0)
    globally = torch.zeros(B, L, dtype=torch.bool)
    globally[:, :first] = True
    marks = dict(
        attention_mask=torch.where(globally, 10000.0, 0.0),
        is_index_masked=torch.zeros_like(globally),
        is_index_global_attn=globally,
        is_global_attn=True,
    )

    def theirs(x, **given):
        params = {f"{name}.weight": given[f"{ours}_w"] for ours, name in names.items()}
        params |= {f"{name}.bias": given.get(f"{ours}_b", torch.zeros(D)) for ours, name in names.items()}
        return torch.func.functional_call(module, params, (x,), marks)[0]

    def ours(x, **given):
        mixer = Longformer(width=D, causal=False, n_heads=H, near=5, global_tokens=first, bias="qkv")
        params = {
            name: dict(
                kernel=given[f"{name}_w"].T.reshape(D, H, K), bias=given.get(f"{name}_b", jnp.zeros(D)).reshape(H, K)
            )
            for name in names
        }
        params["out"] = dict(kernel=jnp.eye(D).reshape(H, K, D))
        return mixer.apply(dict(params=params), x, Context())[0]

    # A bias of the keys raises all scores of a query alike, so that its gradient is rounding alone.
    biases = {f"{name}_b": (D,) for name in names if not name.endswith("k")}
    agree(theirs, ours, normal(x=(B, L, D), **{f"{name}_w": (D, D) for name in names}, **biases))


def test_bigbird():
    """The same blocks, random ones as drawn there: a table for every head."""
    block, L = 4, 48
    n = L // block
    config = BigBirdConfig(
        hidden_size=D, num_attention_heads=H, block_size=block, num_random_blocks=2, max_position_embeddings=64
    )
    module = BigBirdBlockSparseAttention(config, seed=3).train()  # which draws; it has no dropout
    drawn, draw = [], module._bigbird_block_rand_mask_with_head
    module._bigbird_block_rand_mask_with_head = lambda **options: drawn.append(draw(**options)) or drawn[-1]
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(B, L), block)
    given = dict(band_mask=band, from_mask=rows, to_mask=columns, from_blocked_mask=blocked, to_blocked_mask=blocked)

    def theirs(q, k, v):
        for name, x in dict(query=q, key=k, value=v).items():
            setattr(module, name, Given(x))
        return module(q.detach(), **given)[0]

    def ours(q, k, v):
        q, k, v = (x.reshape(B, L, H, K) for x in (q, k, v))
        outputs = []
        for head in range(H):
            here = (slice(None), slice(None), slice(head, head + 1))
            mask = Table(block, table(n, drawn[0][head]))
            outputs.append(attention(q[here], k[here], v[here], mask=mask, implementation="blocks"))
        return jnp.concatenate(outputs, axis=2).reshape(B, L, D)

    agree(theirs, ours, normal(q=(B, L, D), k=(B, L, D), v=(B, L, D)))


class Given(torch.nn.Module):
    """In the place of a projection: what was given."""

    def __init__(self, x: torch.Tensor):
        super().__init__()
        self.x = x

    def forward(self, _) -> torch.Tensor:
        return self.x


def table(n: int, drawn: np.ndarray) -> tuple[str, ...]:
    """Neighbours, the first and the last block, which see all, and of those between what each has drawn."""
    seen = abs(np.subtract.outer(np.arange(n), np.arange(n))) < 2
    seen[[0, -1]] = seen[:, [0, -1]] = True
    for i, blocks in enumerate(drawn):
        seen[i + 1, blocks] = True
    return tuple("".join("01"[int(one)] for one in row) for row in seen)
