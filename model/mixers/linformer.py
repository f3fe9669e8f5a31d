"""Linformer: attention to a few sums over the length in the place of all tokens."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.errors import UserError
from model.layers import dense
from model.mixers.attention import INTO_HEADS, check_heads
from model.mixers.whole_row import WholeRow, check_length
from model.ops.product import product
from model.settings import Dim, Length


def linformer(
    weights: tuple[jax.Array, jax.Array], tokens: tuple[jax.Array, jax.Array, jax.Array], n: jax.Array | None
) -> jax.Array:
    """`softmax(Q (E^T K)^T / sqrt(K)) F^T V`, `[B, L, H, K]`, of tokens q, k and v; E, F: [L, R] or [H, L, R].

    Positions are those in the document. Those behind its last token add nothing, being zero.
    """

    @jax.checkpoint  # the weights of all tokens are R times as many as these
    def attend(q, k, v):
        scores = jnp.einsum("blhk,brhk->bhlr", q, k, preferred_element_type=wide(q.dtype))
        seen = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(v.dtype)
        return jnp.einsum("bhlr,brhk->blhk", seen, v)

    def summed(x, over):
        spec = "blhk,lr->brhk" if over.ndim == 2 else "blhk,hlr->brhk"
        return product(spec, x, over[..., : x.shape[1], :])

    (q, k, v), (E, F) = tokens, weights
    return attend(q, summed(k, E), summed(v, F))


class Linformer(WholeRow):
    """Keys and values summed over the length by learned matrices E and F (https://arxiv.org/abs/2006.04768)."""

    n_heads: Dim = 4
    head_dim: Literal[0] | Dim = 0  # 0: width / n_heads
    rank: Dim = 128  # the paper's k: sums that a token attends to
    longest: Length = 4096  # tokens of the longest row, for which E and F have weights
    share: Literal["none", "heads", "kv"] = "kv"  # E and F of each head; one E and one F for all; one matrix for both

    def check(self, state: State, length: int) -> None:
        super().check(state)
        check_heads("linformer", self.n_heads, self.n_heads, self.width, self.head_dim)
        check_length("linformer", self.longest, length)
        if self.rank > self.longest:
            raise UserError(
                f"model.linformer.rank {self.rank} is more than model.linformer.longest {self.longest}, and sums of "
                f"fewer tokens than there are sums save nothing; closest: model.linformer.rank={self.longest}"
            )

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check(state, x.shape[1])
        H, K = self.n_heads, self.head_dim or self.width // self.n_heads
        q, k, v = (dense((H, K), INTO_HEADS, self.dtype, name)(x) for name in "qkv")
        E = self.over_length("E")
        weights = E, E if self.share == "kv" else self.over_length("F")
        y = self.mixed(linformer, weights, (q, k, v), ctx)
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), None

    def over_length(self, name: str) -> jax.Array:
        heads, axes = ((self.n_heads,), ("heads",)) if self.share == "none" else ((), ())
        init = nn.initializers.normal(self.rank**-0.5)
        return self.weight(name, init, (*heads, self.longest, self.rank), (*axes, None, None))
