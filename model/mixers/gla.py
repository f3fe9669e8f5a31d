"""Gated linear attention: every channel of a key fades as the token decides (https://arxiv.org/abs/2312.06635)."""

import flax.linen as nn
import jax

from model.contract import Context, State, wide
from model.layers import dense
from model.mixers.decaying import NarrowKeys, gated
from model.settings import Dim, Positive

Array = jax.Array


class GLA(NarrowKeys):
    """Gated linear attention: a state that forgets by channel, and an output gate."""

    rank: Dim = 16  # of the map that decides the decay
    temperature: Positive = 16.0  # the root that is taken of gates, so that they start close to 1

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        (K, V), f = self.sides, wide(self.dtype)
        q, k, v = (self.heads(name, x, size) for name, size in (("q", K), ("k", K), ("v", V)))
        low = dense(self.rank, ("embed", None), self.dtype, "decay_down")(x)
        gate = dense((self.n_heads, K), (None, "heads", None), self.dtype, "decay_up", bias=True, out=f)(low)
        w = jax.nn.log_sigmoid(gate) / self.temperature
        y, after = self.fade(q.astype(f) * K**-0.5, k, v, w, ctx, state)
        return self.close(gated(self.head_norm(y), self.heads("gate", x, V, bias=True))), after
