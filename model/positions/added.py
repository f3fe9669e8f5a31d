"""Position encodings that are added to the embeddings: of fixed waves, or a learned table."""

from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide
from model.errors import UserError
from model.positions.position import Position
from model.positions.rotary import angles, inverse_frequencies
from model.settings import Length, Positive, above


class Sinusoidal(Position):
    """Fixed sines and cosines added to the embeddings (https://arxiv.org/abs/1706.03762), interleaved."""

    theta: Annotated[float, above(1)] = 10_000.0
    # As large as embeddings begin. The paper's waves are of size 1, and so are its embeddings, times sqrt(width).
    amplitude: Positive = 0.02

    relative: ClassVar[bool] = False

    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        D = x.shape[-1]
        angle = angles(positions, inverse_frequencies(D + D % 2, self.theta), self.dtype)
        waves = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)
        return x + (self.amplitude * waves[..., :D]).astype(x.dtype)


class Learned(Position):
    """A learned vector for each absolute position, added to the embeddings."""

    max_len: Length = 1024  # the longest sequence the table can place

    relative: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {"table": "no_decay"}

    def limit(self) -> int:
        return self.max_len

    @nn.compact
    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        if x.shape[1] > self.max_len:
            raise UserError(
                f"length {x.shape[1]} is past the learned position table of {self.max_len}; "
                f"set model.learned.max_len={x.shape[1]} or use position sinusoidal"
            )
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), (None, "embed"))
        table = self.param("table", init, (self.max_len, x.shape[-1]), wide(self.dtype))
        return x + jnp.take(table, positions, axis=0).astype(x.dtype)
