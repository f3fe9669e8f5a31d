"""Batch normalisation (https://arxiv.org/abs/1502.03167): each channel by its mean and variance over a batch's tokens.

Statistics are of the real tokens of the whole batch, wherever its rows lie, in float32. As in torch, a batch is divided
by the root of its variance, and what runs on is the unbiased one.

Outside training the running statistics take their place. They are parameters that no gradient reaches, so that they go
wherever a model goes: `running_mean` and `running_var`, beside the scale and the bias. In training a module sows what
they are to be after this batch, under their own paths, and the step writes that over them.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import RUNNING, Context, wide
from model.settings import at_least, below


@dataclass(frozen=True)
class Settings:
    """The section `model.batchnorm`."""

    momentum: Annotated[float, at_least(0), below(1)] = 0.9  # what running statistics keep at a step; torch: 1 - this


def moments(x: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and variance `[D]` of the real tokens of x `[B, L, D]`, and their number."""
    real = jnp.ones((*x.shape[:2], 1), bool) if segments is None else segments[..., None] > 0
    n = jnp.maximum(jnp.sum(real, dtype=x.dtype), 1)
    mean = jnp.sum(jnp.where(real, x, 0), axis=(0, 1)) / n
    return mean, jnp.sum(jnp.where(real, jnp.square(x - mean), 0), axis=(0, 1)) / n, n


class BatchNorm(nn.Module):
    """Over all but the last axis of x `[B, L, D]`; in training it sows its running statistics after this batch."""

    epsilon: float = 1e-5
    momentum: float = Settings.momentum
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        shape, f = x.shape[-1:], wide(self.dtype)
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
        scale, bias = self.param("scale", ones, shape, f), self.param("bias", zeros, shape, f)
        mean, var = (self.param(name, init, shape, f) for name, init in zip(RUNNING, (zeros, ones), strict=True))
        x = x.astype(f)
        if ctx.segments is not None:
            x = jnp.where(ctx.segments[..., None] > 0, x, 0)  # else gradients are not finite where padding is not
        if ctx.train:
            old, (mean, var, n) = (mean, var), moments(x, ctx.segments)
            for name, before, now in zip(RUNNING, old, (mean, var * n / jnp.maximum(n - 1, 1)), strict=True):
                after = self.momentum * before + (1 - self.momentum) * jax.lax.stop_gradient(now)
                self.sow("running", name, after, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return ((x - mean) * (scale * jax.lax.rsqrt(var + self.epsilon)) + bias).astype(self.dtype)
