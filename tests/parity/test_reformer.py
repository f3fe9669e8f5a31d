"""Reformer's attention against transformers: the same weights and directions, the same outputs and gradients."""

import jax.numpy as jnp
import numpy as np
import torch
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from model.contract import Context
from model.mixers.reformer import Reformer
from model.ops.lsh import rotations
from tests.parity.agreement import agree, normal

B, L, H, K = 2, 48, 4, 8
D, CHUNK, BUCKETS, ROUNDS = H * K, 8, 4, 2


def with_a_chunk_before(qk: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Tokens in the first chunk of no round, `[B, L, H, 1]`: theirs looks at the last one, of another round."""
    turned = np.einsum("blhk,hkrn->blhrn", qk, directions)
    bucket = np.argmax(np.concatenate([turned, -turned], axis=-1), axis=-1)
    rank = np.argsort(np.argsort(bucket, axis=1, kind="stable"), axis=1)
    return np.all(rank >= CHUNK, axis=-1)[..., None]


def test_hashed_attention_is_transformers(monkeypatch):
    directions = rotations(0, H, K, ROUNDS, BUCKETS)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor(directions))
    sizes = dict(num_attention_heads=H, attention_head_size=K, hidden_size=D, num_buckets=BUCKETS, num_hashes=ROUNDS)
    config = ReformerConfig(**sizes, lsh_attn_chunk_length=CHUNK, lsh_attention_probs_dropout_prob=0.0)
    module, mixer = LSHSelfAttention(config), Reformer(D, causal=False, chunk=CHUNK, n_buckets=BUCKETS, rounds=ROUNDS)
    arrays = normal(x=(B, L, D), qk=(D, D), v=(D, D))
    arrays |= {name: arrays[name] / np.float32(np.sqrt(D)) for name in ("qk", "v")}
    kept = with_a_chunk_before((arrays["x"] @ arrays["qk"]).reshape(B, L, H, K), directions)
    assert 0.5 < kept.mean() < 1

    def theirs(x, qk, v):
        weights = {"query_key.weight": qk.T, "value.weight": v.T}
        y = torch.func.functional_call(module, weights, (x,)).hidden_states
        return y.reshape(B, L, H, K) * torch.tensor(kept)

    def ours(x, qk, v):
        kernels = {"qk": qk.reshape(D, H, K), "v": v.reshape(D, H, K), "out": jnp.eye(D).reshape(H, K, D)}
        y, _ = mixer.apply({"params": {name: {"kernel": one} for name, one in kernels.items()}}, x, Context())
        return y.reshape(B, L, H, K) * kept

    agree(theirs, ours, arrays)
