"""Softmax attention that holds all scores: the definition, and the same for all heads at once."""

import jax
import jax.numpy as jnp

from model.contract import wide
from model.ops.scores import Form, Operands, levels, raw_scores, shape_scores, visible

LOW = -1e30  # the logit of a key that is not seen; finite, so that its gradient is


def reference(form: Form, o: Operands) -> tuple[jax.Array, jax.Array]:
    """The definition, one head after another. Output `[B, L, G, R, V]` and log-sum-exp `[B, L, G, R]`."""
    B, L, G, R, _ = o.q.shape
    dtype = wide(o.q.dtype)
    mask = visible(form, o.q_positions, o.k_positions, o.q_segments, o.k_segments)
    bias = None if form.bias is None else form.bias(o.bias, o.q_positions, o.k_positions)
    outputs, totals = [], []
    for h in range(G * R):
        g, r = divmod(h, R)
        q, k, v = o.q[:, :, g, r].astype(dtype), o.k[:, :, g].astype(dtype), o.v[:, :, g].astype(dtype)
        if o.additive is None:
            scores = jnp.sum(q[:, :, None] * k[:, None, :], axis=-1)
        else:
            scores = jnp.sum(o.additive[g, r] * jnp.tanh(q[:, :, None] + k[:, None, :]), axis=-1)
        scores = scores * form.scale
        if form.soft_cap:
            scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
        if bias is not None:
            scores = scores + bias[:, h]
        if o.q_levels is not None:
            scores = scores - jnp.abs(o.q_levels[:, :, None, g, r] - o.k_levels[:, None, :, g, r])
        if mask is not None:
            scores = jnp.where(mask, scores, LOW)
        if o.sinks is not None:
            scores = jnp.concatenate([jnp.full((B, L, 1), o.sinks[g, r], dtype), scores], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., -o.k.shape[1] :]
        if mask is not None:
            weights = jnp.where(mask, weights, 0)
        outputs.append(jnp.einsum("blm,bmv->blv", weights, v))
        totals.append(jax.nn.logsumexp(scores, axis=-1))
    out, lse = jnp.stack(outputs, axis=2), jnp.stack(totals, axis=2)
    return out.reshape(B, L, G, R, -1).astype(o.v.dtype), lse.reshape(B, L, G, R)


def weights_and_lse(form: Form, o: Operands) -> tuple[jax.Array, jax.Array]:
    """The weights `[B, G, R, L, M]`, and the logs of their denominators `[B, G, R, L]`."""
    raw = raw_scores(o.q, o.k, o.additive)
    scores = shape_scores(form, raw, o.bias, o.q_positions, o.k_positions, levels(o))
    mask = visible(form, o.q_positions, o.k_positions, o.q_segments, o.k_segments)
    return softmax(scores, None if mask is None else mask[:, None, None], o.sinks)


@jax.custom_jvp
def softmax(scores: jax.Array, mask: jax.Array | None, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Weights and log-sum-exp of what the mask lets through. Its gradient keeps nothing else of the scores' size."""
    if mask is not None:
        scores = jnp.where(mask, scores, LOW)
    top = jnp.max(scores, axis=-1)
    if sinks is not None:
        top = jnp.maximum(top, sinks[..., None])
    weights = jnp.exp(scores - top[..., None])
    if mask is not None:  # a padded query sees nothing, and a softmax over nothing is uniform
        weights = jnp.where(mask, weights, 0)
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[..., None] - top)
    total = jnp.where(total > 0, total, 1)
    return weights / total[..., None], top + jnp.log(total)


@softmax.defjvp
def softmax_jvp(primals, tangents):
    (_, _, sinks), (d_scores, _, d_sinks) = primals, tangents
    weights, lse = softmax(*primals)
    d_lse = jnp.sum(weights * d_scores, axis=-1)
    if sinks is not None:
        d_lse = d_lse + jnp.exp(sinks[..., None] - lse) * d_sinks[..., None]
    return (weights, lse), (weights * (d_scores - d_lse[..., None]), d_lse)


def xla(form: Form, o: Operands) -> tuple[jax.Array, jax.Array]:
    """All heads at once; memory grows with L M."""
    weights, lse = weights_and_lse(form, o)
    out = jnp.einsum("bgrlm,bgmv->bgrlv", weights.astype(o.v.dtype), jnp.moveaxis(o.v, 1, 2))
    return jnp.moveaxis(out, 3, 1), jnp.moveaxis(lse, 3, 1)
