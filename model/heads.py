"""Heads: what is read off a backbone's vectors. Logits, in float32 at least whatever the dtype."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide
from model.layers import Embed, dense, norm
from model.mlps.mlp import FORMS
from model.positions.added import Sinusoidal


class Head(nn.Module):
    """What all heads have in common: a norm before them, and how they are called."""

    norm: str = "rmsnorm"  # or none
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    n_classes: ClassVar[int] = 0  # it is no classifier
    of_row: ClassVar[bool] = False  # whether its answer is of a whole row

    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        """An answer to every vector of x `[B, L, D]`, to those at the positions `at` `[B, Q]`, or to each row."""
        raise NotImplementedError

    def normed(self, x: jax.Array, name: str = "norm") -> jax.Array:
        return x if self.norm == "none" else norm(self.norm, self.dtype, name, self.norm_eps)(x)

    def linear(self, x: jax.Array, features: int, axis: str | None, name: str, bias: bool = True) -> jax.Array:
        return dense(features, ("embed", axis), self.dtype, name, bias=bias, out=wide(self.dtype))(x)


class TokenHead(Head):
    """Logits over the vocabulary at every position, or at those asked for: `[B, L, V]` or `[B, Q, V]`."""

    vocab_size: int = 0
    tied: bool = True  # to the embedding
    bias: bool = False  # of the logits
    map_to: str = "none"  # before the norm, a linear map and the activation of this MLP
    scale: float = 1.0  # of the logits
    soft_cap: float = 0.0  # keeps logits within this by a tanh; 0: off

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        x = at_positions(x, at)  # before the unembedding, which costs V per position
        if self.map_to != "none":
            x = dense(x.shape[-1], ("embed", None), self.dtype, "map", bias=True)(x)
            x = FORMS[self.map_to].keywords["activation"](x)
        x = self.normed(x)
        logits = embed.attend(x) if self.tied else self.linear(x, self.vocab_size, "vocab", "unembed", bias=False)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
            logits = logits + self.param("unembed_bias", zeros, (self.vocab_size,), wide(self.dtype))
        logits = logits if self.scale == 1 else self.scale * logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap) if self.soft_cap else logits


class ClassHead(Head):
    """Logits over classes, of each row: `[B, C]`."""

    n_classes: int = 1
    pool: str = "mean"

    of_row: ClassVar[bool] = True

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        return self.linear(self.normed(pooled(x, segments, self.pool)), self.n_classes, None, "classes")


class LabelHead(Head):
    """Logits over classes, of each token: `[B, L, C]` or `[B, Q, C]`."""

    n_classes: int = 1

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        return self.linear(self.normed(at_positions(x, at)), self.n_classes, None, "classes")


class DecodedHead(Head):
    """Logits over classes, of each token, all from the last vector of its row: `[B, L, C]` or `[B, Q, C]`.

    Waves tell the places apart, and two layers that do not widen decode (MAD, https://arxiv.org/abs/2403.17844).
    """

    n_classes: int = 1

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        D, places = x.shape[-1], jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        last = jnp.broadcast_to(pooled(x, segments, "last")[:, None], x.shape)
        x = at_positions(Sinusoidal(amplitude=1.0, dtype=self.dtype, name="places").embed(last, places), at)
        for i in range(2):
            x = nn.gelu(dense(D, ("embed", None), self.dtype, f"decode_{i}", bias=True)(self.normed(x, f"norm_{i}")))
        return self.linear(self.normed(x), self.n_classes, None, "classes")


class ValueHead(Head):
    """Real numbers, of each vector or patch: `[B, L, C]`."""

    n_values: int = 1

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        return self.linear(self.normed(x), self.n_values, None, "values")


def at_positions(x: jax.Array, at: jax.Array | None) -> jax.Array:
    """The vectors at these positions, `[B, Q, D]`; None: all of them."""
    return x if at is None else jnp.take_along_axis(x, at[..., None], axis=1)


def pooled(x: jax.Array, segments: jax.Array | None, pool: str) -> jax.Array:
    """One vector a row, `[B, D]`: the first, or the mean or last of those that are not padding."""
    B, L, _ = x.shape
    if pool == "cls":
        return x[:, 0]
    real = jnp.ones((B, L), bool) if segments is None else segments > 0
    if pool == "last":
        last = jnp.max(jnp.where(real, jnp.arange(L), 0), axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    weight = real.astype(wide(x.dtype))
    total = jnp.einsum("bl,bld->bd", weight, x, preferred_element_type=weight.dtype)
    return (total / jnp.maximum(weight.sum(1, keepdims=True), 1)).astype(x.dtype)
