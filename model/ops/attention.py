"""Softmax attention over positions and segments.

q: [B, L, H, K]; k, v: [B, M, G, K] with G dividing H (grouped queries: head h reads key-value head h // (H/G)).
A query sees a key of its own segment (0 sees and is seen by nothing) and, if causal, not of a later position.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from model.contract import wide
from model.errors import choose

Bias = Callable[[jax.Array, jax.Array], jax.Array | None]


def visible(
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_segments: jax.Array | None,
    k_segments: jax.Array | None,
    causal: bool,
) -> jax.Array | None:
    """The mask `[B or 1, L, M]`, True where a query sees a key; None where all see all."""
    mask = None
    if causal:
        mask = q_positions[:, :, None] >= k_positions[:, None, :]
    if k_segments is not None:
        same = (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] > 0)
        mask = same if mask is None else mask & same
    return mask


def reference(q, k, v, mask, bias):
    """The definition, one head after another."""
    H, G, dtype = q.shape[2], k.shape[2], wide(q.dtype)
    outputs = []
    for h in range(H):
        g = h // (H // G)
        scores = jnp.einsum("blk,bmk->blm", q[:, :, h].astype(dtype), k[:, :, g].astype(dtype))
        scores = scores / jnp.sqrt(jnp.asarray(q.shape[-1], dtype))
        if bias is not None:
            scores = scores + bias[:, h]
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
        outputs.append(jnp.einsum("blm,bmk->blk", weights, v[:, :, g].astype(dtype)))
    return jnp.stack(outputs, axis=2).astype(q.dtype)


def xla(q, k, v, mask, bias):
    """All heads at once; the scores are held, so memory grows with L M."""
    B, L, H, K = q.shape
    G, dtype = k.shape[2], wide(q.dtype)
    q = (q * jnp.asarray(K**-0.5, q.dtype)).reshape(B, L, G, H // G, K)
    scores = jnp.einsum("blghk,bmgk->bghlm", q, k, preferred_element_type=dtype)
    if bias is not None:
        scores = scores + bias.reshape(bias.shape[0], G, H // G, *bias.shape[2:])
    if mask is not None:
        mask = mask[:, None, None]
        scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:  # a padded query sees nothing, and softmax over nothing is uniform
        weights = jnp.where(mask, weights, 0)
    out = jnp.einsum("bghlm,bmgk->blghk", weights.astype(v.dtype), v)
    return out.reshape(B, L, H, K)


IMPLEMENTATIONS = {"reference": reference, "xla": xla}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    causal: bool = True,
    bias: Bias = lambda q_positions, k_positions: None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention, `[B, L, H, K]`; `bias` maps positions to what is added to the scaled scores."""
    mask = visible(q_positions, k_positions, q_segments, k_segments, causal)
    run = choose("attention implementation", implementation or "xla", IMPLEMENTATIONS)
    return run(q, k, v, mask, bias(q_positions, k_positions))
