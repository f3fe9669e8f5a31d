"""H3, "hungry hungry hippos": two state spaces with products between them (https://arxiv.org/abs/2212.14052)."""

from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.layers import check_divides, dense
from model.mixers.mamba import uniform
from model.mixers.s4d import s4d_system, starting_modes
from model.mixers.state_space import StateSpace, System, convolved, log_uniform, of_channels, windowed, without_end
from model.settings import Dim, Positive

Array = jax.Array

# Rows up to so many tokens run as recurrences: a transform rounds all of a row by its largest number, and products of
# three projections differ more in size than inputs do.
SHORT = 64


def shift_kernel(taps: Array, L: int) -> Array:
    """The kernel of a shift SSM, whose state is its last inputs: C itself, `[L, D]`; taps: [D, W]."""
    return jnp.pad(taps[:, :L].T, [(0, max(L - taps.shape[1], 0)), (0, 0)])


def shift_system(taps: Array) -> System:
    """A shift SSM in its two forms: a convolution with few lags, and what looks at the last inputs."""
    return windowed(of_channels(shift_kernel, (taps,), recurrence=None), taps.shape[1])


def outer(k: Array, v: Array, P: int) -> Array:
    """The products of each head's keys and values, all pairs as channels, `[B, L, D P]`; k, v: [B, L, D]."""
    B, L, D = k.shape
    k, v = (x.reshape(B, L, D // P, P) for x in (k, v))
    return jnp.einsum("blhp,blhr->blhpr", k, v).reshape(B, L, D * P)


def read(q: Array, kv: Array, P: int) -> Array:
    """What queries find in sums of such products, `[B, L, D]`; q: [B, L, D], kv: [B, L, D P]."""
    B, L, D = q.shape
    return jnp.einsum("blhp,blhpr->blhr", q.reshape(B, L, -1, P), kv.reshape(B, L, -1, P, P)).reshape(B, L, D)


class H3(StateSpace):
    """H3: keys pass a shift SSM, their products with values a diagonal one, and queries read what comes of it."""

    head_dim: Dim = 1  # P, channels of a head: its P x P products share a state space; 1: all is elementwise
    shift: Dim = 64  # W, tokens that the shift SSM remembers
    dt_min: Positive = 0.001
    dt_max: Positive = 0.1

    forward_only: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {
        "log_dt": "ssm",
        "A_real": "ssm",
        "A_imag": "ssm",
        "C": "no_decay",
        "D": "no_decay",
        "shift_C": "no_decay",
        "shift_D": "no_decay",
    }

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        D, P, f = self.width, self.head_dim, wide(self.dtype)
        x, ctx = without_end(x, ctx)
        made = partial(dense, D, ("embed", "inner"), self.dtype)
        q, k, v = (made(name)(x).astype(f) for name in "qkv")
        shift, diagonal = self.systems()
        skip = self.weight("shift_D", nn.initializers.normal(1.0), (D,), ("inner",))
        skip_kv = jnp.repeat(self.weight("D", nn.initializers.normal(1.0), (D // P,), ("inner",)), P * P)

        short = self.implementation is None and x.shape[1] <= SHORT
        if self.transforms(ctx, state) and not short:
            kv = outer(convolved([shift], k) + skip * k, v, P)
            y = convolved([diagonal], kv)
        else:
            past = self.init_state(x.shape[0], 0) if state is None else state
            seen, tail = shift.recurrence(k, past["shift"], ctx, None)
            kv = outer(seen + skip * k, v, P)
            y, h = diagonal.recurrence(kv, past["h"], ctx, self.implementation)
            state = None if state is None else dict(shift=tail, h=h)
        y = read(q, y + skip_kv * kv, P).astype(self.dtype)
        return dense(D, ("inner", "embed"), self.dtype, "out")(y), state

    def systems(self) -> list[System]:
        D, P, N = self.width, self.head_dim, self.state // 2
        taps = self.weight("shift_C", uniform(self.shift**-0.5), (D, self.shift), ("inner", None))
        heads, channels = D // P, ("inner", None)
        log_dt = self.weight("log_dt", log_uniform(self.dt_min, self.dt_max), (heads,), ("inner",))
        A = self.modes("A", starting_modes("lin", N), (heads, N), channels)
        C = self.weight("C", nn.initializers.normal(0.5**0.5), (2, heads, N), (None, *channels))
        of_pairs = (jnp.repeat(weight, P * P, axis=0) for weight in (A, jax.lax.complex(*C), jnp.exp(log_dt)))
        return [shift_system(taps), s4d_system(*of_pairs, "zoh")]

    def state_shape(self) -> tuple[int, ...]:
        return self.width * self.head_dim, self.state // 2

    def check(self) -> None:
        self.check_direction()
        check_divides("model.h3.head_dim", self.head_dim, "model.width", self.width)

    def init_state(self, batch: int, max_len: int) -> State:
        tail = jnp.zeros((batch, self.shift - 1, self.width), wide(self.dtype))
        return dict(h=super().init_state(batch, max_len), shift=tail)

    def state_bytes(self, length: int) -> int:
        tail = (self.shift - 1) * self.width * jnp.dtype(wide(self.dtype)).itemsize
        return super().state_bytes(length) + tail
