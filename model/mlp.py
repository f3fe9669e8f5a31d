"""MLPs: what a layer makes of each token by itself. As sub-layers of a block they obey the contract of a mixer."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.documents import neighbours
from model.errors import UserError
from model.layers import dense
from model.mixers.rwkv import spread
from model.ops.conv import conv_tail, shift
from model.settings import Dim


class MLP(Mixer):
    """Two linear maps with an activation between them, or `gated`: a product of two maps, one of them activated."""

    hidden: Dim = 1
    activation: Any = nn.gelu
    gated: bool = False  # GLU variants (https://arxiv.org/abs/2002.05202)
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        h = self.activation(dense(self.hidden, ("embed", "mlp"), self.dtype, "up", bias=self.bias)(x))
        if self.gated:
            h = h * dense(self.hidden, ("embed", "mlp"), self.dtype, "gate", bias=self.bias)(x)
        return dense(self.width, ("mlp", "embed"), self.dtype, "down", bias=self.bias)(h), state

    def init_state(self, batch: int, max_len: int) -> State:
        return {}

    def state_bytes(self, length: int) -> int:
        return 0


class ChannelMix(Mixer):
    """RWKV-4's channel mixing (https://arxiv.org/abs/2305.13048): gated squared ReLU that looks at the token before."""

    hidden: Dim = 1

    forward_only: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {"mix_k": "no_decay", "mix_r": "no_decay"}

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        if not self.causal:
            raise UserError("mlp 'channel_mix' looks back only; set model.causal=True, or use swiglu")
        f = wide(self.dtype)
        past = self.init_state(x.shape[0], 0) if state is None else state
        shifted = shift(x, past["shift"], *neighbours(ctx)).astype(f)

        def mixed(name):  # this much of the token, the rest of the one before
            init = nn.with_logical_partitioning(spread(lambda i: i**0.5), (None,))
            mu = self.param(f"mix_{name}", init, (self.width,), f)
            return shifted + mu * (x - shifted)

        k = squared_relu(dense(self.hidden, ("embed", "mlp"), self.dtype, "k")(mixed("k")))
        r = nn.sigmoid(dense(self.width, ("embed", None), self.dtype, "r")(mixed("r")))
        y = r * dense(self.width, ("mlp", "embed"), self.dtype, "v")(k)
        real = None if ctx.segments is None else ctx.segments > 0
        return y, None if state is None else dict(shift=conv_tail(x, past["shift"], real))

    def init_state(self, batch: int, max_len: int) -> State:
        return dict(shift=jnp.zeros((batch, 1, self.width), self.dtype))

    def state_bytes(self, length: int) -> int:
        return self.width * jnp.dtype(self.dtype).itemsize


def squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(nn.relu(x))


def identity(x: jax.Array) -> jax.Array:
    return x


MLPS: dict[str, Callable[..., Mixer] | None] = {
    "relu": partial(MLP, activation=nn.relu),
    "squared_relu": partial(MLP, activation=squared_relu),  # https://arxiv.org/abs/2109.08668
    "gelu": partial(MLP, activation=nn.gelu),  # by its tanh approximation
    "exact_gelu": partial(MLP, activation=partial(nn.gelu, approximate=False)),
    "linear": partial(MLP, activation=identity),
    "geglu": partial(MLP, activation=nn.gelu, gated=True, bias=False),
    "swiglu": partial(MLP, activation=nn.silu, gated=True, bias=False),
    "channel_mix": ChannelMix,
    "none": None,
}


def mlp_width(kind: str, width: int, given: int) -> int:
    """The hidden width: as given, else 4 D, or for gated MLPs 8/3 D (equal parameters) rounded up to 32."""
    if given:
        return given
    return -(-8 * width // (3 * 32)) * 32 if kind in ("geglu", "swiglu") else 4 * width
