"""cosFormer: linear attention that sees what is near more clearly (https://arxiv.org/abs/2202.08791)."""

import jax
import jax.numpy as jnp

from model.contract import Context
from model.mixers.linear import Kernelised
from model.settings import Length

Array = jax.Array


def near(x: Array, positions: Array, longest: int) -> Array:
    """Features whose products are those of `relu(x)` times the cosine of the distance, a right angle at `longest`.

    x: [B, L, H, K]; positions: [B or 1, L].
    """
    angle = jnp.minimum(positions, longest).astype(x.dtype) * (jnp.pi / 2 / longest)
    x, angle = jax.nn.relu(x), angle[..., None, None]
    return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], axis=-1)


class Cosformer(Kernelised):
    """cosFormer's attention: scores of no less than 0, weighted by the cosine of the distance."""

    longest: Length = 4096  # M: the distance at which nothing is seen; tokens past this position count as if at it

    @property
    def channels(self) -> int:
        # Of few channels none may be above 0, in a query and a key alike: then there is nothing to divide by.
        return self.head_dim or max(16, self.width // self.n_heads)

    def features(self) -> int:
        return 2 * self.keys

    def mapped(self, x: Array, ctx: Context) -> Array:
        at = jnp.arange(x.shape[1], dtype=jnp.int32)[None] if ctx.positions is None else ctx.positions
        return near(x, at, self.longest)
