"""The contract every position encoding obeys: it adds to embeddings, rotates queries and keys, or biases scores.

Positions are int32 and angles float32 (or wider) whatever the compute dtype: bf16 cannot count past 256.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.ops.scores import Bias
from model.settings import check_fields


class Position(nn.Module):
    """No positions (NoPE): order is known only through the causal mask or the recurrence.

    `span` is the length that the context is opened for: a row's in training, the room of the cache in generation.
    """

    dtype: Any = jnp.float32

    # Whether it acts on queries, keys or scores, and so needs a softmax mixer to act in.
    needs_attention: ClassVar[bool] = False
    # Whether scores depend on positions only through their differences: then a cache may count them anew.
    relative: ClassVar[bool] = True
    # Whether it makes sense only where no query sees a later key.
    causal_only: ClassVar[bool] = False
    # Whether it places the patches of an image; `grid` then says how they lie in a row.
    on_grid: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    @property
    def stretches(self) -> bool:
        """Whether it depends on the span, so that the same token is placed otherwise in a longer context."""
        return False

    @property
    def shares(self) -> bool:
        """Whether the layers of a backbone share one bias, which it makes once and their context holds."""
        return False

    def limit(self) -> int | None:
        """The longest sequence it can place, if there is one."""
        return None

    def check(self, head_dim: int) -> None:
        """Refuses settings that cannot work for heads of this dim."""

    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Adds to token embeddings, `[B, L, D]`; positions: [B or 1, L]."""
        return x

    def rotate_queries(self, q: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        """Rotates queries, `[B, L, H, K]`."""
        return q

    def rotate_keys(self, k: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        """Rotates keys, `[B, M, G, K]`."""
        return k

    def sharpening(self, head_dim: int) -> tuple[float, float]:
        """What is left to multiply scores by, of dims that were turned, and of dims beside them that never are.

        A temperature is of the whole score, and a rotation reaches only the dims that it is given.
        """
        return 1.0, 1.0

    def bias(self, n_heads: int, causal: bool) -> Bias | None:
        """What is added to the scaled scores."""
        return None
