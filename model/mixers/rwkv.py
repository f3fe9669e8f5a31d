"""RWKV-4's time mixing: an average over the past whose weights decay by channel (https://arxiv.org/abs/2305.13048)."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.contract import Context, Mixer, State, wide
from model.documents import neighbours
from model.layers import dense
from model.ops.conv import conv_tail, shift
from model.ops.decays import exponents
from model.ops.scan import LINEAR, linear_scan

Array = jax.Array
EMPTY = -1e30  # the exponent of a sum that nothing has entered; finite, so that differences of exponents are numbers


def wkv(
    k: Array,
    v: Array,
    w: Array,
    u: Array,
    state: tuple[Array, Array, Array],
    first: Array,
    real: Array,
    implementation: str | None,
) -> tuple[Array, tuple[Array, Array, Array]]:
    """`wkv_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without v)`, `[B, L, E]`.

    k, v: [B, L, E]; w, u: [E], w negative; first, real: [B, L], where the past is forgotten and where a token counts.
    The state (aa, bb, pp), each [B, E], holds the sums above and below as aa e^pp and bb e^pp. Any pp would do that
    keeps the others in range, so no gradient runs through it.
    """
    state = (*state[:2], lax.stop_gradient(state[2]))
    if implementation == "sequential" or (implementation is None and k.shape[1] == 1):
        return wkv_sequential(k, v, w, u, state, first, real)
    return wkv_parallel(k, v, w, u, state, first, real, implementation)


def weighted_average(aa: Array, bb: Array, pp: Array, k: Array, v: Array, u: Array) -> Array:
    """The average of what is held and the token at hand."""
    top = lax.stop_gradient(jnp.maximum(pp, u + k))
    past, now = jnp.exp(pp - top), jnp.exp(u + k - top)
    return (past * aa + now * v) / (past * bb + now)


def wkv_sequential(k, v, w, u, state, first, real):
    """One token after another: the definition."""

    def step(state, token):
        k, v, first, real = token
        aa, bb, pp = state
        pp = jnp.where(first[:, None], EMPTY, pp)
        y = weighted_average(aa, bb, pp, k, v, u)
        top = lax.stop_gradient(jnp.maximum(pp + w, k))
        past, now = jnp.exp(pp + w - top), jnp.exp(k - top)
        new = (past * aa + now * v, past * bb + now, top)
        return jax.tree.map(lambda new, old: jnp.where(real[:, None], new, old), new, state), y

    tokens = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (k, v, first, real))
    state, y = lax.scan(step, state, tokens)
    return jnp.swapaxes(y, 0, 1), state


def wkv_parallel(k, v, w, u, state, first, real, implementation):
    """The exponents by a scan of maxima; then the sums by a linear one, whose factors are at most 1."""
    aa, bb, pp0 = state
    first, real = first[..., None], real[..., None]
    decay = jnp.where(first & real, -jnp.inf, jnp.where(real, w, 0))
    entering = jnp.where(real, k, -jnp.inf)
    before, pp, end = exponents(*lax.stop_gradient((decay, entering, pp0)))

    a = jnp.exp(decay + before - pp)[..., None]
    b = jnp.exp(entering - pp)[..., None] * jnp.stack([v, jnp.ones_like(v)], axis=-1)
    h0 = jnp.stack([aa, bb], axis=-1)
    h, last = linear_scan(jnp.broadcast_to(a, b.shape), b, h0, implementation=implementation)
    held_aa, held_bb = shift(h[..., 0], aa[:, None]), shift(h[..., 1], bb[:, None])
    y = weighted_average(held_aa, held_bb, jnp.where(first, EMPTY, before), k, v, u)
    return y, (last[..., 0], last[..., 1], end)


# How the paper starts its vectors, for a layer half way up: of channel i in [0, 1).


def spread(of: Any) -> nn.initializers.Initializer:
    """A vector that is a function of the channel, in [0, 1)."""
    return lambda key, shape, dtype: jnp.broadcast_to(of(jnp.arange(shape[-1], dtype=dtype) / shape[-1]), shape)


def zigzag(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """log 0.3, and half more or less in turn."""
    return 0.5 * ((jnp.arange(1, shape[0] + 1) % 3) - 1).astype(dtype) + np.log(0.3)


class RWKV(Mixer):
    """RWKV-4's time mixing: a decaying average over the past, with a bonus for the token at hand."""

    implementation: Literal[*LINEAR] | None = None  # sequential, or one of the scan; None picks

    forward_only: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {
        "decay": "ssm",
        "bonus": "ssm",
        "mix_k": "no_decay",
        "mix_v": "no_decay",
        "mix_r": "no_decay",
    }

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check_direction()
        D, f = self.width, wide(self.dtype)
        past = self.init_state(x.shape[0], 0) if state is None else state
        shifted = shift(x, past["shift"], *neighbours(ctx)).astype(f)

        def param(name, init, axis):
            return self.weight(name, init, (D,), (axis,))

        def mixed(name, init):  # this much of the token, the rest of the one before
            mu = param(f"mix_{name}", spread(init), None)
            return dense(D, ("embed", "inner"), self.dtype, name)(shifted + mu * (x - shifted))

        k = mixed("k", lambda i: i**0.5).astype(f)
        v = mixed("v", lambda i: i**0.5 + 0.15).astype(f)
        r = nn.sigmoid(mixed("r", lambda i: i**0.25))
        w = -jnp.exp(param("decay", spread(lambda i: -5 + 8 * i**1.35), "inner"))
        u = param("bonus", zigzag, "inner")

        real, first = jnp.ones(x.shape[:2], bool), jnp.zeros(x.shape[:2], bool)
        if ctx.segments is not None:
            real = ctx.segments > 0
            first = (ctx.positions == 0) & real
        held = (past["aa"], past["bb"], past["pp"])
        y, (aa, bb, pp) = wkv(k, v, w, u, held, first, real, self.implementation)
        out = dense(D, ("inner", "embed"), self.dtype, "out")(r * y.astype(self.dtype))
        if state is None:
            return out, None
        return out, dict(aa=aa, bb=bb, pp=pp, shift=conv_tail(x, past["shift"], real))

    def init_state(self, batch: int, max_len: int) -> State:
        empty = jnp.zeros((batch, self.width), wide(self.dtype))
        return dict(aa=empty, bb=empty, pp=empty + EMPTY, shift=jnp.zeros((batch, 1, self.width), self.dtype))

    def state_bytes(self, length: int) -> int:
        return self.width * (3 * jnp.dtype(wide(self.dtype)).itemsize + jnp.dtype(self.dtype).itemsize)
