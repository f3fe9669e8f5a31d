"""RWKV-6's time mixing: a matrix state that forgets at rates the token decides (https://arxiv.org/abs/2404.05892)."""

from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from model.contract import Context, Mixer, State, wide
from model.errors import UserError, choose
from model.layers import check_divides, dense
from model.mixers.mamba import uniform
from model.mixers.rwkv import spread, token_shift
from model.ops.conv import conv_tail
from model.ops.ssd import FORGET

Array = jax.Array
CHUNK = 64  # tokens whose states the backward pass holds at once


def tokens_first(*arrays: Array) -> tuple[Array, ...]:
    return tuple(jnp.swapaxes(x, 0, 1) for x in arrays)


def step(h: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
    """`y_t = r_t h_{t-1}`, `h_t = diag(e^{w_t}) h_{t-1} + k_t^T v_t`."""
    r, k, v, w = token
    y = jnp.einsum("bhk,bhkv->bhv", r, h)
    return jnp.exp(w)[..., None] * h + k[..., None] * v[..., None, :], y


def wkv6_sequential(r: Array, k: Array, v: Array, w: Array, h0: Array) -> tuple[Array, Array]:
    """One token after another."""
    h, y = lax.scan(step, h0, tokens_first(*(x.astype(w.dtype) for x in (r, k, v, w))))
    return jnp.swapaxes(y, 0, 1), h


def wkv6_chunked(r: Array, k: Array, v: Array, w: Array, h0: Array) -> tuple[Array, Array]:
    """One token after another; the backward pass recomputes the states of one chunk at a time."""
    B, L = v.shape[:2]
    n = -(-L // CHUNK)

    def chunks(x):  # a filled step has k = 0 and w = 0, which leaves the state
        x = jnp.pad(x.astype(w.dtype), [(0, 0), (0, n * CHUNK - L), (0, 0), (0, 0)])
        return jnp.moveaxis(x.reshape(B, n, CHUNK, *x.shape[2:]), 0, 2)  # [n, CHUNK, B, H, K]

    inner = jax.checkpoint(lambda h, tokens: lax.scan(step, h, tokens), prevent_cse=False)
    h, y = lax.scan(inner, h0, tuple(map(chunks, (r, k, v, w))))
    return jnp.moveaxis(y.reshape(n * CHUNK, *y.shape[2:])[:L], 0, 1), h


IMPLEMENTATIONS = {"sequential": wkv6_sequential, "chunked": wkv6_chunked}


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
    """`y_t = r_t (keep_t h_{t-1} + diag(u) k_t^T v_t)` and `h_t = keep_t diag(e^{w_t}) h_{t-1} + k_t^T v_t`, both wide.

    r, k, v, w: [B, L, H, K], w negative and wide; u: [H, K]; h0: [B, H, K, K]; keep: [B, L], false where the past is
    forgotten. A step with k = 0 and w = 0 leaves the state as it was.
    """
    if implementation is None:
        implementation = "sequential" if v.shape[1] == 1 else "chunked"
    run = choose("wkv6 implementation", implementation, IMPLEMENTATIONS)
    now = jnp.sum(r.astype(w.dtype) * k * u, axis=-1, keepdims=True) * v
    if keep is not None:
        keep = keep[..., None, None]
        r, w = jnp.where(keep, r, 0), jnp.where(keep, w, FORGET)
    y, h = run(r, k, v, w, h0)
    return y + now, h


def steps(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """From slow to fast over all channels, as the paper does half way up."""
    size = shape[0] * shape[1]
    return (-6 + 5 * (jnp.arange(size, dtype=dtype) / max(size - 1, 1)) ** 1.35).reshape(shape)


class RWKV6(Mixer):
    """RWKV-6's time mixing: a matrix state a head, whose decay and whose mix of neighbours depend on the token."""

    head_dim: int = 0  # K, channels of a head; 0: 64, or fewer so that there are four heads
    mix_rank: int = 32  # of the map that decides how much of the token before to mix in
    decay_rank: int = 64  # of the map that decides the decay
    implementation: str | None = None  # of wkv6; None picks

    groups: ClassVar[dict[str, str]] = {
        "decay": "ssm",
        "bonus": "ssm",
        "mix": "no_decay",
        "mix_base": "no_decay",
    }

    @property
    def channels(self) -> int:
        return self.head_dim or min(64, max(1, self.width // 4))

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        D, K, R, f = self.width, self.channels, self.mix_rank, wide(self.dtype)
        H = D // K
        past = self.init_state(x.shape[0], 0) if state is None else state
        wide_x = x.astype(f)  # rounded once, after mixing
        other = token_shift(x, past["shift"], ctx).astype(f) - wide_x

        def param(name, init, shape, axes):
            return self.param(name, nn.with_logical_partitioning(init, axes), shape, f)

        # Five mixes of the token and the one before, in amounts that a first mix decides.
        half_way = spread(lambda i: 1 - i**0.5)
        base = wide_x + other * param("mix_base", half_way, (D,), (None,))
        zeros = nn.initializers.zeros_init()
        low = jnp.tanh(dense((5, R), ("embed", None, None), self.dtype, "mix_down", init=zeros)(base))
        up = param("mix_up", uniform(0.01), (5, R, D), (None, None, "embed")).astype(self.dtype)
        amount = param("mix", half_way, (5, D), (None, None))[:, None, None] + jnp.einsum("blor,ord->obld", low, up)
        for_w, for_k, for_v, for_r, for_g = (wide_x + other * amount).astype(self.dtype)

        heads = partial(dense, (H, K), ("embed", "inner", None), self.dtype)
        r, k, v, g = heads("r")(for_r), heads("k")(for_k), heads("v")(for_v), heads("g")(for_g)
        low = jnp.tanh(dense(self.decay_rank, ("embed", None), self.dtype, "decay_down", init=zeros)(for_w))
        d = dense((H, K), (None, "inner", None), self.dtype, "decay_up", init=uniform(0.01))(low)
        w = -jnp.exp(param("decay", steps, (H, K), ("inner", None)) + d.astype(f))
        u = param("bonus", nn.initializers.normal(0.1), (H, K), ("inner", None))

        keep = real = None
        if ctx.segments is not None:
            real = ctx.segments > 0
            keep = (ctx.positions > 0) | ~real
            k, w = jnp.where(real[..., None, None], k, 0), jnp.where(real[..., None, None], w, 0)
        y, h = wkv6(r, k, v, w, u, past["h"], keep, implementation=self.implementation)
        # By head. Outputs are not divided by the root of 64: their variance is that much larger, as is this epsilon.
        norm = nn.LayerNorm(epsilon=64e-5, dtype=self.dtype, param_dtype=f, feature_axes=(-2, -1), name="norm")
        out = dense(D, ("inner", None, "embed"), self.dtype, "out", inputs=2)(norm(y) * nn.silu(g))
        return out, None if state is None else dict(h=h, shift=conv_tail(x, past["shift"], real))

    def check(self) -> None:
        if not self.causal:
            raise UserError("rwkv6 runs forward only; set model.causal=True, or use attention or s4d")
        check_divides("model.rwkv6.head_dim", self.channels, "the width", self.width)

    def init_state(self, batch: int, max_len: int) -> State:
        K = self.channels
        return dict(
            h=jnp.zeros((batch, self.width // K, K, K), wide(self.dtype)),
            shift=jnp.zeros((batch, 1, self.width), self.dtype),
        )

    def state_bytes(self, length: int) -> int:
        return self.width * (self.channels * jnp.dtype(wide(self.dtype)).itemsize + jnp.dtype(self.dtype).itemsize)
