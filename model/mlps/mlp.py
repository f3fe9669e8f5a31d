"""Two linear maps and what stands between them."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State
from model.layers import dense
from model.settings import Dim


class MLP(Mixer):
    """Two linear maps with an activation between them, or `gated`: a product of two maps, one of them activated."""

    hidden: Dim = 1
    activation: Any = nn.gelu
    gated: bool = False  # GLU variants (https://arxiv.org/abs/2002.05202)
    bias: bool = True

    last: ClassVar[str] = "down"

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        maps = ("up", "gate") if self.gated else ("up",)
        given = [dense(self.hidden, ("embed", "mlp"), self.dtype, name, bias=self.bias)(x) for name in maps]

        def hidden(up, *gate):
            h = self.activation(up)
            return h * gate[0] if gate else h

        # The maps are kept for the gradient, and nothing made of them.
        return dense(self.width, ("mlp", "embed"), self.dtype, "down", bias=self.bias, of=hidden)(*given), state

    def init_state(self, batch: int, max_len: int) -> State:
        return {}

    def state_bytes(self, length: int) -> int:
        return 0


def squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(nn.relu(x))


def identity(x: jax.Array) -> jax.Array:
    return x


FORMS: dict[str, Callable[..., MLP]] = {
    "relu": partial(MLP, activation=nn.relu),
    "squared_relu": partial(MLP, activation=squared_relu),  # https://arxiv.org/abs/2109.08668
    "gelu": partial(MLP, activation=nn.gelu),  # by its tanh approximation
    "exact_gelu": partial(MLP, activation=partial(nn.gelu, approximate=False)),
    "linear": partial(MLP, activation=identity),
    "geglu": partial(MLP, activation=nn.gelu, gated=True, bias=False),
    "swiglu": partial(MLP, activation=nn.silu, gated=True, bias=False),
}


def mlp_width(kind: str, width: int, given: int, multiple: int = 32) -> int:
    """The hidden width: as given, else 4 D, or for gated MLPs 8/3 D (equal parameters) rounded up to a multiple."""
    if given:
        return given
    return -(-8 * width // (3 * multiple)) * multiple if kind in ("geglu", "swiglu") else 4 * width
