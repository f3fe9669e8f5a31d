"""Fused attention kernels of the platforms, called for what they can serve."""

import jax
import jax.numpy as jnp

from model.ops.cudnn_attention import flash_attention
from model.ops.scores import Form, Operands


def cudnn(form: Form, o: Operands) -> tuple[jax.Array, None]:
    """cuDNN's flash attention on NVIDIA GPUs, which takes rows of even length."""
    (B, L, G, R, K), M = o.q.shape, o.k.shape[1]
    back, ahead = form.mask.band()
    causal, window = ahead == 0, 0 if back is None else back + 1
    lengths = None
    if o.k_segments is not None:
        # At least one key: rows of padding alone get something that means nothing, and no NaN.
        lengths = jnp.broadcast_to(jnp.maximum(jnp.sum(o.k_segments > 0, axis=1, dtype=jnp.int32), 1), (B,))
    elif M % 2 and not causal:
        lengths = jnp.full(B, M, jnp.int32)
    q, k, v = (evened(x) for x in (o.q.reshape(B, L, G * R, K), o.k, o.v))
    out, _ = flash_attention(q, k, v, lengths, form.scale, causal, window)
    return out[:, :L].reshape(o.q.shape), None


def evened(x: jax.Array) -> jax.Array:
    """One token more, of zeros, where their number is odd; x: [B, L, H, K]."""
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def flash(form: Form, o: Operands, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Our own flash attention on NVIDIA GPUs; `interpret` runs it anywhere, slowly."""
    from model.ops import flash_attention  # here, as below

    return flash_attention.flash(form, o, interpret)


def splash(form: Form, o: Operands, interpret: bool = False) -> tuple[jax.Array, None]:
    """Splash attention on TPUs; `interpret` runs it anywhere, slowly."""
    # Imported here: Pallas takes a second to load, and only TPUs need it.
    from model.ops.splash_attention import block_sparse_attention

    return block_sparse_attention(form, o, interpret), None
