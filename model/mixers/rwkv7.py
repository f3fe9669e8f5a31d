"""RWKV-7's time mixing: a matrix state under a generalised delta rule (https://arxiv.org/abs/2503.14456).

Every channel forgets at a rate, and loses what lies along the removal key at another, that the token decides; what is
written lies along the replacement key. The paper's layers mix their values with the first layer's; these do not.
"""

from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.documents import at_real, marks, neighbours
from model.head_norm import HeadNorm
from model.layers import dense
from model.mixers.deltanet import unit
from model.mixers.time_mixing import TimeMixing
from model.ops.conv import conv_tail, shift
from model.ops.delta_rule import IMPLEMENTATIONS, delta_rule
from model.settings import Dim

Array = jax.Array


def steps(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """From slow to fast over all channels, as the authors start a layer half way up."""
    size = shape[0] * shape[1]
    return (-6.5 + 5 * (jnp.arange(size, dtype=dtype) / max(size - 1, 1)) ** 1.56).reshape(shape)


def mixes(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """How much of the token before goes into r, w, k, v, a and g; likewise."""
    power = jnp.asarray([0.1, 0.45, 0.35, 0.35, 0.45, 0.1], dtype)[:, None]
    return 1 - (jnp.arange(shape[1], dtype=dtype) / shape[1]) ** power


class RWKV7(TimeMixing):
    """RWKV-7's time mixing: a matrix state a head that decays by channel and is corrected along learned keys."""

    decay_rank: Dim = 64  # of the map that decides the decay
    rate_rank: Dim = 64  # of the map that decides how much is taken away
    gate_rank: Dim = 128  # of the map that decides what comes out
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of delta_rule; None picks

    # Not four: a removal key of few channels comes close to zero, and normalised is mostly rounding.
    fewest_heads: ClassVar[int] = 2
    groups: ClassVar[dict[str, str]] = {
        "decay": "ssm",
        "rate": "ssm",
        "bonus": "ssm",
        "mix": "no_decay",
        "removal": "no_decay",
        "replacement": "no_decay",
    }

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        D, K, f = self.width, self.channels, wide(self.dtype)
        H = D // K
        past = self.init_state(x.shape[0], 0) if state is None else state
        wide_x = x.astype(f)  # rounded once, after mixing
        other = shift(x, past["shift"], *neighbours(ctx)).astype(f) - wide_x

        def per_channel(name, init):
            return self.weight(name, init, (H, K), ("inner", None))

        def low_rank(name, rank, x, activation=lambda low: low):
            low = dense(rank, ("embed", None), self.dtype, f"{name}_down", init=nn.initializers.zeros_init())(x)
            start = nn.initializers.orthogonal(0.1)
            return dense((H, K), (None, "inner", None), self.dtype, f"{name}_up", init=start)(activation(low))

        mix = self.weight("mix", mixes, (6, D), (None, None))
        for_r, for_w, for_k, for_v, for_a, for_g = (wide_x + other * mix[:, None, None]).astype(self.dtype)
        heads = partial(dense, (H, K), ("embed", "inner", None), self.dtype)
        r, k, v = heads("r")(for_r), heads("k")(for_k).astype(f), heads("v")(for_v)
        d = per_channel("decay", steps) + low_rank("decay", self.decay_rank, for_w, jnp.tanh)
        w = -jnp.exp(-0.5) * nn.sigmoid(d)
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()
        rate = nn.sigmoid(per_channel("rate", zeros) + low_rank("rate", self.rate_rank, for_a))
        removal = unit(k * per_channel("removal", nn.initializers.constant(0.85)))
        k = k * (1 + (rate - 1) * per_channel("replacement", ones))
        now = jnp.sum(r * k * per_channel("bonus", zeros), axis=-1, keepdims=True) * v

        real, keep = marks(ctx)
        k, w, taken = (at_real(real, leaf) for leaf in (k, w, -rate * removal))
        narrow = (leaf.astype(self.dtype) for leaf in (r, k, v))
        y, h = delta_rule(*narrow, w, past["h"], keep, a=taken, b=removal, implementation=self.implementation)
        # By head. Outputs are not divided by the root of 64: their variance is that much larger, as is this epsilon.
        norm = HeadNorm(self.dtype, 64e-5, name="norm")
        g = low_rank("gate", self.gate_rank, for_g, nn.sigmoid)
        out = dense(D, ("inner", None, "embed"), self.dtype, "out", inputs=2)((norm(y) + now.astype(self.dtype)) * g)
        return out, None if state is None else dict(h=h, shift=conv_tail(x, past["shift"], real))
