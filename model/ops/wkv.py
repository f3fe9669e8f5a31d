"""RWKV-6's recurrence (https://arxiv.org/abs/2404.05892), as a loop, as matrix products and in kernels.

    y_t = r_t (keep_t h_{t-1} + diag(u) k_t^T v_t)        h_t = keep_t diag(e^{w_t}) h_{t-1} + k_t^T v_t

It is linear attention whose channels decay by themselves but for the token at hand, which is read by weights of its
own: the products are those of `model.ops.chunked_channels`, and the kernels are those of `model.ops.matrix_state`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from model.errors import choose
from model.ops import matrix_state
from model.ops.chunked_channels import chunked, einsum, forgetting
from model.ops.fused import refuse
from model.ops.named import running

Array = jax.Array


def sequential(r: Array, k: Array, v: Array, w: Array, h0: Array, keep: Array | None = None) -> tuple[Array, Array]:
    """One token after another: the definition."""
    r, w = forgetting(r, w, keep)

    def step(h, token):
        r, k, v, w = token
        y = einsum("bhk,bhkv->bhv", r, h)
        return jnp.exp(w)[..., None] * h + k[..., None] * v[..., None, :], y

    h, y = lax.scan(step, h0, tuple(jnp.swapaxes(x, 0, 1).astype(h0.dtype) for x in (r, k, v, w)))
    return jnp.swapaxes(y, 0, 1), h


def fused(r: Array, k: Array, v: Array, w: Array, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """In the kernels of linear attention, on GPUs: a token reads the state that its predecessor left, so that it is
    given its predecessor's key, value and decay."""
    refuse("wkv6", matrix_state.lacking(k, v))

    def earlier(x, first):
        return jnp.concatenate([jnp.full_like(x[:, :1], first), x[:, :-1]], axis=1)

    r, kept = forgetting(r, w, keep)[0], None if keep is None else earlier(keep, True)
    y, h = matrix_state.fused(r, *(earlier(x, 0) for x in (k, v, w)), h0, kept)
    left = jnp.exp(w[:, -1]) if keep is None else jnp.where(keep[:, -1, None, None], jnp.exp(w[:, -1]), 0)
    return y.astype(h0.dtype), left[..., None] * h + k[:, -1, ..., None].astype(h.dtype) * v[:, -1, :, None, :]


IMPLEMENTATIONS = {"sequential": sequential, "chunked": chunked, "fused": fused}


def wkv6(
    r: Array,
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    h0: Array,
    keep: Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, K]` and the last state, both wide.

    r, k, v, w: [B, L, H, K], w negative and wide; u: [H, K]; h0: [B, H, K, K]; keep: [B, L], false where the past is
    forgotten. A step with k = 0 and w = 0 leaves the state as it was.
    """
    if implementation is None:
        implementation = matrix_state.best(k, v)
    run = choose("wkv6 implementation", implementation, IMPLEMENTATIONS)
    now = jnp.sum(u * r * k, axis=-1, keepdims=True) * v
    with running("wkv6", implementation):
        y, h = run(r, k, v, w, h0, keep)
    return y + now, h
