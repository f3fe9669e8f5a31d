"""The classical recurrent networks: tanh RNN, LSTM and GRU.

The token says `x = W x_t + b_x` to each of its cell's G gates, and the state before it `u = U h_{t-1} + b_u`. Only the
second is left to the loop over time (model/ops/recurrence.py).

Parameters are those of torch.nn.RNN, LSTM and GRU for n directions, gates in the same order: `W` `[D, n, G, E]` holds
torch's `weight_ih` `[G E, D]` transposed, `U` `[n, E, G, E]` likewise its `weight_hh`, and `bias` `[n, 2, G, E]` its
`bias_ih` and `bias_hh`. The update gate of torch's GRU weighs the past, ours the new: its parameters change sign.
"""

import math
from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model import placement
from model.contract import Context, Mixer, State, wide
from model.documents import reverse
from model.layers import dense
from model.ops.recurrence import Cell, Past, recurrence
from model.ops.stretches import gathers, stretches
from model.settings import Dim


def rnn(past: Past, x: jax.Array, u: jax.Array) -> Past:
    """`h_t = tanh(x + u)` (https://doi.org/10.1207/s15516709cog1402_1)."""
    return dict(h=jnp.tanh(x + u)[:, 0])


def lstm(past: Past, x: jax.Array, u: jax.Array) -> Past:
    """`C_t = f C_{t-1} + i C~`, `h_t = o tanh(C_t)` (https://doi.org/10.1162/089976600300015015); gates i, f, C~, o."""
    i, f, new, o = jnp.moveaxis(x + u, 1, 0)
    c = nn.sigmoid(f) * past["c"] + nn.sigmoid(i) * jnp.tanh(new)
    return dict(h=nn.sigmoid(o) * jnp.tanh(c), c=c)


def gru(past: Past, x: jax.Array, u: jax.Array) -> Past:
    """`h_t = (1 - z) h_{t-1} + z h~` with `h~ = tanh(x + r u)` (https://arxiv.org/abs/1412.3555); gates r, z, h~.

    As in cuDNN, r weighs what the past says to h~ and not the past itself, so that one product serves all gates.
    """
    r, z = nn.sigmoid(jnp.moveaxis(x[:, :2] + u[:, :2], 1, 0))
    new = jnp.tanh(x[:, 2] + r * u[:, 2])
    return dict(h=(1 - z) * past["h"] + z * new)


def over_rows(
    cell: Cell, x: jax.Array, U: jax.Array, bias: jax.Array, past: Past, ctx: Context
) -> tuple[jax.Array, Past]:
    """Outputs `[B, L, E]` and the last state; x: [B, L, G, E]; U: [E, G, E], or [H, K, G, K] of heads apart;
    bias: [G, E].

    A token that opens a document finds an empty past, and padding leaves the past as it is. Each device runs its own
    rows with the whole of U: shared out, something would be sent at every token.
    """

    def rows(U, bias, past, tokens):
        y, last = recurrence(cell, U, bias, past, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tokens))
        return jnp.swapaxes(y, 0, 1), last

    tokens = dict(x=x)
    if ctx.segments is not None:
        opens = jnp.broadcast_to(ctx.positions == 0, ctx.segments.shape)
        tokens |= dict(real=ctx.segments[..., None] > 0, opens=opens[..., None])
    by_row = placement.spec(("batch",), x.shape[:1])
    run = placement.on_each_device(rows, (PartitionSpec(), PartitionSpec(), by_row, by_row), by_row)
    return run(U, bias, past, tokens)


def orthogonal_gates(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """`[..., E, G, E]`, an orthogonal map of the past for every gate (https://arxiv.org/abs/1312.6120)."""
    *lead, E, G, _ = shape
    each = [nn.initializers.orthogonal()(k, (E, E), dtype) for k in jax.random.split(key, math.prod(lead) * G)]
    return jnp.stack(each).reshape(*lead, G, E, E).swapaxes(-3, -2)


class Recurrent(Mixer):
    """A cell run over the length, and, bidirectional, a second one run backwards beside it."""

    hidden: Literal[0] | Dim = 0  # E, width of the state in each direction; 0: that of the model

    cell: ClassVar[Cell]
    gates: ClassVar[int]
    kept: ClassVar[tuple[str, ...]] = ("h",)  # what the state is made of
    open_gate: ClassVar[int | None] = None  # the gate whose bias starts at 1

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check_direction(state)
        if stretches(x.shape[1]) > 1:
            gathers(f"the recurrence of {self.label}")
        n, G, E = 1 if self.causal else 2, self.gates, self.size

        def bias_init(key, shape, dtype):
            zeros = jnp.zeros(shape, dtype)
            return zeros if self.open_gate is None else zeros.at[:, 0, self.open_gate].set(1)

        U = self.weight("U", orthogonal_gates, (n, E, G, E), (None, None, None, "inner"))
        bias = self.weight("bias", bias_init, (n, 2, G, E), (None, None, None, "inner"))
        says = dense((n, G, E), ("embed", None, None, "inner"), self.dtype, "W")(x) + bias[:, 0].astype(self.dtype)

        empty = self.init_state(x.shape[0], 0)
        run = partial(over_rows, type(self).cell)
        y, last = run(says[:, :, 0], U[0], bias[0, 1], empty if state is None else state, ctx)
        if not self.causal:
            back, _ = run(says[:, ::-1, 1], U[1], bias[1, 1], empty, reverse(ctx))
            y = jnp.concatenate([y, back[:, ::-1]], axis=-1)
        if y.shape[-1] != self.width:
            y = dense(self.width, ("inner", "embed"), self.dtype, "out")(y)
        return y, None if state is None else last

    @property
    def size(self) -> int:
        return self.hidden or self.width

    def init_state(self, batch: int, max_len: int) -> State:
        return {name: jnp.zeros((batch, self.size), wide(self.dtype)) for name in self.kept}

    def state_bytes(self, length: int) -> int:
        return len(self.kept) * self.size * jnp.dtype(wide(self.dtype)).itemsize


class RNN(Recurrent):
    """Elman's network: a tanh of the token and the last state."""

    cell: ClassVar[Cell] = staticmethod(rnn)
    gates: ClassVar[int] = 1


class LSTM(Recurrent):
    """LSTM: a cell that gates write to, keep and read."""

    cell: ClassVar[Cell] = staticmethod(lstm)
    gates: ClassVar[int] = 4
    kept: ClassVar[tuple[str, ...]] = ("h", "c")
    open_gate: ClassVar[int] = 1  # to forget is to be learned (https://proceedings.mlr.press/v37/jozefowicz15.html)


class GRU(Recurrent):
    """GRU: a state that an update gate moves towards a new one."""

    cell: ClassVar[Cell] = staticmethod(gru)
    gates: ClassVar[int] = 3
