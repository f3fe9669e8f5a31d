"""Additive linear attention: one recurrence of a matrix, as a loop and as matrix products.

    h_t = keep_t diag(e^{w_t}) h_{t-1} + k_t v_t^T        y_t = q_t h_t

It is linear attention (https://arxiv.org/abs/2006.16236) where nothing decays, and what came of it where a head does
or each of its channels. V stands for the channels of a value. A head that decays as one is Mamba-2's recurrence, and
its products are those of `model.ops.ssd`; those of one whose channels decay by themselves are in
`model.ops.chunked_channels`. Neither holds a state for each token.
"""

import jax
import jax.numpy as jnp
from jax import lax

from model.errors import choose
from model.ops import chunked_channels, ssd
from model.ops.decays import FORGET, STRONGEST
from model.ops.fused import SIDES, needs_unmet, picked, refuse
from model.ops.named import running

Array = jax.Array


def sequential(q: Array, k: Array, v: Array, w: Array | None, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """One token after another: the definition."""
    w = none_decays(k, h0) if w is None else w
    w = w[..., None] if w.ndim == 3 else w
    if keep is not None:
        w = jnp.where(keep[..., None, None], w, FORGET)

    def step(h, token):
        q, k, v, w = token
        h = jnp.exp(w)[..., None] * h + k[..., None] * v[..., None, :]
        return h, jnp.einsum("bhk,bhkv->bhv", q, h, precision=lax.Precision.HIGHEST)

    tokens = (jnp.swapaxes(x, 0, 1).astype(h0.dtype) for x in (q, k, v, w))
    h, y = lax.scan(step, h0, tuple(tokens))
    return jnp.swapaxes(y, 0, 1).astype(v.dtype), h


def chunked(q: Array, k: Array, v: Array, w: Array | None, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """Products within chunks, and states carried from one to the next; the gradient keeps the inputs alone."""
    w = none_decays(k, h0) if w is None else w
    if w.ndim == 3:
        opens = None if keep is None else ~keep
        y, h = ssd.chunked(v, None, w, k, q, jnp.swapaxes(h0, -1, -2), opens, None)
        return y, jnp.swapaxes(h, -1, -2)
    if keep is not None:
        w = jnp.where(keep[..., None, None], w, FORGET)
    # The state before a token has faded once more when it is read, and the token itself not yet.
    q, k, u = (x.astype(h0.dtype) for x in (q, k, v))
    y, h = chunked_channels.chunked(q * jnp.exp(w), k, u, w, h0)
    return (y + jnp.sum(q * k, axis=-1, keepdims=True) * u).astype(v.dtype), h


def none_decays(k: Array, h0: Array) -> Array:
    return jnp.zeros(k.shape[:3], h0.dtype)


def fused(q: Array, k: Array, v: Array, w: Array | None, h0: Array, keep: Array | None) -> tuple[Array, Array]:
    """The same products in kernels of their own, on GPUs; values of other sizes in several parts, keys filled up."""
    refuse("matrix_state", lacking(k, v))
    from model.ops.fused_channels import fused_channels  # here: Pallas takes a second to load, and only GPUs need it
    from model.ops.fused_state import fused_state

    dtype, channels = v.dtype, w is not None and w.ndim == 4
    run, chunk = (fused_channels, 64) if channels else (fused_state, 128)
    if channels and dtype == jnp.float16:  # which has no room for numbers measured from a chunk's middle
        q, k, v = (leaf.astype(h0.dtype) for leaf in (q, k, v))
    opens, K, side = None if keep is None else ~keep, k.shape[-1], next(n for n in SIDES if n >= k.shape[-1])
    q, k = filled(q, side), filled(k, side)
    w = filled(w, side) if channels else w
    outputs, states = [], []
    for part in parts(v.shape[-1]):
        size = part.stop - part.start
        to = next(n for n in SIDES if n >= size)
        h = jnp.pad(h0[..., part], [(0, 0), (0, 0), (0, side - K), (0, to - size)])
        y, h = run(q, k, filled(v[..., part], to), w, h, opens, chunk)
        outputs.append(y[..., :size])
        states.append(h[..., :K, :size])
    return jnp.concatenate(outputs, axis=-1).astype(dtype), jnp.concatenate(states, axis=-1)


def filled(x: Array, size: int) -> Array:
    """Zeros behind the last axis, up to a size."""
    return x if x.shape[-1] == size else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def parts(size: int) -> list[slice]:
    """A value's channels in parts that a kernel takes, the last of them filled up."""
    starts = range(0, size, SIDES[-1])
    return [slice(start, min(start + SIDES[-1], size)) for start in starts]


def lacking(k: Array, v: Array) -> list[str]:
    """Why the fused kernels cannot serve a call; empty if they can."""
    return needs_unmet(v) + misfits(k)


def misfits(k: Array) -> list[str]:
    return [f"keys of {k.shape[-1]} channels (it takes up to {SIDES[-1]})"] if k.shape[-1] > SIDES[-1] else []


KNOBS = "n_heads, or by head_dim, key_dim or n_features where a mixer has one"  # that set the channels of a key


IMPLEMENTATIONS = {"sequential": sequential, "chunked": chunked, "fused": fused}


def best(k: Array, v: Array) -> str:
    """The implementation for a call that names none."""
    return "sequential" if v.shape[1] == 1 else picked("matrix_state", v, misfits(k), KNOBS)


def matrix_state(
    q: Array,
    k: Array,
    v: Array,
    w: Array | None,
    h0: Array,
    keep: Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Outputs `[B, L, H, V]` in v's dtype, and the last state `[B, H, K, V]`; a token reads itself too.

    q, k: [B, L, H, K]; v: [B, L, H, V]; h0: [B, H, K, V], wide; keep: [B, L], false where the past is forgotten.
    w: log decays, none positive, wide: of a head [B, L, H], of each of its channels [B, L, H, K], or None for none at
    all. A step with k = 0 and w = 0 leaves the state as it was. q, k and v may be narrow.
    """
    implementation = implementation or best(k, v)
    run = choose("matrix_state implementation", implementation, IMPLEMENTATIONS)
    w = None if w is None else w.astype(h0.dtype)
    if w is not None and w.ndim == 3:  # running sums of channels are not taken apart, and need no bound
        w = jnp.maximum(w, STRONGEST)
    keep = None if keep is None else keep.astype(bool)
    with running("matrix_state", implementation):
        return run(q.astype(v.dtype), k.astype(v.dtype), v, w, h0, keep)
