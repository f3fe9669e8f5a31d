"""What state spaces share: `x' = A x + B u`, `y = C x + D u`, made discrete, run and read.

A is kept as its modes. Those of a real system come in conjugate pairs: of N modes, N/2 are kept, and each stands for
its pair with twice its real part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import Context, Mixer, State, wide
from model.documents import looking_back, neighbours, reverse
from model.errors import UserError
from model.layers import dense
from model.ops.conv import Kernel, conv_tail, cut, long_conv, whole_conv, window_conv
from model.ops.scan import IMPLEMENTATIONS as SCANS
from model.ops.scan import diagonal_scan
from model.ops.turns import float_turns, times
from model.settings import WIDEST, Length, Positive, even, within

Array = jax.Array
Convolve = Callable[..., Array]  # by `whole_conv` or `window_conv`


def zoh(A: Array, dt: Array) -> tuple[Array, Array]:
    """Zero-order hold of `x' = A x + u`: the logarithm of the discrete A, and the discrete B."""
    return dt * A, jnp.expm1(dt * A) / A


def bilinear(A: Array, dt: Array) -> tuple[Array, Array]:
    """The trapezoidal rule: A becomes `(1 + dt A / 2) / (1 - dt A / 2)`, here too as its logarithm."""
    half = dt * A / 2
    return jnp.log1p(half) - jnp.log1p(-half), dt / (1 - half)


# Of diagonal systems. The logarithm, since it gives powers of A that are as good at long lags as at short ones.
DISCRETISATIONS = {"zoh": zoh, "bilinear": bilinear}


SHORT = 64  # lags up to which a plain product rounds a phase no worse than its factors are


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def powers(log_A: Array, L: int, every: int = 1) -> Array:
    """`A^0, ..., A^(L-1)`, `[L, ...]`, or those of A to the power of `every`.

    Where A hardly decays, its phase at long lags is to be had only without the whole turns.
    """
    check_length(L)
    lags = lags_of(log_A, L, every)
    size = jnp.exp(log_A.real * lags)
    phase = times(lags, float_turns(log_A.imag)) if every * L > SHORT else log_A.imag * lags
    return jax.lax.complex(size * jnp.cos(phase), size * jnp.sin(phase))


@powers.defjvp
def powers_tangent(L, every, primals, tangents):
    (log_A,), (d_log_A,) = primals, tangents
    result = powers(log_A, L, every)
    return result, result * (lags_of(log_A, L, every) * d_log_A)


def lags_of(log_A: Array, L: int, every: int) -> Array:
    return every * jnp.arange(L, dtype=jnp.int32).reshape(L, *[1] * log_A.ndim)


def impulse(w: Array, log_A: Array, L: int) -> Array:
    """`Re sum_n w_n A_n^l` for l below L, `[L, D]`; w, log_A: [D, N].

    With l = i c + j and c about the root of L, it is a product of matrices, of `w A^(i c)` and `A^j`: no power is held
    for each of L lags.
    """
    c = 1 << L.bit_length() // 2
    far, near = w * powers(log_A, -(-L // c), every=c), powers(log_A, c)
    product = partial(jnp.einsum, "idn,jdn->ijd", precision="highest")
    return (product(far.real, near.real) - product(far.imag, near.imag)).reshape(-1, w.shape[0])[:L]


def diagonal_recurrence(
    A: Array,
    B: Array,
    C: Array,
    write: Callable[[Array, Array], Array],
    read: Callable[[Array, Array], Array],
    u: Array,
    h0: Array,
    ctx: Context,
    implementation: str | None,
) -> tuple[Array, Array]:
    """`h_t = A h_{t-1} + write(u_t, B)`, `y_t = read(h_t, C)`, `[B, L, D]`, and the last state.

    A document starts from an empty state, and padding leaves the state as it is.
    """

    def expand(x, A, B, C):
        b = write(x["u"], B)
        a = jnp.broadcast_to(A, b.shape)
        if "real" in x:
            real, opens = (x[name].reshape(*b.shape[:2], *[1] * A.ndim) for name in ("real", "opens"))
            a = jnp.where(real, jnp.where(opens, 0, a), 1)
            b = jnp.where(real, b, 0)
        return a, b

    def contract(h, x, A, B, C):
        return read(h, C)

    return diagonal_scan(expand, contract, h0, dict(u=u) | boundaries(ctx), (A, B, C), implementation=implementation)


def boundaries(ctx: Context) -> dict[str, Array]:
    """What a recurrence must know of documents, `[B, L]` each; nothing where there is one a row."""
    if ctx.segments is None:
        return {}
    return dict(real=ctx.segments > 0, opens=ctx.positions == 0)


class System(NamedTuple):
    """A state space with its parameters, in two forms that are equal; in one, where tokens change the system."""

    convolution: Callable[[Array, Array, Convolve], Array] | None  # u [B, L, D], the inputs before it, how -> y
    recurrence: Callable[[Array, Array, Context, str | None], tuple[Array, Array]]  # u, h0, ctx, form -> y, last state
    kernel: tuple[Kernel, tuple[Array, ...]] | None = None  # of each channel alone, and its weights; None: they mix


def of_channels(kernel: Kernel, weights: tuple[Array, ...], recurrence: Callable) -> System:
    """A system of each channel alone: the convolution is one with a kernel."""
    return System(lambda u, past, convolve: convolve(u, past, kernel, weights), recurrence, (kernel, weights))


def convolved(systems: Sequence[System], u: Array) -> Array:
    """The outputs of inputs that have nothing before them, of one system forward or of another backward as well."""
    forward, *backward = systems
    if backward and forward.kernel is not None:
        return long_conv(u, *forward.kernel, ahead=backward[0].kernel[1])
    y = forward.convolution(u, u[:, :0], whole_conv)
    for system in backward:
        y = y + system.convolution(u[:, ::-1], u[:, :0], whole_conv)[:, ::-1]
    return y


def recurred(systems: Sequence[System], u: Array, h0: Array, ctx: Context, form: str | None) -> tuple[Array, Array]:
    """The same where something is carried or reset, and the forward system's last state."""
    forward, *backward = systems
    y, h = forward.recurrence(u, h0, ctx, form)
    for system in backward:
        back, _ = system.recurrence(u[:, ::-1], h0, reverse(ctx), form)
        y = y + back[:, ::-1]
    return y, h


def without_end(x: Array, ctx: Context) -> tuple[Array, Context]:
    """Rows with zeros for the padding behind them, which so need not be told of it.

    Zeros leave an empty state empty, from whichever side.
    """
    if ctx.segments is None or not ctx.right_padded:
        return x, ctx
    return jnp.where(ctx.segments[..., None] > 0, x, 0), looking_back(ctx)


def windowed(system: System, W: int) -> System:
    """The same with a kernel that is zero from lag W on. That needs no state but the last inputs."""

    def recurrence(u, past, ctx, form):
        if form is not None:
            raise UserError(
                f"implementation {form!r} is of a recurrence, and a kernel cut to window {W} has none; "
                "allowed: None, convolution"
            )
        reach, real = neighbours(ctx)
        y = system.convolution(u, past, partial(window_conv, W=W, reach=reach, real=real))
        return y, conv_tail(u, past, real)

    kernel = None if system.kernel is None else (cut(system.kernel[0], W), system.kernel[1])
    return System(lambda u, past, convolve: system.convolution(u, past, partial(convolve, W=W)), recurrence, kernel)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def activated(y: Array, u: Array, skip: Array, dtype: Any) -> Array:
    return nn.gelu(y + skip * u).astype(dtype)


@partial(jax.checkpoint, prevent_cse=False)
def gated(pair: Array) -> Array:
    """GLU: values `[..., 0, D]` times what gates `[..., 1, D]` let through."""
    value, gate = jnp.moveaxis(pair, -2, 0)
    return value * nn.sigmoid(gate)


class StateSpace(Mixer):
    """A state space and what surrounds it: if bidirectional a backward scan, the skip D, GELU, a gated output."""

    state: Annotated[int, within(2, WIDEST), even] = 64  # N, real size; half as many complex modes
    implementation: Literal["convolution", *SCANS] | None = None  # None picks

    convolves: ClassVar[bool] = True  # whether None picks the convolution where nothing is carried or reset

    def systems(self) -> list[System]:
        """Declares the parameters; one system forward and, if the model is bidirectional, one backward: or one that
        is read both ways."""
        raise NotImplementedError

    def state_shape(self) -> tuple[int, ...]:
        """Of one row's state: a state space per channel, unless a mixer says otherwise."""
        return self.width, self.state // 2

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        self.check_direction(state)
        systems = self.systems()
        skip = self.weight("D", nn.initializers.normal(1.0), (self.width,), ("inner",))

        u, ctx = without_end(x.astype(wide(self.dtype)), ctx)
        y, state = self.mix(systems, u, ctx, state)
        out = dense((2, self.width), ("embed", None, "mlp"), self.dtype, "out", bias=True)
        return gated(out(activated(y, u, skip, self.dtype))), state

    def mix(self, systems: Sequence[System], u: Array, ctx: Context, state: State) -> tuple[Array, State]:
        """A convolution where nothing is carried or reset, else the recurrence; of the second system backward."""
        if self.transforms(ctx, state):
            return convolved(systems, u), None
        h0 = self.init_state(u.shape[0], 0) if state is None else state
        y, h = recurred(systems, u, h0, ctx, self.implementation)
        return y, None if state is None else h

    def transforms(self, ctx: Context, state: State) -> bool:
        """Whether it runs as a convolution with a kernel as long as the rows."""
        plain = state is None and ctx.segments is None
        if self.implementation == "convolution" and not plain:
            raise UserError(
                f"{self.label}'s convolution cannot carry a state or reset at documents; set implementation=None"
            )
        return self.implementation == "convolution" or (self.implementation is None and plain and self.convolves)

    def modes(self, name: str, start: np.ndarray, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
        """Complex numbers that never grow: the real part is minus an exponential."""
        real = self.weight(f"{name}_real", filled(np.log(-start.real)), shape, axes)
        return jax.lax.complex(-jnp.exp(real), self.weight(f"{name}_imag", filled(start.imag), shape, axes))

    def readout(self, name: str, init: Callable, axes: tuple[str | None, str | None]) -> Array:
        """A complex C for each direction, `[1 or 2, D, N]`."""
        shape = (1 if self.causal else 2, 2, self.width, self.state // 2)
        return paired(self.weight(name, init, shape, (None, None, *axes)), axis=1)

    def check(self) -> None:
        """Refuses settings that do not go together."""

    def init_state(self, batch: int, max_len: int) -> State:
        return jnp.zeros((batch, *self.state_shape()), jnp.result_type(wide(self.dtype), jnp.complex64))

    def state_bytes(self, length: int) -> int:
        return 2 * int(np.prod(self.state_shape())) * jnp.dtype(wide(self.dtype)).itemsize


class Invariant(StateSpace):
    """A state space that is the same at every token, and so a convolution, whose kernel may be cut to a window."""

    window: Length | None = None  # a token sees those less than this far away; None: all

    def mix(self, systems: Sequence[System], u: Array, ctx: Context, state: State) -> tuple[Array, State]:
        if self.window is not None:
            systems = [windowed(system, self.window) for system in systems]
        return super().mix(systems, u, ctx, state)

    def init_state(self, batch: int, max_len: int) -> State:
        if self.window is None:
            return super().init_state(batch, max_len)
        return jnp.zeros((batch, self.seen(max_len), self.width), wide(self.dtype))

    def state_bytes(self, length: int) -> int:
        if self.window is None:
            return super().state_bytes(length)
        return self.seen(length) * self.width * jnp.dtype(wide(self.dtype)).itemsize

    def seen(self, length: int) -> int:
        """How many of so many inputs the next token sees."""
        return min(self.window - 1, length)


class Continuous(Invariant):
    """A state space in continuous time, made discrete by steps that are learned."""

    dt_min: Positive = 0.001
    dt_max: Positive = 0.1

    def steps(self, n: int) -> Array:
        """dt, `[n]`: between the two before training, all scales alike."""
        return jnp.exp(self.weight("log_dt", log_uniform(self.dt_min, self.dt_max), (n,), ("inner",)))


def filled(values: np.ndarray | float) -> nn.initializers.Initializer:
    """These values, repeated over the leading axes."""
    return lambda key, shape, dtype: jnp.broadcast_to(jnp.asarray(values, dtype), shape)


def log_uniform(dt_min: float, dt_max: float) -> nn.initializers.Initializer:
    """The logarithm of step sizes between these two, all scales alike."""
    if dt_min > dt_max:
        raise UserError(f"dt_min {dt_min} must be at most dt_max {dt_max}; closest: {dt_max}")
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, np.log(dt_min), np.log(dt_max))


def paired(x: Array, axis: int = 0) -> Array:
    """A complex array from its real and imaginary parts, the two entries of an axis."""
    return jax.lax.complex(*jnp.moveaxis(x, axis, 0))


def check_length(L: int) -> None:
    if L < 1:
        raise UserError(f"a convolution kernel of length {L} was asked for; it needs at least 1")
