"""Linear attention: a score is a product of features, so that sums over keys are kept instead of keys."""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.documents import at_real, marks, reverse
from model.layers import check_divides, dense
from model.ops.features import FEATURES
from model.ops.fused import refuse_kernels
from model.ops.matrix_state import IMPLEMENTATIONS, matrix_state
from model.ops.ssd import contract
from model.settings import Dim

Array = jax.Array
LEAST = 1e-6  # that a sum of scores is taken to be


def with_ones(v: Array) -> Array:
    """Values and a one, whose sum is that of the scores."""
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def averaged(sums: Array, least: float = LEAST) -> Array:
    """The average of values whose sum, and that of their weights as the last channel, are given wide."""
    return sums[..., :-1] / jnp.maximum(sums[..., -1:], least)


def averaged_forward(sums, least):
    return averaged(sums, least), sums


def averaged_backward(least, sums, g):
    """By the average itself: the square of a small sum of weights would lose digits, or be no number."""
    weights = sums[..., -1:]
    g = g / jnp.maximum(weights, least)
    pull = -jnp.sum(g * averaged(sums, least), axis=-1, keepdims=True)
    return (jnp.concatenate([g, jnp.where(weights > least, pull, 0)], axis=-1),)


averaged.defvjp(averaged_forward, averaged_backward)


def both_ways(q: Array, k: Array, v: Array, ctx: Context, implementation: str | None) -> Array:
    """`q_t sum_s k_s v_s^T` over all tokens of a document, `[B, L, H, V]`; k is zero at padding."""
    f = wide(v.dtype)
    q, k = q.astype(v.dtype), k.astype(v.dtype)
    if ctx.segments is None or ctx.right_padded:
        refuse_kernels("matrix_state", implementation)
        h = contract("blhk,blhv->bhkv", k, v, f)
        return contract("blhk,bhkv->blhv", q, h.astype(v.dtype), f)
    # Those up to a token, those from it on, and less itself, which is among both.
    pairs = [(leaf, leaf[:, ::-1]) for leaf in (q, k, v)]
    keep = jnp.concatenate([marks(ctx)[1], marks(reverse(ctx))[1]])
    h0 = jnp.zeros((2 * v.shape[0], v.shape[2], k.shape[3], v.shape[3]), f)
    y, _ = matrix_state(*map(jnp.concatenate, pairs), None, h0, keep, implementation=implementation)
    before, after = jnp.split(y.astype(f), 2)
    return before + after[:, ::-1] - contract("blhk,blhk->blh", q, k, f)[..., None] * v


class Kernelised(Mixer):
    """Attention whose scores are products of features: what is around the features."""

    n_heads: Dim = 4
    head_dim: Literal[0] | Dim = 0  # of a value; 0: width / n_heads
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of matrix_state; None picks

    normalised: ClassVar[bool] = True

    @property
    def channels(self) -> int:
        return self.head_dim or self.width // self.n_heads

    @property
    def keys(self) -> int:
        """Channels of a query and of a key."""
        return self.channels

    def features(self) -> int:
        """How many a query and a key are mapped to."""
        raise NotImplementedError

    def mapped(self, x: Array, ctx: Context) -> Array:
        """Queries or keys, wide, as features."""
        raise NotImplementedError

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check_direction(state)
        if not self.head_dim:
            check_divides(f"model.{self.label}.n_heads", self.n_heads, "the width", self.width)
        heads, f = partial(dense, axes=("embed", "heads", None), dtype=self.dtype), wide(self.dtype)
        q, k = (heads((self.n_heads, self.keys), name=name, out=f)(x) for name in "qk")
        v = heads((self.n_heads, self.channels), name="v")(x)
        y, after = self.mix(q, k, with_ones(v) if self.normalised else v, ctx, state)
        out = dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)
        return out(y.astype(self.dtype)), after

    def mix(self, q: Array, k: Array, v: Array, ctx: Context, state: State) -> tuple[Array, State]:
        """What a token reads, `[B, L, H, V]`, and the state after."""
        real, keep = marks(ctx)
        q, k = self.mapped(q, ctx), at_real(real, self.mapped(k, ctx))
        if self.causal:
            h0 = self.init_state(v.shape[0], 0) if state is None else state
            y, h = matrix_state(q, k, v, None, h0, keep, implementation=self.implementation)
        else:
            y, h = both_ways(q, k, v, ctx, self.implementation), None
        return averaged(y.astype(wide(self.dtype))) if self.normalised else y, None if state is None else h

    def init_state(self, batch: int, max_len: int) -> State:
        shape = (batch, self.n_heads, self.features(), self.channels + self.normalised)
        return jnp.zeros(shape, wide(self.dtype))

    def state_bytes(self, length: int) -> int:
        numbers = self.n_heads * self.features() * (self.channels + self.normalised)
        return numbers * jnp.dtype(wide(self.dtype)).itemsize


class Linear(Kernelised):
    """Linear attention (https://arxiv.org/abs/2006.16236): features of each channel, or of pairs of channels."""

    feature: Literal[*FEATURES] = "elu"  # the map; scores of `identity` are not divided by their sum
    key_dim: Literal[0] | Dim = 0  # channels of a query and a key; 0: a value's, and for taylor, of their pairs, 16

    @property
    def normalised(self) -> bool:
        return FEATURES[self.feature].normalised

    @property
    def keys(self) -> int:
        return self.key_dim or (16 if self.feature == "taylor" else self.channels)

    def features(self) -> int:
        return FEATURES[self.feature].size(self.keys)

    def mapped(self, x: Array, ctx: Context) -> Array:
        return FEATURES[self.feature].map(x)
