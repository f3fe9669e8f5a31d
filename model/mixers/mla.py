"""Multi-head latent attention: the cache holds one small vector a token, from which all heads' keys and values come."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Cache, Full
from model.contract import Context, Mixer, State, wide
from model.errors import UserError
from model.layers import check_divides, dense, fan_in, norm
from model.mixers.attention import arange, cacheable, look, whole_row
from model.ops.attention import IMPLEMENTATIONS
from model.ops.mask import CAUSAL, FULL
from model.ops.product import product
from model.positions.position import Position
from model.settings import Dim


class MLA(Mixer):
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434): a low-rank, compressed key-value cache.

    A head's key is a part made from the latent vector, K dims, and a part that all heads share, which is what a
    rotary position turns. In generation the maps from the latent are folded into queries and outputs, so the cache
    is read as it is.
    """

    position: Any = Position  # builds the position encoding

    n_heads: Dim = 4
    kv_rank: Dim = 32  # of the latent vector that is cached
    q_rank: Literal[0] | Dim = 0  # queries through a bottleneck of this rank; 0: straight from the input
    shared_dim: Dim = 16  # of the key part that positions turn
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    softmax: ClassVar[bool] = True

    def check(self, position: Position) -> None:
        check_divides("model.mla.n_heads", self.n_heads, "model.width", self.width)
        position.check(self.shared_dim)
        if position.causal_only and not self.causal:
            name = type(position).__name__.lower()
            raise UserError(f"position {name!r} is for causal models; set model.causal=True")

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position = self.position(name="position", dtype=self.dtype)
        self.check(position)
        if state is not None and not self.causal:
            raise UserError("a bidirectional model cannot carry a state; set model.causal=True to generate")
        H, K, P = self.n_heads, self.width // self.n_heads, self.shared_dim
        at = arange(x) if ctx.positions is None else ctx.positions
        span = x.shape[1] if state is None else state["segments"].shape[1]

        source = x
        if self.q_rank:
            source = dense(self.q_rank, ("embed", None), self.dtype, "q_down")(x)
            source = norm("rmsnorm", self.dtype, "q_norm")(source)
        q = dense((H, K + P), ("embed", "heads", None), self.dtype, "q")(source)
        turned, still = position.sharpening(P)
        q, q_shared = still * q[..., :K], turned * position.rotate_queries(q[..., K:], at, span)
        latent = norm("rmsnorm", self.dtype, "kv_norm")(dense(self.kv_rank, ("embed", None), self.dtype, "kv_down")(x))
        k_shared = dense((1, P), ("embed", None, None), self.dtype, "k_shared")(x)
        k_shared = position.rotate_keys(k_shared, at, span)
        k_up, v_up = self.up("k_up"), self.up("v_up")

        mask = CAUSAL if self.causal else FULL
        call = dict(mask=mask, scale=(K + P) ** -0.5, bias=position.bias(H, self.causal))
        if state is None:
            call |= whole_row(ctx, call)
            shared = jnp.broadcast_to(k_shared, (*k_shared.shape[:2], H, P))
            k = jnp.concatenate([product("blc,chk->blhk", latent, k_up), shared], axis=-1)
            v = product("blc,chk->blhk", latent, v_up)
            y = look(self, jnp.concatenate([q, q_shared], axis=-1), k, v, **call)
        else:
            new = cacheable(ctx, x.shape, latent=latent, k_shared=k_shared[:, :, 0])
            seen, state = self.cache.extend(state, new)
            call |= dict(q_positions=new["positions"], k_positions=seen["positions"])
            call |= dict(q_segments=new["segments"], k_segments=seen["segments"])
            q = jnp.concatenate([product("blhk,chk->blhc", q, k_up), q_shared], axis=-1)
            keys = jnp.concatenate([seen["latent"], seen["k_shared"]], axis=-1)[:, :, None]
            y = look(self, q, keys, seen["latent"][:, :, None], **call)
            y = product("blhc,chk->blhk", y, v_up)
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), state

    def up(self, name: str) -> jax.Array:
        """A map from the latent vector to every head, `[kv_rank, H, K]`."""
        H, K, rank = self.n_heads, self.width // self.n_heads, self.kv_rank

        def init(key, shape, dtype):
            return fan_in(key, (rank, H * K), dtype).reshape(shape)

        boxed = nn.with_logical_partitioning(init, (None, "heads", None))
        return self.param(name, boxed, (rank, H, K), wide(self.dtype))

    @property
    def cache(self) -> Cache:
        return Full((("latent", (self.kv_rank,)), ("k_shared", (self.shared_dim,))), self.dtype)

    def init_state(self, batch: int, max_len: int) -> State:
        return self.cache.open(batch, max_len)

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length)
