"""Dense maps, embeddings and norms: the parts of which layers are made."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.batchnorm import BatchNorm
from model.contract import Context, wide
from model.errors import UserError, choose
from model.ops.embedding import rows
from model.ops.product import linear

fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


class Dense(nn.Module):
    """A linear map from the last `inputs` axes to `features`; the kernel carries logical axis names, for sharding."""

    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: int = 1
    bias: bool = False
    init: nn.initializers.Initializer = fan_in
    dtype: Any = jnp.float32
    out: Any = None  # dtype of the result; None: `dtype`
    of: Callable[..., jax.Array] | None = None  # makes what is mapped of what is given; the gradient makes it anew
    apart: bool = False  # gives an array for each of the first of `features`, by a product each: slices are copies

    @nn.compact
    def __call__(self, *given: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        x = jax.eval_shape(self.of, *given) if self.of else given[0]
        contracted = x.shape[-self.inputs :]

        def flat_init(key, shape, dtype):  # fans are those of the map as a matrix
            matrix = self.init(key, (math.prod(contracted), math.prod(self.features)), dtype)
            return matrix.reshape(shape)

        kernel_init = nn.with_logical_partitioning(flat_init, self.axes)
        kernel = self.param("kernel", kernel_init, (*contracted, *self.features), wide(self.dtype))

        def mapped(kernel, *given):
            x = (self.of(*given) if self.of else given[0]).astype(self.dtype)
            axis = x.ndim - self.inputs  # of the first feature
            if not self.apart:
                return linear(x, kernel, self.inputs, self.out)
            if x.shape[axis - 1] == 1:  # a token is less to copy than a kernel
                return tuple(jnp.moveaxis(linear(x, kernel, self.inputs, self.out), axis, 0))
            parts = (jax.lax.index_in_dim(kernel, i, self.inputs, keepdims=False) for i in range(self.features[0]))
            return tuple(linear(x, part, self.inputs, self.out) for part in parts)

        # Parts of a kernel are made anew too: it is there anyway.
        y = (jax.checkpoint(mapped, prevent_cse=False) if self.of or self.apart else mapped)(kernel, *given)
        if self.bias:
            bias_init = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.axes[self.inputs :])
            y = (y + self.param("bias", bias_init, self.features, wide(self.dtype))).astype(y.dtype)
        return y


def dense(
    features: int | tuple[int, ...], axes: tuple[str | None, ...], dtype: Any, name: str, **options: Any
) -> Dense:
    """A `Dense` by its essentials."""
    features = (features,) if isinstance(features, int) else features
    return Dense(features, axes, dtype=dtype, name=name, **options)


class Embed(nn.Module):
    """A vector for every token id, and a table for the way back."""

    vocab_size: int
    width: int
    scale: float = 0.02  # standard deviation at the start
    dtype: Any = jnp.float32

    def setup(self) -> None:
        init = nn.with_logical_partitioning(nn.initializers.normal(self.scale), ("vocab", "embed"))
        self.embedding = self.param("embedding", init, (self.vocab_size, self.width), wide(self.dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return rows(self.embedding, tokens).astype(self.dtype)

    @property
    def table(self) -> jax.Array:
        """The vectors of all ids, `[V, D]`."""
        return self.embedding


class Unembed(nn.Module):
    """A way from vectors to token ids that is none of an embedding."""

    vocab_size: int
    width: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        init = nn.with_logical_partitioning(fan_in, ("embed", "vocab"))
        self.kernel = self.param("kernel", init, (self.width, self.vocab_size), wide(self.dtype))

    @property
    def table(self) -> jax.Array:
        """The vectors that those of the model are compared with, `[V, D]`."""
        return self.kernel.T


# The backward pass makes them anew from the vectors before them: else it is kept several times over, and wide.
NORMS = {
    "rmsnorm": nn.remat(nn.RMSNorm, prevent_cse=False),
    "layernorm": nn.remat(nn.LayerNorm, prevent_cse=False),
}
STREAM_NORMS = (*NORMS, "batchnorm")


def norm(kind: str, dtype: Any, name: str, eps: float = 1e-5, axes: int = 1, learned: bool = True) -> nn.Module:
    """RMSNorm (https://arxiv.org/abs/1910.07467) or LayerNorm over the last axes, statistics in float32."""
    # The scale is a vector of the width: cheap enough to keep whole on every device.
    last = tuple(range(-axes, 0))
    over = dict(reduction_axes=last, feature_axes=last, use_scale=learned)
    return choose("norm", kind, NORMS)(epsilon=eps, dtype=dtype, param_dtype=wide(dtype), name=name, **over)


class Scale(nn.Module):
    """What a norm of this name learns, for one that is part of what the backward pass makes anew."""

    features: tuple[int, ...]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("scale", nn.initializers.ones_init(), self.features, wide(self.dtype))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm over the last axis of a wide array; scale: that axis, or more of the last ones."""
    return x * (jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale)


def stream_norm(
    kind: str, dtype: Any, name: str, eps: float, momentum: float
) -> Callable[[jax.Array, Context], jax.Array]:
    """A norm of the vectors between layers, `[B, L, D]`: of each alone, or over the batch."""
    if kind == "batchnorm":
        return BatchNorm(eps, momentum, dtype, name=name)
    of_each = norm(kind, dtype, name, eps)
    return lambda x, ctx: of_each(x)


def check_divides(what: str, part: int, whole_name: str, whole: int) -> None:
    if part < 1 or whole % part:
        small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
        near = min([*small, *(whole // n for n in small)], key=lambda n: (abs(n - part), n))
        raise UserError(f"{what} {part} does not divide {whole_name} {whole}; closest that does: {near}")
