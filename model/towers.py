"""Two rows, one model: both go through the same backbone, and a head compares the two vectors that come out.

Shape letters besides those of the contract: P = 2B, the rows of a batch of pairs, each beside its partner.
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide
from model.heads import Answers, Head, HeadContext, pooled, scored
from model.inputs import Row, Segments, TokenInput
from model.layers import dense
from model.ops.cross_entropy import Targets


def beside(a: jax.Array, b: jax.Array) -> jax.Array:
    """The rows of a pair one after the other, `[2B, ...]`, so that every device keeps its own; a, b: [B, ...]."""
    both = jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:])
    return nn.with_logical_constraint(both, ("batch", *(None,) * (both.ndim - 1)))


def apart(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second of each pair, `[B, ...]`; x: [2B, ...]."""
    pairs = x.reshape(-1, 2, *x.shape[1:])
    return pairs[:, 0], pairs[:, 1]


class TowerInput(TokenInput):
    """The token ids of both rows of a pair, as rows of one batch: shared weights, and one large call of every layer."""

    def __call__(
        self,
        tokens: jax.Array,
        segments: Segments = None,
        other: jax.Array | None = None,
        other_segments: Segments = None,
    ) -> Row:
        if segments is not None or other_segments is not None:
            each = zip((tokens, other), (segments, other_segments), strict=True)
            segments = beside(*(jnp.ones(t.shape, jnp.int32) if s is None else s for t, s in each))
        return super().__call__(beside(tokens, other), segments)


class PairHead(Head):
    """Logits over classes of each pair, `[B, C]`, off the features `[a, b, a * b, a - b]` and a hidden layer.

    As in Long Range Arena (https://arxiv.org/abs/2011.04006); the hidden layer is S4's, as wide as the model, gelu.
    """

    n_classes: int = 1
    pool: str = "mean"

    of_row: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext, targets: Targets | None = None) -> Answers:
        a, b = apart(self.normed(pooled(x, ctx.segments, self.pool)))
        features = jnp.concatenate([a, b, a * b, a - b], axis=-1)
        hidden = nn.gelu(dense(x.shape[-1], ("embed", "mlp"), self.dtype, "compare", bias=True)(features))
        logits = dense(self.n_classes, ("mlp", None), self.dtype, "classes", bias=True, out=wide(self.dtype))(hidden)
        return scored(logits, targets)


class CosineHead(Head):
    """The cosine between the first of every pair and the second of every pair, `[B, B]`: who is whose partner."""

    pool: str = "mean"

    of_row: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext) -> jax.Array:
        x = self.normed(pooled(x, ctx.segments, self.pool)).astype(wide(self.dtype))
        a, b = apart(x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), 1e-12)))
        # Of the whole batch, wherever its rows lie.
        return nn.with_logical_constraint(jnp.einsum("bd,cd->bc", a, b, precision="highest"), ("batch", None))
