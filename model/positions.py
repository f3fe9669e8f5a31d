"""Position encodings: each adds to embeddings, rotates queries and keys, or biases scores.

Positions are int32 and angles float32 (or wider) whatever the compute dtype: bf16 cannot count past 256.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import wide
from model.errors import UserError


class Position(nn.Module):
    """No positions (NoPE): order is known only through the causal mask or the recurrence."""

    dtype: Any = jnp.float32

    # Whether the hooks below do anything; attention-only hooks need a softmax mixer to act on.
    needs_attention: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {}

    def limit(self) -> int | None:
        """The longest sequence it can place, if there is one."""
        return None

    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Adds to token embeddings, `[B, L, D]`."""
        return x

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates queries or keys, `[B, L, H, K]`."""
        return x

    def bias(self, q_positions: jax.Array, k_positions: jax.Array, n_heads: int) -> jax.Array | None:
        """Added to the scaled scores, `[B or 1, H, L, M]`."""
        return None


def angles(positions: jax.Array, dim: int, theta: float, dtype: Any) -> jax.Array:
    """`position / theta^(2i/dim)` for i < dim/2, shape `[..., dim/2]`."""
    frequency = theta ** (-np.arange(0, dim, 2) / dim)
    return positions[..., None].astype(wide(dtype)) * jnp.asarray(frequency, wide(dtype))


class Sinusoidal(Position):
    """Fixed sines and cosines added to the embeddings (https://arxiv.org/abs/1706.03762), interleaved."""

    theta: float = 10_000.0

    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        D = x.shape[-1]
        angle = angles(positions, D + D % 2, self.theta, self.dtype)
        waves = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*angle.shape[:-1], -1)
        return x + waves[..., :D].astype(x.dtype)


class Learned(Position):
    """A learned vector for each absolute position, added to the embeddings."""

    max_len: int = 1024  # the longest sequence the table can place

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


class Rope(Position):
    """Rotary positions: queries and keys turned by their position (https://arxiv.org/abs/2104.09864), half-split."""

    theta: float = 10_000.0

    needs_attention: ClassVar[bool] = True

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        K = x.shape[-1]
        if K % 2:
            raise UserError(f"rope rotates pairs, so the head dim must be even, not {K}")
        angle = angles(positions, K, self.theta, self.dtype)[..., None, :]
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        first, second = jnp.split(x.astype(sin.dtype), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)


def alibi_slopes(n_heads: int) -> np.ndarray:
    """`2^(-8h/n)` for a power of two; else those of the next lower power, then every other one of its double."""
    power = 2 ** int(np.floor(np.log2(n_heads)))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between])[:n_heads]


class ALiBi(Position):
    """Linear biases on the scores, falling with distance (https://arxiv.org/abs/2108.12409)."""

    needs_attention: ClassVar[bool] = True

    def bias(self, q_positions: jax.Array, k_positions: jax.Array, n_heads: int) -> jax.Array:
        distance = jnp.abs(q_positions[:, None, :, None] - k_positions[:, None, None, :]).astype(wide(self.dtype))
        return -jnp.asarray(alibi_slopes(n_heads), wide(self.dtype))[:, None, None] * distance


POSITIONS: dict[str, type[Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rope": Rope,
    "alibi": ALiBi,
}
