"""Hyena: gates and long convolutions in turn, whose filters a network makes (https://arxiv.org/abs/2302.10866)."""

from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context, Mixer, State, wide
from model.documents import looking_back, neighbours, reverse
from model.errors import UserError
from model.layers import dense
from model.mixers.mamba import uniform
from model.ops.conv import conv_tail, long_conv, short_conv, window_conv
from model.ops.document_conv import SHORT, document_conv
from model.settings import Dim, Length, NotNegative, Positive

Array = jax.Array

PIECE = 1024  # lags whose features are held at a time
TARGET, SLOW, FAST = 1e-2, 1.5, 0.3  # a window falls to the target in so many times the longest lag


def window_rates(D: int) -> np.ndarray:
    """How fast the windows of the channels fall, in one longest lag, `[D]`: from slow to fast."""
    return np.linspace(-np.log(TARGET) / SLOW, -np.log(TARGET) / FAST, D)


def lag_features(lags: Array, bands: int, longest: int, dtype: Any) -> Array:
    """The lag as a part of the longest, and waves of it, `[L, 1 + 2 bands]`."""
    t = lags.astype(dtype)[:, None] / longest
    angle = 2 * np.pi * t * jnp.asarray(np.linspace(1e-4, bands - 1, bands), dtype)
    return jnp.concatenate([t, jnp.cos(angle), -jnp.sin(angle)], axis=-1)


def implicit_filter(*made: Any, bands: int, longest: int, floor: float) -> Array:
    """A filter `[L, D]` by a network of sines that reads the lag, times a window that falls with it.

    made: the last map [D, F] and the windows' rates [D]; the sines' frequencies [F], the biases of all layers and a
    matrix of each; and L.
    """
    last, rates, frequency, biases, *matrices, L = made
    product = partial(jnp.einsum, "lf,fg->lg", precision="highest")

    @partial(jax.checkpoint, prevent_cse=False)
    def piece(start):
        lags = start + jnp.arange(min(PIECE, L), dtype=jnp.int32)
        h = lag_features(lags, bands, longest, last.dtype)
        for matrix, bias in zip(matrices, biases, strict=True):
            h = jnp.sin(frequency * (product(h, matrix) + bias))
        t = lags.astype(last.dtype)[:, None] / longest
        return product(h, last.T) * (jnp.exp(-t * rates) + floor)

    if L <= PIECE:
        return piece(0)
    return jax.lax.map(piece, PIECE * jnp.arange(-(-L // PIECE))).reshape(-1, last.shape[0])[:L]


class Hyena(Mixer):
    """Hyena: what is read passes long convolutions, and after each it is gated by another map of the tokens."""

    order: Dim = 2  # N, convolutions with a gate behind each
    conv: Dim = 3  # width of the short convolution of all maps
    filter_width: Dim = 64  # F, of the network that makes the filters
    filter_layers: Dim = 3  # its layers of sines
    bands: Dim = 16  # waves of the lag that it reads
    frequency: Positive = 1.0  # of the sines, at the start; higher ones make rougher filters, and round them more
    longest: Length = 1024  # the lag that is 1 to the network; farther ones are more than that
    floor: NotNegative = 0.0  # what windows have besides their decay, at every lag
    implementation: Literal["transform", "halves", "reference"] | None = None  # of the convolutions; None picks

    groups: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("filter_in", "filter_hidden", "filter_bias", "filter_out", "frequency"), "no_decay"),
        **dict.fromkeys(("skip", "conv_bias"), "no_decay"),
    }

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check_direction(state)
        D, N, W, f = self.width, self.order, self.conv, wide(self.dtype)
        past = self.init_state(x.shape[0], 0) if state is None else state
        inside = None  # of rows with their padding behind them: where there is none
        if ctx.segments is not None and ctx.right_padded:
            inside, ctx = ctx.segments[..., None] > 0, looking_back(ctx)
        reach, real = neighbours(ctx)

        maps = dense((N + 1, D), ("embed", None, "inner"), self.dtype, "in")(x)
        taps = self.weight("conv", uniform(W**-0.5), (W, N + 1, D), (None, None, "inner"))
        bias = self.weight("conv_bias", uniform(W**-0.5), (N + 1, D), (None, "inner"))
        read = [
            short_conv(maps[:, :, i], taps[:, i], bias[i], past["conv"][:, :, i], reach, real) for i in range(N + 1)
        ]
        tails = [conv_tail(maps[:, :, i], past["conv"][:, :, i], real) for i in range(N + 1)]

        skip = self.weight("skip", nn.initializers.normal(1.0), (N, D), (None, "inner"))
        last, shared = self.filters()
        z, inputs = read[0].astype(f), []
        for i in range(N):
            z = z if inside is None else jnp.where(inside, z, 0)
            y = self.convolved(z, past["inputs"][:, i], ctx, last[:, i], shared)
            inputs.append(conv_tail(z, past["inputs"][:, i], real))
            z = read[i + 1].astype(f) * (y + skip[i] * z)
        out = dense(D, ("inner", "embed"), self.dtype, "out")(z.astype(self.dtype))
        after = dict(conv=jnp.stack(tails, axis=2), inputs=jnp.stack(inputs, axis=1))
        return out, None if state is None else after

    def convolved(self, z: Array, past: Array, ctx: Context, last: Array, shared: tuple[Array, ...]) -> Array:
        """A convolution with the filters of the last maps `[1 or 2, D, F]`, of the second backward."""
        reach, real = neighbours(ctx)
        kernel = partial(implicit_filter, bands=self.bands, longest=self.longest, floor=self.floor)
        rates = jnp.asarray(window_rates(self.width), z.dtype)
        weights, *ahead = ((one, rates) for one in last)
        plain = past.shape[1] == 0 and reach is None
        if self.implementation == "transform" and not plain:
            raise UserError("hyena's transform cannot carry a state or tell documents apart; set implementation=None")
        if self.implementation == "reference":
            lags = partial(window_conv, kernel=lambda *w: kernel(*w[:-1], *shared, w[-1]), W=past.shape[1] + z.shape[1])
            y = lags(z, past, weights=weights, reach=reach, real=real)
            for one in ahead:
                there, real = neighbours(reverse(ctx))
                y = y + lags(z[:, ::-1], past, weights=one, reach=there, real=real)[:, ::-1]
            return y
        both = dict(ahead=sum(ahead, ()), shared=shared)
        # A transform rounds all of a row by its largest number, and products differ more in size than inputs do.
        if self.implementation == "transform" or (self.implementation is None and plain and z.shape[1] > SHORT):
            return long_conv(z, kernel, weights, **both)
        return document_conv(z, past, kernel, weights, **both, reach=reach, real=real)

    def filters(self) -> tuple[Array, tuple[Array, ...]]:
        """The filters' last maps `[1 or 2, N, D, F]`, and what all of them share."""
        F, n, layers = self.filter_width, 1 + 2 * self.bands, self.filter_layers
        frequency = self.weight("frequency", nn.initializers.constant(self.frequency), (F,), (None,))
        biases = self.weight("filter_bias", uniform(F**-0.5), (layers, F), (None, None))
        matrices = [self.weight("filter_in", uniform(n**-0.5), (n, F), (None, None))]
        if layers > 1:
            matrices += list(self.weight("filter_hidden", uniform(F**-0.5), (layers - 1, F, F), (None, None, None)))
        shared = (frequency, biases, *matrices)
        shape, axes = (1 if self.causal else 2, self.order, self.width, F), (None, None, "inner", None)
        return self.weight("filter_out", uniform(F**-0.5), shape, axes), shared

    def init_state(self, batch: int, max_len: int) -> State:
        """Filters have no recurrence: all inputs of every convolution are kept, up to the last of so many tokens."""
        return dict(
            conv=jnp.zeros((batch, self.conv - 1, self.order + 1, self.width), self.dtype),
            inputs=jnp.zeros((batch, self.order, max(max_len - 1, 0), self.width), wide(self.dtype)),
        )

    def state_bytes(self, length: int) -> int:
        tail = (self.conv - 1) * (self.order + 1) * jnp.dtype(self.dtype).itemsize
        inputs = self.order * max(length - 1, 0) * jnp.dtype(wide(self.dtype)).itemsize
        return self.width * (tail + inputs)
