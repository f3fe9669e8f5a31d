"""Multi-head latent attention: the cache holds one small vector a token, from which all heads' keys and values come."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Cache, Full
from model.contract import Context, Mixer, State
from model.layers import check_divides, dense, fan_in, norm
from model.mixers.attention import INTO_HEADS, begin, look, remember, whole_row
from model.ops.attention import IMPLEMENTATIONS
from model.ops.mask import CAUSAL, FULL
from model.ops.product import product
from model.positions.position import Position
from model.settings import Dim, Positive


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
    head_dim: Literal[0] | Dim = 0  # of the key part made from the latent; 0: width / n_heads
    v_dim: Literal[0] | Dim = 0  # of a head's values; 0: as head_dim
    norm_eps: Positive = 1e-5  # of the norms behind the bottlenecks
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    softmax: ClassVar[bool] = True
    work: ClassVar[float | None] = 2

    @property
    def dims(self) -> tuple[int, int, int]:
        """Of a head's own part of the keys, of the part that all heads share, and of the values."""
        own = self.head_dim or self.width // self.n_heads
        return own, self.shared_dim, self.v_dim or own

    def check(self, position: Position) -> None:
        if not self.head_dim:
            check_divides("model.mla.n_heads", self.n_heads, "model.width", self.width)
        position.check(self.shared_dim)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position, at, span = begin(self, x, ctx, state)
        H, (K, P, V) = self.n_heads, self.dims

        source = x
        if self.q_rank:
            source = dense(self.q_rank, ("embed", None), self.dtype, "q_down")(x)
            source = norm("rmsnorm", self.dtype, "q_norm", self.norm_eps)(source)
        q = dense((H, K + P), INTO_HEADS, self.dtype, "q")(source)
        turned, still = position.sharpening(P)
        q, q_shared = still * q[..., :K], turned * position.rotate_queries(q[..., K:], at, span)
        latent = dense(self.kv_rank, ("embed", None), self.dtype, "kv_down")(x)
        latent = norm("rmsnorm", self.dtype, "kv_norm", self.norm_eps)(latent)
        k_shared = dense((1, P), ("embed", None, None), self.dtype, "k_shared")(x)
        k_shared = position.rotate_keys(k_shared, at, span)
        k_up, v_up = self.up("k_up", K), self.up("v_up", V)

        mask = CAUSAL if self.causal else FULL
        bias = ctx.bias if position.shares else position.bias(H, self.causal)
        call = dict(mask=mask, scale=(K + P) ** -0.5, bias=bias)
        if state is None:
            call |= whole_row(ctx, call)
            shared = jnp.broadcast_to(k_shared, (*k_shared.shape[:2], H, P))
            k = jnp.concatenate([product("blc,chk->blhk", latent, k_up), shared], axis=-1)
            v = product("blc,chv->blhv", latent, v_up)
            y = look(self, jnp.concatenate([q, q_shared], axis=-1), k, v, **call)
        else:
            new = jnp.concatenate([latent, k_shared[:, :, 0]], axis=-1)
            seen, places, state = remember(self.cache, ctx, state, kept=new)
            q = jnp.concatenate([product("blhk,chk->blhc", q, k_up), q_shared], axis=-1)
            kept = seen["kept"][:, :, None]  # as values too: to cut the latent out of it would copy the whole cache
            y = look(self, q, kept, kept, **call | places)[..., : self.kv_rank]
            y = product("blhc,chv->blhv", y, v_up)
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), state

    def up(self, name: str, dim: int) -> jax.Array:
        """A map from the latent vector to every head, `[kv_rank, H, dim]`."""
        H, rank = self.n_heads, self.kv_rank

        def init(key, shape, dtype):
            return fan_in(key, (rank, H * dim), dtype).reshape(shape)

        return self.weight(name, init, (rank, H, dim), (None, "heads", None))

    @property
    def cache(self) -> Cache:
        return Full((("kept", (self.kv_rank + self.shared_dim,)),), self.dtype)

    def init_state(self, batch: int, max_len: int) -> State:
        return self.cache.open(batch, max_len)

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length)
