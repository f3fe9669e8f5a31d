"""Synthesizer: attention whose scores compare no tokens."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Cache, Full
from model.contract import Context, Mixer, State
from model.layers import dense
from model.mixers.attention import INTO_HEADS, arange, check_heads, look, remember, whole_row
from model.mixers.whole_row import check_length
from model.ops.attention import IMPLEMENTATIONS
from model.ops.mask import CAUSAL, FULL
from model.ops.scores import Bias
from model.settings import Dim, Length


def between(R: jax.Array, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
    """`R[h, i, j]` at the positions of queries and keys, `[B or 1, H, L, M]`."""
    return jnp.moveaxis(R[:, q_positions[:, :, None], k_positions[:, None, :]], 0, 1)


class Synthesizer(Mixer):
    """Scores synthesized without looking at the other token (https://arxiv.org/abs/2005.00743).

    Dense: each token scores all positions of its document, `W2 relu(W1 x)`. Random: so does each position, by a learned
    matrix R or by the product of two narrow ones. Where a score is a product of a token's vector and a position's, it
    is one of queries and keys, and attention's own forms serve.
    """

    kind: Literal["dense", "random", "factorized"] = "dense"  # by tokens; by a matrix R; by R1 R2^T
    n_heads: Dim = 4
    head_dim: Literal[0] | Dim = 0  # 0: width / n_heads
    rank: Dim = 8  # of factorized scores, the paper's k
    longest: Length = 4096  # positions that there are weights for
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    work: ClassVar[float | None] = 2
    groups: ClassVar[dict[str, str]] = {"R": "no_decay", "R1": "no_decay", "R2": "no_decay"}

    @property
    def heads(self) -> tuple[int, int]:
        """H and K."""
        return self.n_heads, self.head_dim or self.width // self.n_heads

    def check(self, length: int) -> None:
        check_heads("synthesizer", self.n_heads, self.n_heads, self.width, self.head_dim)
        check_length("synthesizer", self.longest, length)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check(x.shape[1])
        self.check_direction(state)
        H, K = self.heads
        at = arange(x) if ctx.positions is None else ctx.positions
        v = dense((H, K), INTO_HEADS, self.dtype, "v")(x)
        call: dict[str, Any] = dict(mask=CAUSAL if self.causal else FULL, scale=1.0, bias=None)
        if self.kind == "random":
            call["bias"] = Bias(self.normal("R", (H, self.longest, self.longest), 1.0), between, ("heads", None, None))
        if state is None:
            call, k_at = call | whole_row(ctx, call), at
        else:
            seen, places, state = remember(self.cache, ctx, state, v=v)
            v, call, k_at = seen["v"], call | places, places["k_positions"]
        q, k = self.queries_and_keys(x, at, k_at)
        y = look(self, q, k, v, **call)
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), state

    def queries_and_keys(self, x: jax.Array, at: jax.Array, k_at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What scores are products of, `[B, L, H, N]` and `[B, M, H, N]`."""
        B, (H, K) = len(x), self.heads

        def by_position(name, size, scale, positions):
            table = self.normal(name, (self.longest, H, size), scale, (None, "heads", None))
            of_each = jnp.take(table, positions, axis=0)
            # For all rows before it is narrow: gradients are added up over them.
            return jnp.broadcast_to(of_each, (B, *of_each.shape[1:])).astype(self.dtype)

        match self.kind:
            case "dense":
                q = nn.relu(dense((H, K), INTO_HEADS, self.dtype, "W1", bias=True)(x))
                return q, by_position("W2", K, K**-0.5, k_at)
            case "factorized":
                scale = self.rank**-0.25  # of scores of size 1
                return by_position("R1", self.rank, scale, at), by_position("R2", self.rank, scale, k_at)
        none = (jnp.zeros((B, one.shape[1], H, 1), self.dtype) for one in (at, k_at))  # the matrix alone scores
        return tuple(none)

    def normal(
        self, name: str, shape: tuple[int, ...], scale: float, axes: tuple[str | None, ...] = ("heads", None, None)
    ) -> jax.Array:
        return self.weight(name, nn.initializers.normal(scale), shape, axes)

    @property
    def cache(self) -> Cache:
        return Full((("v", self.heads),), self.dtype)

    def init_state(self, batch: int, max_len: int) -> State:
        self.check(max_len)
        return self.cache.open(batch, max_len)

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length)
