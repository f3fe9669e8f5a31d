"""Heads: what is read off a backbone's vectors. Logits, in float32 at least whatever the dtype."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide
from model.layers import Embed, dense, norm
from model.mlps.mlp import FORMS


class TokenHead(nn.Module):
    """Logits over the vocabulary at every position, or at those asked for."""

    vocab_size: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    tied: bool = True  # to the embedding
    bias: bool = False  # of the logits
    map_to: str = "none"  # before the norm, a linear map and the activation of this MLP
    scale: float = 1.0  # of the logits
    soft_cap: float = 0.0  # keeps logits within this by a tanh; 0: off
    dtype: Any = jnp.float32

    n_classes: ClassVar[int] = 0  # it is no classifier
    of_row: ClassVar[bool] = False  # whether its answer is of a whole row

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        """`[B, L, V]`, or `[B, Q, V]` at the positions `at`; x: [B, L, D]."""
        if at is not None:  # before the unembedding, which costs V per position
            x = jnp.take_along_axis(x, at[..., None], axis=1)
        if self.map_to != "none":
            x = dense(x.shape[-1], ("embed", None), self.dtype, "map", bias=True)(x)
            x = FORMS[self.map_to].keywords["activation"](x)
        if self.norm != "none":
            x = norm(self.norm, self.dtype, "norm", self.norm_eps)(x)
        if self.tied:
            logits = embed.attend(x)
        else:
            logits = dense(self.vocab_size, ("embed", "vocab"), self.dtype, "unembed", out=wide(self.dtype))(x)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
            logits = logits + self.param("unembed_bias", zeros, (self.vocab_size,), wide(self.dtype))
        logits = logits if self.scale == 1 else self.scale * logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap) if self.soft_cap else logits


class ClassHead(nn.Module):
    """Logits over classes, of each row."""

    n_classes: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    pool: str = "mean"
    dtype: Any = jnp.float32

    of_row: ClassVar[bool] = True

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        """`[B, C]`; x: [B, L, D]."""
        x = pooled(x, segments, self.pool)
        if self.norm != "none":
            x = norm(self.norm, self.dtype, "norm", self.norm_eps)(x)
        return dense(self.n_classes, ("embed", None), self.dtype, "classes", bias=True, out=wide(self.dtype))(x)


class LabelHead(nn.Module):
    """Logits over classes, of each token."""

    n_classes: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    of_row: ClassVar[bool] = False

    @nn.compact
    def __call__(self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed) -> jax.Array:
        """`[B, L, C]`, or `[B, Q, C]` at the positions `at`; x: [B, L, D]."""
        if at is not None:
            x = jnp.take_along_axis(x, at[..., None], axis=1)
        if self.norm != "none":
            x = norm(self.norm, self.dtype, "norm", self.norm_eps)(x)
        return dense(self.n_classes, ("embed", None), self.dtype, "classes", bias=True, out=wide(self.dtype))(x)


class ValueHead(nn.Module):
    """Real numbers, of each vector or patch."""

    n_values: int
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    n_classes: ClassVar[int] = 0  # it is no classifier
    of_row: ClassVar[bool] = False

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array | None, at: jax.Array | None, embed: Embed | None
    ) -> jax.Array:
        """`[B, L, C]`; x: [B, L, D]."""
        if self.norm != "none":
            x = norm(self.norm, self.dtype, "norm", self.norm_eps)(x)
        return dense(self.n_values, ("embed", None), self.dtype, "values", bias=True, out=wide(self.dtype))(x)


Head = TokenHead | ClassHead | LabelHead | ValueHead


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
