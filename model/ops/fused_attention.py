"""Fused attention kernels of the platforms, called for what they can serve."""

import jax
import jax.numpy as jnp
from jax import lax

from model.ops.cudnn_attention import flash_attention
from model.ops.scores import Form, Operands, visible


def cudnn(form: Form, o: Operands) -> tuple[jax.Array, None]:
    """cuDNN's flash attention on NVIDIA GPUs."""
    B, L, G, R, K = o.q.shape
    out, _ = flash_attention(o.q.reshape(B, L, G * R, K), o.k, o.v, form.scale, form.causal, form.window)
    return out.reshape(o.q.shape), None


def splash(form: Form, o: Operands, interpret: bool = False) -> tuple[jax.Array, None]:
    """Splash attention, the TPU's block-sparse flash attention; `interpret` runs it anywhere, slowly."""
    # Imported here: Pallas takes a second to load, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, L, _, R, _ = o.q.shape
    M = o.k.shape[1]
    stretches = form.stretches if form.causal or form.window else 1  # else it is all one where a query stands
    shape = (stretches * L, M)
    if form.window:
        near = form.window - 1
        mask = masks.LocalMask(shape, (near, 0 if form.causal else near), 0)
    else:
        mask = masks.CausalMask(shape) if form.causal else masks.FullMask(shape)
    # The largest blocks that divide: the kernel's tables, made when traced, have an entry for every pair of them.
    rows, columns = (next(size for size in (512, 256, 128) if n % size == 0) for n in (L, M))
    blocks = kernel.BlockSizes(
        **dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows),
        **dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), columns),
    )
    run = kernel.make_splash_mqa(
        masks.MultiHeadMask([mask] * R),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=stretches,
        attn_logits_soft_cap=form.soft_cap or None,
        interpret=interpret,
    )
    if stretches > 1:
        run = of_stretch(run, o.q_positions[0, 0] // L, stretches)
    ids = None
    if o.k_segments is not None:
        ids = kernel.SegmentIds(jnp.broadcast_to(o.q_segments, (B, L)), jnp.broadcast_to(o.k_segments, (B, M)))
    q = jnp.moveaxis(o.q * jnp.asarray(form.scale, o.q.dtype), 1, 3)  # [B, G, R, L, K]
    k, v = jnp.moveaxis(o.k, 1, 2), jnp.moveaxis(o.v, 1, 2)  # [B, G, M, K]
    out = jax.vmap(jax.vmap(run, in_axes=(0, 0, 0, None)))(q, k, v, ids)
    if ids is not None:  # there, padding sees padding, and a query that sees no key sees all
        seen = visible(form, o.q_positions, o.k_positions, o.q_segments, o.k_segments)
        out = jnp.where(jnp.any(seen, axis=-1)[:, None, None, :, None], out, 0)
    return jnp.moveaxis(out, 3, 1), None


def of_stretch(run, index: jax.Array, stretches: int):
    """A splash kernel made for all queries, for those of one stretch: its tables are cut along their query blocks."""

    def part(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None:
            return None
        size = x.shape[axis] // stretches
        return lax.dynamic_slice_in_dim(x, index * size, size, axis)

    def cut(info):
        return info._replace(
            data_next=part(info.data_next, 1),
            mask_next=part(info.mask_next, 1),
            block_mask=part(info.block_mask, 1),
            q_sequence=part(info.q_sequence, 0),
        )

    return type(run)(cut(run.fwd_mask_info), cut(run.dq_mask_info), cut(run.dkv_mask_info), **run.kwargs)
