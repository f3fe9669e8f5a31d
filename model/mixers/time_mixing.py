"""What RWKV's time mixing has in common from version 6 on: a matrix state a head, and the token before."""

from typing import ClassVar, Literal

import jax.numpy as jnp

from model.contract import Mixer, State, wide
from model.layers import check_divides
from model.settings import Dim


class TimeMixing(Mixer):
    """Heads that each hold a square matrix, over tokens mixed with the ones before them; it runs forward only."""

    head_dim: Literal[0] | Dim = 0  # K, channels of a head; 0: 64, or fewer so that there are `fewest_heads`

    forward_only: ClassVar[bool] = True
    fewest_heads: ClassVar[int]

    @property
    def channels(self) -> int:
        return self.head_dim or min(64, max(1, self.width // self.fewest_heads))

    def check(self) -> None:
        self.check_direction()
        check_divides(f"model.{self.label}.head_dim", self.channels, "the width", self.width)

    def init_state(self, batch: int, max_len: int) -> State:
        K = self.channels
        return dict(
            h=jnp.zeros((batch, self.width // K, K, K), wide(self.dtype)),
            shift=jnp.zeros((batch, 1, self.width), self.dtype),
        )

    def state_bytes(self, length: int) -> int:
        return self.width * (self.channels * jnp.dtype(wide(self.dtype)).itemsize + jnp.dtype(self.dtype).itemsize)
