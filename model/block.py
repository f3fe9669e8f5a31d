"""One layer: a mixer and an MLP, each with its norm, dropout and residual."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State
from model.layers import MLP, norm

ACTIVATION = ("batch", "length", None)  # logical axes of [B, L, D]


class Block(nn.Module):
    """Pre-norm, `x + f(norm(x))`, or post-norm, `norm(x + f(x))`, for the mixer and then the MLP."""

    mixer: Callable[..., Mixer]
    norm: str = "rmsnorm"
    norm_order: str = "pre"
    mlp: str = "swiglu"
    mlp_width: int = 0
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        mixer = self.mixer(name="mixer")
        h, state = mixer(self.before(x, "mixer_norm"), ctx, state)
        x = self.after(x, h, ctx, "mixer_norm")
        if self.mlp != "none":
            h = MLP(self.mlp, self.mlp_width, self.dtype, name="mlp")(self.before(x, "mlp_norm"))
            x = self.after(x, h, ctx, "mlp_norm")
        x = nn.with_logical_constraint(x, ACTIVATION)
        if not self.is_initializing():  # else `init` would return it beside the parameters
            self.sow("maps", "output", x)  # dropped unless the caller asks for it: `mutable=["maps"]`
        return x, state

    def before(self, x: jax.Array, name: str) -> jax.Array:
        return norm(self.norm, self.dtype, name)(x) if self.norm_order == "pre" else x

    def after(self, x: jax.Array, h: jax.Array, ctx: Context, name: str) -> jax.Array:
        x = x + nn.Dropout(self.dropout, name=f"{name}_dropout")(h, deterministic=not ctx.train)
        return norm(self.norm, self.dtype, name)(x) if self.norm_order == "post" else x
