"""Mega: a moving average, then gated attention with one head (https://arxiv.org/abs/2209.10655)."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Cache, Full, Ring
from model.contract import Context, Mixer, State, wide
from model.documents import reverse
from model.errors import UserError
from model.layers import dense
from model.mixers.attention import begin, remember, whole_row
from model.mixers.state_space import System, convolved, diagonal_recurrence, of_channels, recurred, without_end
from model.ops import laplace_attention
from model.ops.attention import IMPLEMENTATIONS, attention, attention_weights
from model.ops.mask import CAUSAL, FULL
from model.ops.patterns import Chunk
from model.ops.scores import Bias
from model.ops.stretches import stretches
from model.positions.position import Position
from model.positions.rotary import angles, inverse_frequencies, turn_pairs
from model.positions.score_bias import distances
from model.settings import Dim, Length

Array = jax.Array

MANY = 2**22  # scores of a row from which on they are made in tiles: one head has few, and a long row still many

# The moving average


def ema_kernel(log_decay: Array, weight: Array, L: int) -> Array:
    """`sum_n weight_n decay_n^l` for l below L, `[L, D]`; both [D, N]. A product of matrices, as `impulse` is."""
    c = 1 << L.bit_length() // 2

    def powers(n, every):
        return jnp.exp(log_decay * (every * jnp.arange(n, dtype=jnp.int32))[:, None, None])

    made = jnp.einsum("idn,jdn->ijd", weight * powers(-(-L // c), c), powers(c, 1), precision="highest")
    return made.reshape(-1, weight.shape[0])[:L]


def ema_system(alpha: Array, delta: Array, beta: Array, eta: Array) -> System:
    """The damped moving average `h_t = alpha beta x_t + (1 - alpha delta) h_{t-1}`, `y_t = eta h_t`; all [D, N]."""
    # Of gates that are wide open, 1 to the last digit, it would be no number.
    log_decay = jnp.log1p(-jnp.minimum(alpha * delta, 1 - jnp.finfo(alpha.dtype).epsneg))

    def recurrence(u, h0, ctx, form):
        write, read = (lambda u, B: B * u[..., None]), (lambda h, C: jnp.sum(C * h, axis=-1))
        return diagonal_recurrence(jnp.exp(log_decay), alpha * beta, eta, write, read, u, h0, ctx, form)

    return of_channels(ema_kernel, (log_decay, eta * alpha * beta), recurrence)


def signs(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """1, -1, 1, ... with a little noise."""
    turns = jnp.where(jnp.arange(shape[-1]) % 2, -1, 1).astype(dtype)
    return turns + 0.02 * jax.random.normal(key, shape, dtype)


# Biases of the scores


def simple_bias(table: Array, q_positions: Array, k_positions: Array) -> Array:
    """A number for each distance, and for all past the table's ends theirs, `[B or 1, 1, L, M]`; table: [2 n - 1]."""
    n = table.shape[0] // 2
    return jnp.take(table, n + jnp.clip(distances(q_positions, k_positions), -n, n), axis=0)[:, None]


def rotary_bias(ends: Array, q_positions: Array, k_positions: Array) -> Array:
    """The product of two vectors, turned by a position each, `[B or 1, 1, L, M]`; ends: [2, K]."""
    frequencies = inverse_frequencies(ends.shape[-1], 10_000.0)

    def turned(x, positions):
        angle = angles(positions, frequencies, x.dtype)
        return turn_pairs(jnp.broadcast_to(x, (*positions.shape, x.shape[-1])), jnp.sin(angle), jnp.cos(angle), "half")

    of_queries, of_keys = turned(ends[0], q_positions), turned(ends[1], k_positions)
    return jnp.einsum("blk,bmk->blm", of_queries, of_keys, precision="highest")[:, None]


@dataclasses.dataclass(frozen=True)
class Added:
    """The sum of biases, by positions that count from the beginning of each chunk."""

    fns: tuple[Callable, ...]
    chunk: int | None

    def __call__(self, params: Any, q_positions: Array, k_positions: Array) -> Array:
        if self.chunk is not None:
            q_positions, k_positions = q_positions % self.chunk, k_positions % self.chunk
        return sum(fn(one, q_positions, k_positions) for fn, one in zip(self.fns, params, strict=True))


def added(biases: Sequence[Bias | None], chunk: int | None) -> Bias | None:
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    parts = {name: tuple(getattr(bias, name) for bias in given) for name in ("params", "axes")}
    return Bias(fn=Added(tuple(bias.fn for bias in given), chunk), **parts)


# Who is seen


def keys_seen(ctx: Context, at: Array, chunk: int | None, causal: bool) -> Array:
    """How many keys each query sees, `[B or 1, L]`, where no padding stands."""
    if causal:
        return at + 1 if chunk is None else at % chunk + 1
    after = jnp.arange(at.shape[1] - 1, -1, -1)[None] if ctx.segments is None else reverse(ctx).positions[:, ::-1]
    whole = at + after + 1
    return whole if chunk is None else jnp.minimum(whole - at // chunk * chunk, chunk)


def in_chunks(x: Array, c: int) -> Array:
    """`[B, L, ...]` to `[B n, c, ...]`, filled up with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % c)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, c, *x.shape[2:])


class Mega(Mixer):
    """Mega: attention with one head, to all tokens or within chunks, behind a moving average and between two gates."""

    position: Any = Position  # builds the position encoding

    ema: Dim = 16  # N, averages of each channel
    qk_dim: Dim = 64  # K, of queries and keys
    v_dim: Literal[0] | Dim = 0  # V, of values; 0: twice the width
    attend: Literal["softmax", "laplace"] = "softmax"  # how weights come of scores
    bias: Literal["rotary", "simple", "none"] = "rotary"  # of the scores, besides that of the position encoding
    reach: Length = 1024  # distances below this have their own number in the simple bias
    chunk: Length | None = None  # tokens attend within chunks of so many; None: to all
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    softmax: ClassVar[bool] = True
    work: ClassVar[float | None] = 2  # of the whole; within chunks as the length
    groups: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("alpha", "delta", "beta", "eta", "omega"), "no_decay"),
        **dict.fromkeys(("kappa", "mu", "bias_table", "bias_ends"), "no_decay"),
    }

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        position, at, _ = begin(self, x, ctx, state)
        D, K, V, f = self.width, self.qk_dim, self.v_dim or 2 * self.width, wide(self.dtype)
        to = partial(dense, dtype=self.dtype, bias=True)
        averaged, ema = self.average(x, ctx, state)

        gate = nn.sigmoid(to(D, ("embed", "inner"), name="update")(averaged))
        reset = nn.silu(to(V, ("embed", "inner"), name="reset")(averaged))
        z = nn.silu(to(K, ("embed", None), name="z")(averaged)).astype(f)
        kappa = self.weight("kappa", nn.initializers.normal(0.02), (2, K), (None, None))
        mu = self.weight("mu", nn.initializers.zeros_init(), (2, K), (None, None))
        q, k = (z * kappa[i] + mu[i] for i in range(2))
        if self.attend == "laplace":
            q = q / keys_seen(ctx, at, self.chunk, self.causal)[..., None]
        q, k = (one[:, :, None].astype(self.dtype) for one in (q, k))
        v = nn.silu(to(V, ("embed", "inner"), name="v")(x))[:, :, None]

        here, span = (at, x.shape[1]) if self.chunk is None else (at % self.chunk, self.chunk)
        if state is not None and self.chunk is None:
            span = state["segments"].shape[1]
        q, k = position.rotate_queries(q, here, span), position.rotate_keys(k, here, span)
        found, state = self.attention(position, q, k, v, ctx, state)
        y = to(D, ("inner", "embed"), name="out")(found[:, :, 0] * reset)
        y = nn.silu(to(D, ("embed", "inner"), name="h")(averaged) + y)
        # Where norms stand before mixers, x is normed; the authors' code has the stream itself in this place.
        return gate * (y - x.astype(y.dtype)), None if state is None else state | dict(ema=ema)

    def average(self, x: Array, ctx: Context, state: State) -> tuple[Array, Array | None]:
        """The moving average with a skip and its activation, `[B, L, D]`, and the state that a recurrence ends in."""
        D, N = self.width, self.ema
        shape, axes = (1 if self.causal else 2, D, N), (None, "inner", None)
        alpha, delta = (
            nn.sigmoid(self.weight(n, nn.initializers.normal(0.2), shape, axes)) for n in ("alpha", "delta")
        )
        beta = self.weight("beta", signs, shape, axes)
        eta = self.weight("eta", nn.initializers.normal(N**-0.5), shape, axes)
        omega = self.weight("omega", nn.initializers.normal(1.0), (D,), ("inner",))
        systems = [ema_system(*one) for one in zip(alpha, delta, beta, eta, strict=True)]
        u, ctx = without_end(x.astype(wide(self.dtype)), ctx)
        form = "sequential" if self.implementation == "reference" else None
        if state is None and ctx.segments is None and form is None:
            y, h = convolved(systems, u), None
        else:
            y, h = recurred(systems, u, self.empty(len(x)) if state is None else state["ema"], ctx, form)
        return nn.silu(y + omega * u).astype(self.dtype), h

    def attention(
        self, position: Position, q: Array, k: Array, v: Array, ctx: Context, state: State
    ) -> tuple[Array, State]:
        """What queries find, `[B, L, 1, V]`, and the cache."""
        (B, L), c = q.shape[:2], self.chunk
        bias = added([self.own_bias(), ctx.bias if position.shares else position.bias(1, self.causal)], c)
        call = dict(mask=CAUSAL if self.causal else FULL, bias=bias, scale=None if self.attend == "softmax" else 1.0)
        if state is not None:
            seen, places, state = remember(self.cache, ctx, state, k=k, v=v)
            k, v, call = seen["k"], seen["v"], call | places
        elif c is None or (ctx.segments is not None and not ctx.right_padded):
            at = ctx.positions  # of documents; chunks are theirs, not the row's
            call |= whole_row(ctx, call) | ({} if c is None else dict(q_positions=at, k_positions=at))
        else:  # each chunk is a row
            c = min(c, L)
            segments = jnp.ones((B, L), jnp.int32) if ctx.segments is None else ctx.segments
            if not self.causal and (L % c or ctx.segments is not None):
                segments = in_chunks(segments, c)
                call |= dict(q_segments=segments, k_segments=segments, right_padded=True)
            q, k, v = (in_chunks(one, c) for one in (q, k, v))
            return self.look(q, k, v, call).reshape(B, -1, 1, v.shape[-1])[:, :L], None
        if c is not None:
            call["mask"] = call["mask"] & Chunk(c)
        return self.look(q, k, v, call), state

    def look(self, q: Array, k: Array, v: Array, call: dict[str, Any]) -> Array:
        softmax, form = self.attend == "softmax", self.implementation
        if self.looked_into():
            weights = attention_weights if softmax else laplace_attention.laplace_weights
            self.sow("maps", "weights", weights(q, k, v, **call))
        # No fused kernel has a bias like this one, and where devices share the length the op knows best.
        if form is None and call["bias"] and q.shape[1] * k.shape[1] >= MANY and stretches(q.shape[1]) == 1:
            form = "tiled"
        run = attention if softmax else laplace_attention.laplace_attention
        return run(q, k, v, **call, implementation=form)

    def own_bias(self) -> Bias | None:
        if self.bias == "none":
            return None
        if self.bias == "rotary":
            ends = self.weight("bias_ends", nn.initializers.normal(0.02), (2, self.qk_dim), (None, None))
            return Bias(params=ends, fn=rotary_bias, axes=(None, None))
        n = self.reach if self.chunk is None else min(self.reach, self.chunk)
        table = self.weight("bias_table", nn.initializers.normal(0.02), (2 * n - 1,), (None,))
        return Bias(params=table, fn=simple_bias, axes=(None,))

    def check(self, position: Position) -> None:
        position.check(self.qk_dim)
        if self.bias == "rotary" and self.qk_dim % 2:
            raise UserError(
                f"model.mega.qk_dim {self.qk_dim} is odd, and the rotary bias turns pairs; closest: {self.qk_dim + 1}"
            )
        if self.attend == "laplace" and self.implementation not in (None, *laplace_attention.IMPLEMENTATIONS):
            raise UserError(
                f"attention implementation {self.implementation!r} cannot serve laplace attention; allowed: None, "
                f"{', '.join(laplace_attention.IMPLEMENTATIONS)}"
            )

    @property
    def cache(self) -> Cache:
        entries = (("k", (1, self.qk_dim)), ("v", (1, self.v_dim or 2 * self.width)))
        return Full(entries, self.dtype) if self.chunk is None else Ring(entries, self.dtype, self.chunk)

    def init_state(self, batch: int, max_len: int) -> State:
        return self.cache.open(batch, max_len) | dict(ema=self.empty(batch))

    def empty(self, batch: int) -> Array:
        """The moving average of nothing."""
        return jnp.zeros((batch, self.width, self.ema), wide(self.dtype))

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length) + self.width * self.ema * jnp.dtype(wide(self.dtype)).itemsize
