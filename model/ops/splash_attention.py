"""Splash attention, the TPU's block-sparse flash attention, in Pallas: its kernel for a call's mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from model.ops.mask import FULL, Mask
from model.ops.scores import Form, Operands, visible


def block_sparse_attention(form: Form, o: Operands, interpret: bool) -> jax.Array:
    """Output `[B, L, G, R, V]`."""
    B, L, _, R, _ = o.q.shape
    M = o.k.shape[1]
    stretches = form.stretches
    if form.mask.block(0, stretches * L - 1, 0, M - 1).every:
        form, stretches = dataclasses.replace(form, mask=FULL), 1  # it is all one where a query stands
    # The largest blocks that divide: the kernel's tables, made when traced, have an entry for every pair of them.
    rows, columns = (next(size for size in (512, 256, 128) if n % size == 0) for n in (L, M))
    blocks = kernel.BlockSizes(
        **dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows),
        **dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), columns),
    )
    run = kernel.make_splash_mqa(
        masks.MultiHeadMask([in_its_terms(form.mask, (stretches * L, M))] * R),
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
    if ids is not None or not all_see_some(form.mask, stretches * L, M):
        # There, padding sees padding, and a query that sees no key sees all.
        seen = visible(form, o.q_positions, o.k_positions, o.q_segments, o.k_segments)
        out = jnp.where(jnp.any(seen, axis=-1)[:, None, None, :, None], out, 0)
    return jnp.moveaxis(out, 3, 1)


def all_see_some(mask: Mask, queries: int, keys: int) -> bool:
    """Whether it is plain that no query is left without a key: in a band it sees its own, or the first."""
    return mask.band() is not None and (mask.band()[0] is None or queries <= keys)


def in_its_terms(mask: Mask, shape: tuple[int, int]) -> masks.Mask:
    """Bands are computed inside the kernel; of others it loads the blocks that are seen in part, each kind once."""
    if mask.band() is None:
        return Tabled(mask, shape)
    if mask == FULL:
        return masks.FullMask(shape)
    return masks.CausalMask(shape) if mask.band() == (None, 0) else masks.LocalMask(shape, mask.band(), 0)


@dataclasses.dataclass(frozen=True)
class Tabled(masks.Mask):
    """A mask at positions 0, 1, 2, ..., told a block at a time: whole, it would hold L M numbers."""

    mask: Mask
    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q, k = (np.arange(n)[part] for n, part in zip(self.size, index, strict=True))
        block = self.mask.block(q[0], q[-1], k[0], k[-1])
        seen = block.some if block.every or not block.some else self.mask.sees(q[:, None], k[None, :])
        return np.broadcast_to(True if seen is None else seen, (len(q), len(k)))


def of_stretch(run, index: jax.Array, stretches: int):
    """A splash kernel made for all queries, for those of one stretch: its tables are cut along their query blocks."""

    def part(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None:
            return None
        size = x.shape[axis] // stretches
        return lax.dynamic_slice_in_dim(x, index * size, size, axis)

    def of_stretch(info):
        return info._replace(
            data_next=part(info.data_next, 1),
            mask_next=part(info.mask_next, 1),
            block_mask=part(info.block_mask, 1),
            q_sequence=part(info.q_sequence, 0),
        )

    return type(run)(
        of_stretch(run.fwd_mask_info), of_stretch(run.dq_mask_info), of_stretch(run.dkv_mask_info), **run.kwargs
    )
