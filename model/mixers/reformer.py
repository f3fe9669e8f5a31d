"""Reformer's attention among tokens that are hashed alike."""

from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Full
from model.contract import Context, Mixer, State, wide
from model.documents import looking_back
from model.mixers.attention import Biases, begin, check_heads, into_heads, out_of_heads, remember
from model.ops.lsh import Form, Tokens, attend, documents_of, hashed, rotations, weights_of_all
from model.positions.position import Position
from model.settings import WIDEST, Count, Dim, Length, Seed, even, within


class Reformer(Mixer):
    """Reformer's attention (https://arxiv.org/abs/2001.04451): to tokens whose shared queries and keys hash alike.

    In each of several rounds random directions put tokens into buckets. Both ways, as in the paper: sorted by bucket, a
    document is cut into chunks, and a token sees its own and the one before; the first chunk has none before it. Causal
    layers depart from it, since such chunks shift with every token to come: a token sees the last `chunk` tokens of its
    own bucket, which later ones do not change. The number of buckets does not depend on the length. Positions turn
    queries and keys once they are hashed. In generation a token is compared with the cache's buckets, all of them.
    """

    position: Any = Position  # builds the position encoding

    n_heads: Dim = 4
    head_dim: Literal[0] | Dim = 0  # 0: width / n_heads
    bias: Biases = "none"  # projections that have one
    chunk: Length = 64  # tokens of a chunk; causal: tokens of its bucket that a token sees
    n_buckets: Annotated[int, within(2, WIDEST), even] = 32
    rounds: Count = 2  # of hashing
    seed: Seed = 0  # of the directions, which are not learned
    implementation: Literal["sorted", "reference"] | None = None  # sorted by bucket, or all scores; None: sorted

    softmax: ClassVar[bool] = True

    @property
    def heads(self) -> tuple[int, int]:
        """How many, and their dim."""
        return self.n_heads, self.head_dim or self.width // self.n_heads

    def check(self, position: Position) -> None:
        H, K = self.heads
        check_heads("reformer", H, H, self.width, self.head_dim)
        position.check(K)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position, at, span = begin(self, x, ctx, state)
        ctx, L, (H, K) = looking_back(ctx) if self.causal else ctx, x.shape[1], self.heads
        both, v = into_heads(self, "qk", (H, K))(x), into_heads(self, "v", (H, K))(x)
        bucket = hashed(both, rotations(self.seed, H, K, self.rounds, self.n_buckets))
        first, segments = 0, ctx.segments
        if state is not None:
            first, new = state["written"], dict(qk=both, v=v, bucket=bucket.astype(wide(self.dtype)))
            seen, places, state = remember(self.cache, ctx, state, **new)
            both, v, at, segments = seen["qk"], seen["v"], places["k_positions"], seen["segments"]
            bucket = seen["bucket"].astype(jnp.int32)
        size = both.astype(wide(self.dtype))
        size = jnp.sqrt(jnp.sum(size**2, axis=-1, keepdims=True) + 1e-6 * K)
        q = position.rotate_queries(both, at, span)
        k = position.rotate_keys((both / size).astype(self.dtype), at, span)

        document = documents_of(both.shape[:2], segments)
        tokens = Tokens(bucket, document, jnp.broadcast_to(at, document.shape))
        bias = ctx.bias if position.shares else position.bias(H, self.causal)
        packed = segments is not None and not ctx.right_padded
        form = Form(self.chunk, self.n_buckets, self.causal, packed, None if bias is None else bias.fn)
        # A few tokens are compared with all there are, which is less than to sort these.
        few = self.implementation == "reference" or (state is not None and L <= self.chunk)

        def of_new(x):
            return x if state is None else jax.lax.dynamic_slice_in_dim(x, first, L, axis=1)

        if few or self.looked_into():
            weights = weights_of_all(of_new(q), k, tokens, form, bias, first)
        if self.looked_into():
            self.sow("maps", "weights", weights)
        if few:
            y = jnp.einsum("bhlm,bmhv->blhv", weights.astype(v.dtype), v)
        else:
            y = of_new(attend(q, k, v, tokens, form, bias))
        return out_of_heads(self, y), state

    @property
    def cache(self) -> Full:
        H, K = self.heads
        return Full((("qk", (H, K)), ("v", (H, K)), ("bucket", (H, self.rounds))), self.dtype, wide=("bucket",))

    def init_state(self, batch: int, max_len: int) -> State:
        return self.cache.open(batch, max_len)

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length)
