"""Fused attention kernels of the platforms, called for what they can serve."""

import jax

from model.ops.cudnn_attention import flash_attention
from model.ops.scores import Form, Operands


def cudnn(form: Form, o: Operands) -> tuple[jax.Array, None]:
    """cuDNN's flash attention on NVIDIA GPUs."""
    B, L, G, R, K = o.q.shape
    back, ahead = form.mask.band()
    causal, window = ahead == 0, 0 if back is None else back + 1
    out, _ = flash_attention(o.q.reshape(B, L, G * R, K), o.k, o.v, form.scale, causal, window)
    return out.reshape(o.q.shape), None


def splash(form: Form, o: Operands, interpret: bool = False) -> tuple[jax.Array, None]:
    """Splash attention on TPUs; `interpret` runs it anywhere, slowly."""
    # Imported here: Pallas takes a second to load, and only TPUs need it.
    from model.ops.splash_attention import block_sparse_attention

    return block_sparse_attention(form, o, interpret), None
