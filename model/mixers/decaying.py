"""What linear attention that forgets has in common: a matrix state a head, and a norm of what each head reads."""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.documents import at_real, marks
from model.head_norm import HeadNorm
from model.layers import check_divides, dense
from model.ops.matrix_state import IMPLEMENTATIONS, matrix_state
from model.settings import Dim

Array = jax.Array


class Decaying(Mixer):
    """Linear attention whose state fades, by a head's decay or by its channels' own; it runs forward only."""

    n_heads: Dim = 4
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of matrix_state; None picks

    forward_only: ClassVar[bool] = True
    instead: ClassVar[str] = "attention or linear"

    @property
    def sides(self) -> tuple[int, int]:
        """Of a head's state: the channels of a key and those of a value."""
        raise NotImplementedError

    def check(self) -> None:
        self.check_direction()
        check_divides(f"model.{self.label}.n_heads", self.n_heads, "the width", self.width)

    def heads(self, name: str, x: Array, channels: int, **options) -> Array:
        """A map of the tokens to all heads, `[B, L, H, channels]`."""
        return dense((self.n_heads, channels), ("embed", "heads", None), self.dtype, name, **options)(x)

    def fade(self, q: Array, k: Array, v: Array, w: Array, ctx: Context, past: State) -> tuple[Array, State]:
        """What tokens read, `[B, L, H, V]`, and the state after; padding adds nothing and lets nothing fade."""
        real, keep = marks(ctx)
        k, w = at_real(real, k), at_real(real, w)
        h0 = self.empty(v.shape[0]) if past is None else past
        y, h = matrix_state(q, k, v, w, h0, keep, implementation=self.implementation)
        return y, None if past is None else h

    def head_norm(self, y: Array, bias: bool = True, eps: float = 1e-5) -> Array:
        """Every head by itself, with a scale for each of its channels."""
        return HeadNorm(self.dtype, eps, bias, name="norm")(y)

    def close(self, y: Array) -> Array:
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y.astype(self.dtype))

    def empty(self, batch: int) -> Array:
        return jnp.zeros((batch, self.n_heads, *self.sides), wide(self.dtype))

    def init_state(self, batch: int, max_len: int) -> State:
        return self.empty(batch)

    def state_bytes(self, length: int) -> int:
        K, V = self.sides
        return self.n_heads * K * V * jnp.dtype(wide(self.dtype)).itemsize


class NarrowKeys(Decaying):
    """One whose keys have fewer channels than its values."""

    key_dim: Literal[0] | Dim = 0  # channels of a query and a key; 0: half those of a value, which are width / n_heads

    @property
    def sides(self) -> tuple[int, int]:
        V = self.width // self.n_heads
        return self.key_dim or max(1, V // 2), V


@partial(jax.checkpoint, prevent_cse=False)
def gated(y: Array, gate: Array) -> Array:
    return y * nn.silu(gate)
