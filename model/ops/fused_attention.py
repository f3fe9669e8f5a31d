"""Fused attention kernels of the platforms, called for what they can serve."""

import jax
import jax.numpy as jnp

from model.ops.cudnn_attention import flash_attention
from model.ops.scores import Form, Operands


def cudnn(form: Form, o: Operands) -> tuple[jax.Array, jax.Array]:
    """cuDNN's flash attention on NVIDIA GPUs."""
    B, L, G, R, K = o.q.shape
    return flash_attention(o.q.reshape(B, L, G * R, K), o.k, o.v, form.scale, form.causal, form.window)


def splash(form: Form, o: Operands, interpret: bool = False) -> tuple[jax.Array, None]:
    """Splash attention, the TPU's block-sparse flash attention; `interpret` runs it anywhere, slowly."""
    # Imported here: Pallas takes a second to load, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, L, _, R, _ = o.q.shape
    M = o.k.shape[1]
    if form.window:
        near = form.window - 1
        mask = masks.LocalMask((L, M), (near, 0 if form.causal else near), 0)
    else:
        mask = masks.CausalMask((L, M)) if form.causal else masks.FullMask((L, M))
    run = kernel.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * R), attn_logits_soft_cap=form.soft_cap or None, interpret=interpret
    )
    ids = None
    if o.k_segments is not None:
        ids = kernel.SegmentIds(jnp.broadcast_to(o.q_segments, (B, L)), jnp.broadcast_to(o.k_segments, (B, M)))
    q = jnp.moveaxis(o.q * jnp.asarray(form.scale, o.q.dtype), 1, 3)  # [B, G, R, L, K]
    k, v = jnp.moveaxis(o.k, 1, 2), jnp.moveaxis(o.v, 1, 2)  # [B, G, M, K]
    out = jax.vmap(jax.vmap(run, in_axes=(0, 0, 0, None)))(q, k, v, ids)
    if ids is not None:  # padding sees padding there
        out = jnp.where(ids.q[:, None, None, :, None] > 0, out, 0)
    return jnp.moveaxis(out, 3, 1), None
