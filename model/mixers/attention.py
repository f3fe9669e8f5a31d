"""Softmax attention with a key-value cache."""

from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from model.contract import Context, Mixer, State
from model.errors import UserError
from model.layers import check_divides, dense
from model.ops.attention import attention
from model.positions import Position


class Attention(Mixer):
    """Multi-head softmax attention; fewer key-value heads make it grouped-query, one makes it multi-query."""

    position: Any = Position  # builds the position encoding

    n_heads: int = 4
    n_kv_heads: int = 0  # 0: as many as n_heads
    implementation: str | None = None  # of the attention op; None picks

    softmax: ClassVar[bool] = True
    cost: ClassVar[int] = 2

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    def check(self) -> None:
        check_divides("model.attention.n_heads", self.n_heads, "model.width", self.width)
        if self.n_kv_heads > self.n_heads:
            raise UserError(
                f"n_kv_heads {self.n_kv_heads} is more than n_heads {self.n_heads}; closest: {self.n_heads}"
            )
        check_divides("model.attention.n_kv_heads", self.kv_heads, "model.attention.n_heads", self.n_heads)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check()
        if state is not None and not self.causal:
            raise UserError("a bidirectional model cannot carry a state; set model.causal=True to generate")
        H, G, K = self.n_heads, self.kv_heads, self.width // self.n_heads
        position = self.position(name="position", dtype=self.dtype)
        q = dense((H, K), ("embed", "heads", None), self.dtype, "q")(x)
        k = dense((G, K), ("embed", "heads", None), self.dtype, "k")(x)
        v = dense((G, K), ("embed", "heads", None), self.dtype, "v")(x)
        q, k = position.rotate(q, ctx.positions), position.rotate(k, ctx.positions)

        keys = dict(k=k, v=v, k_positions=ctx.positions, k_segments=ctx.segments)
        if state is not None:
            state = append(state, k, v, ctx)
            keys = dict(k=state["k"], v=state["v"], k_positions=state["positions"], k_segments=state["segments"])
        q_segments = ctx.segments
        if q_segments is None and state is not None:
            q_segments = jnp.ones(x.shape[:2], jnp.int32)
        y = attention(
            q,
            **keys,
            q_positions=ctx.positions,
            q_segments=q_segments,
            causal=self.causal,
            bias=partial(position.bias, n_heads=H),
            implementation=self.implementation,
        )
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), state

    def init_state(self, batch: int, max_len: int) -> State:
        shape = (batch, max_len, self.kv_heads, self.width // self.n_heads)
        return dict(
            k=jnp.zeros(shape, self.dtype),
            v=jnp.zeros(shape, self.dtype),
            positions=jnp.zeros((batch, max_len), jnp.int32),
            segments=jnp.zeros((batch, max_len), jnp.int32),  # 0: nothing written yet
            written=jnp.zeros((), jnp.int32),
        )

    def state_bytes(self, length: int) -> int:
        K = self.width // self.n_heads
        return length * (2 * self.kv_heads * K * jnp.dtype(self.dtype).itemsize + 2 * 4) + 4


def append(cache: dict[str, jax.Array], k: jax.Array, v: jax.Array, ctx: Context) -> dict[str, jax.Array]:
    """The cache with these tokens written behind the ones it holds."""
    B, L = k.shape[:2]
    if cache["k"].shape[1] < L:
        raise UserError(f"{L} tokens do not fit in a key-value cache of {cache['k'].shape[1]}")
    segments = jnp.ones((B, L), jnp.int32) if ctx.segments is None else ctx.segments
    new = dict(k=k, v=v, positions=jnp.broadcast_to(ctx.positions, (B, L)), segments=segments)
    start = cache["written"]
    written = {key: lax.dynamic_update_slice_in_dim(cache[key], value, start, axis=1) for key, value in new.items()}
    return dict(**written, written=start + L)
