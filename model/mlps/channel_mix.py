"""RWKV-4's channel mixing."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.documents import neighbours
from model.errors import UserError
from model.layers import dense
from model.mixers.rwkv import spread
from model.mlps.mlp import squared_relu
from model.ops.conv import conv_tail, shift
from model.settings import Dim


class ChannelMix(Mixer):
    """RWKV-4's channel mixing (https://arxiv.org/abs/2305.13048): gated squared ReLU that looks at the token before."""

    hidden: Dim = 1

    forward_only: ClassVar[bool] = True
    last: ClassVar[str] = "v"
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
