"""A norm of what each head of a recurrence reads, with a gradient that cancels well."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide

Array = jax.Array


class HeadNorm(nn.Module):
    """LayerNorm of each head's channels, `[B, L, H, V]`."""

    dtype: Any
    eps: float
    bias: bool = True

    @nn.compact
    def __call__(self, y: Array) -> Array:
        features, f = y.shape[-2:], wide(self.dtype)
        y = normalised(self.eps, y.astype(f)) * self.param("scale", nn.initializers.ones_init(), features, f)
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros_init(), features, f)
        return y.astype(self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalised(eps: float, y: Array) -> Array:
    """Less the mean of the last axis, over the standard deviation."""
    centred, variance = moments(eps, y)
    return centred * jax.lax.rsqrt(variance)


def moments(eps: float, y: Array) -> tuple[Array, Array]:
    centred = y - jnp.mean(y, axis=-1, keepdims=True)
    return centred, jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps


def normalised_backward(eps, y, g):
    """Where a head reads but one token, queries and keys only scale its value, and the norm takes a scale away.

    What is left of their gradients is what cancelling leaves: less of rounding if a projection does it, as here, than
    if the gradients of a mean and of a variance do.
    """
    centred, variance = moments(eps, y)
    g = g - jnp.mean(g, axis=-1, keepdims=True)
    along = jnp.mean(g * centred, axis=-1, keepdims=True) / variance
    return (jax.lax.rsqrt(variance) * (g - centred * along),)


normalised.defvjp(lambda eps, y: (normalised(eps, y), y), normalised_backward)
