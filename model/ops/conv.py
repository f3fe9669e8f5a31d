"""Causal convolutions along the length: long ones by FFT, short depthwise ones directly."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from model import placement
from model.ops.fused import needs_unmet
from model.ops.stretches import by_channels, of_earlier, on_stretches

TOKENS = ("batch", "length", "inner")  # of what is convolved

Kernel = Callable[..., jax.Array]  # weights, L -> [L, D]


def long_conv(
    u: jax.Array,
    kernel: Kernel,
    weights: tuple[jax.Array, ...],
    ahead: tuple[jax.Array, ...] = (),
    shared: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """The convolution of u `[B, L, D]` with `kernel(*weights, *shared, L)`, `[L, D]`.

    Weights have channels in front; what is shared is the same for all channels. Given other weights to look ahead
    with, their kernel's over the tokens that follow is added. Devices that share the length share channels here,
    kernels included: a transform needs all tokens.
    """

    def run(u, *arrays):
        both, common = arrays[: len(arrays) - len(shared)], arrays[len(arrays) - len(shared) :]
        back, ahead = (kernel(*part, *common, u.shape[1]) if part else None for part in (both[:n], both[n:]))
        return (fft_conv(u, back, ahead),)

    n, both = len(weights), (*weights, *ahead)
    (y,) = by_channels(run, (u, *both, *shared), (TOKENS, *axes_of(both, shared)), (TOKENS,))
    return y


def axes_of(weights: tuple[jax.Array, ...], shared: tuple[jax.Array, ...]) -> list[tuple[str | None, ...]]:
    """Of weights that have channels in front, and of others."""
    return [("inner", *[None] * (leaf.ndim - 1)) for leaf in weights] + [(None,) * leaf.ndim for leaf in shared]


def cut(kernel: Kernel, W: int) -> Kernel:
    """The same kernel, zero from lag W on."""

    def short(*made):
        *weights, L = made
        return jnp.pad(kernel(*weights, min(W, L)), [(0, max(L - W, 0)), (0, 0)])

    return short


def whole_conv(
    u: jax.Array, past: jax.Array, kernel: Kernel, weights: tuple[jax.Array, ...], *, W: int | None = None
) -> jax.Array:
    """`long_conv` behind an empty past; given W, with a kernel that is zero from that lag on."""
    return long_conv(u, kernel if W is None else cut(kernel, W), weights)


def window_conv(
    u: jax.Array,
    past: jax.Array,
    kernel: Kernel,
    weights: tuple[jax.Array, ...],
    *,
    W: int,
    reach: jax.Array | None = None,
    real: jax.Array | None = None,
) -> jax.Array:
    """The same, one lag after another: behind any number of inputs and in documents.

    past: [B, P, D], the last inputs, zeros where there were fewer; reach, real: as `short_conv` has them.
    """
    W = min(W, past.shape[1] + u.shape[1])
    past = jnp.pad(past, [(0, 0), (W - 1, 0), (0, 0)])[:, past.shape[1] :]

    def convolve(x, past, reach, taps):
        window = jnp.concatenate([past, x], axis=1)

        @partial(jax.checkpoint, prevent_cse=False)  # else what each lag sees is kept for the gradient
        def add(y, at):
            lag, tap = at
            seen = lax.dynamic_slice_in_dim(window, W - 1 - lag, x.shape[1], axis=1)
            if reach is not None:
                seen = jnp.where((reach >= lag)[..., None], seen, 0)
            return y + tap * seen, None

        return lax.scan(add, jnp.zeros_like(x), (jnp.arange(W), taps))[0]

    return skipping(convolve, u, past, reach, real, kernel(*weights, W))


def fft_conv(u: jax.Array, kernel: jax.Array, ahead: jax.Array | None = None) -> jax.Array:
    """`y_t = sum_s kernel_s u_{t-s}` per channel; u: [B, L, D], kernel: [L, D], both real or both complex.

    With another kernel to look ahead with, where they are real, `sum_s ahead_s u_{t+s}` is added.
    """
    if jnp.iscomplexobj(u):
        L = u.shape[1]
        n = 2 * L  # room for the tail, so that it does not wrap around
        return jnp.fft.ifft(jnp.fft.fft(u, n=n, axis=1) * jnp.fft.fft(kernel, n=n, axis=0), axis=1)[:, :L]
    return right_angle_conv(u, kernel, ahead)


def right_angle_conv(u: jax.Array, kernel: jax.Array, ahead: jax.Array | None = None) -> jax.Array:
    """The same for real arrays, by transforms of length L where zeros would make it 2L.

    Turned by up to a right angle along the length, the tail wraps around as imaginary numbers, and the real part is
    the answer (Crandall and Fagin 1994, https://doi.org/10.1090/S0025-5718-1994-1185244-1). A kernel that looks ahead
    has the conjugate spectrum, so both directions are one product.
    """
    L = u.shape[1]
    # A constant: the compiler would make it anew for every channel.
    turn = np.exp(0.5j * np.pi / L * np.arange(L)).astype(jnp.result_type(u, jnp.complex64))

    # Transforms run along the last axis. Of two axes alone, a CPU gets the kernel the wrong way round (jax 0.10, where
    # devices share the length), hence three.
    def turned(x):
        return transform(jnp.swapaxes(x, 1, 2) * turn)

    spectrum = turned(kernel[None])
    if ahead is not None:
        spectrum = spectrum + jnp.conj(turned(ahead[None]))
    product = turned(u) * spectrum
    # The inverse by the forward transform: conjugates and scale cost nothing beside it.
    return jnp.swapaxes(jnp.real(transform(jnp.conj(product)) * turn) / L, 1, 2)


def transform(x: jax.Array) -> jax.Array:
    """Fourier transform along the last axis, of an array whose numbers lie in the order of its axes.

    A CPU's compiler may have them lie in another, for what comes before or, of gradients, behind, and then it refuses
    its own transform (jax 0.10: RET_CHECK failure, fft_thunk.cc).
    """
    if placement.platform() != "cpu":
        return jnp.fft.fft(x)
    in_order = Layout(major_to_minor=tuple(range(x.ndim)))
    return with_layout_constraint(jnp.fft.fft(with_layout_constraint(x, in_order)), in_order)


def short_conv(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    past: jax.Array,
    reach: jax.Array | None = None,
    real: jax.Array | None = None,
) -> jax.Array:
    """Depthwise causal convolution, `[B, L, E]`; kernel: [W, E] with its last row for the current token; bias: [E].

    past: [B, W-1, E], the inputs before these. reach: [B, L], how far back each token may look; None: to the end.
    real: [B, L] bool, false at padding, which nobody sees and which gets zero. Summed in the dtype of kernel and bias,
    and rounded to that of x.
    """

    @jax.checkpoint  # else the wide copies of x are kept for the gradient, which takes no more than x and the kernel
    def convolve(x, past, reach, kernel, bias):
        return taps(x, past, reach, kernel, bias).astype(x.dtype)

    return skipping(convolve, x, past, reach, real, kernel, bias)


def short_conv_silu(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    past: jax.Array,
    reach: jax.Array | None = None,
    real: jax.Array | None = None,
) -> jax.Array:
    """SiLU of `short_conv`, rounded once. The gradient makes what is activated anew, which would be kept otherwise.

    A CPU keeps it: made anew, a step of a small Mamba-2 took 1.12 to 1.18 of the time. GPUs get kernels, on devices
    that share the length too: each has the tokens before its own by then.
    """

    def activated(sums):
        return lambda x, *others: jax.nn.silu(sums(x, *others)).astype(x.dtype)

    cpu = placement.platform() == "cpu"
    plain = activated(jax.checkpoint(taps)) if cpu else jax.checkpoint(activated(taps))

    def convolve(x, past, reach, kernel, bias):
        if not kernels_serve(x, kernel):
            return plain(x, past, reach, kernel, bias)
        from model.ops.fused_conv import fused_conv_silu  # here: Pallas takes a second to load

        return fused_conv_silu(x, kernel, bias, past, reach)

    return skipping(convolve, x, past, reach, real, kernel, bias)


def kernels_serve(x: jax.Array, kernel: jax.Array) -> bool:
    """Whether a GPU's kernels take a call: not of one token, whose sum the compiler joins with what stands around it,
    nor of more taps than registers hold."""
    return x.shape[1] > 1 and 2 <= kernel.shape[0] <= 8 and not needs_unmet(x)


def taps(x: jax.Array, past: jax.Array, reach: jax.Array | None, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """The sums of `short_conv` over rows without padding, in the dtype of kernel and bias."""
    W, L = kernel.shape[0], x.shape[1]
    window = jnp.concatenate([past, x], axis=1)
    y = bias + x * kernel[-1]
    for back in range(1, W):
        shifted = window[:, W - 1 - back : W - 1 - back + L]
        if reach is not None:
            shifted = jnp.where((reach >= back)[..., None], shifted, 0)
        y = y + shifted * kernel[W - 1 - back]
    return y


def shift(x: jax.Array, past: jax.Array, reach: jax.Array | None = None, real: jax.Array | None = None) -> jax.Array:
    """Each token's predecessor, `[B, L, E]`, zero where it has none within reach. past: [B, 1, E]; others as above."""

    def previous(x, past, reach):
        before = jnp.concatenate([past, x[:, :-1]], axis=1)
        return before if reach is None else jnp.where((reach > 0)[..., None], before, 0)

    return skipping(previous, x, past, reach, real)


def conv_tail(x: jax.Array, past: jax.Array, real: jax.Array | None = None) -> jax.Array:
    """The `past` of the next call: the last W-1 inputs, padding left out."""
    if real is None:
        return jnp.concatenate([past, x], axis=1)[:, x.shape[1] :]
    window = jnp.concatenate([past, moved(x, *places(real))], axis=1)
    last = jnp.sum(real, axis=1)[:, None] + jnp.arange(past.shape[1])
    return jnp.take_along_axis(window, last[..., None], axis=1)


def followed(tail1: jax.Array, tail2: jax.Array, n: jax.Array) -> jax.Array:
    """The last tokens of two tails `[B, W-1, E]` in a row, where the last n [B] of the second count."""
    W1 = tail1.shape[1]
    i, n = jnp.arange(W1), n[:, None]
    later = jnp.take_along_axis(tail1, jnp.minimum(i + n, W1 - 1)[..., None], axis=1)
    return jnp.where((i >= W1 - n)[..., None], tail2, later)


def skipping(
    run: Callable[..., jax.Array],
    x: jax.Array,
    past: jax.Array,
    reach: jax.Array | None,
    real: jax.Array | None,
    *weights: jax.Array,
) -> jax.Array:
    """`run(x, past, reach, *weights)`, where tokens look at a few before them, as if there were no padding.

    Real tokens are moved to the front of their rows and back. A device that shares the length does so with its own
    stretch, and learns the few tokens before it from the devices before.
    """

    def combine(first, second):  # the last few tokens, at the end of [B, W-1, E], and how many they are
        (tail1, n1), (tail2, n2) = first, second
        return followed(tail1, tail2, n2), jnp.minimum(n1 + n2, tail1.shape[1])

    def stretch(tokens, others, share):
        x, reach, real = tokens
        past, weights = others
        if share is not None:
            count = jnp.full(x.shape[0], x.shape[1]) if real is None else jnp.sum(real, axis=1)
            mine = conv_tail(x, jnp.zeros_like(past), real), jnp.minimum(count, past.shape[1])
            past = followed(past, *of_earlier(combine, mine, jax.tree.map(jnp.zeros_like, mine), share))
        if real is None:
            return run(x, past, reach, *weights), ()
        there, back = places(real)
        if reach is not None:
            reach = jnp.take_along_axis(reach, jnp.maximum(there, 0), axis=1)
        y = run(moved(x, there, back), past, reach, *weights)
        return moved(y, back, there), ()

    return on_stretches(stretch, (x, reach, real), (past, weights))[0]


def places(real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which token is the j-th real one of its row, -1 beyond the last; and of each token which it is, -1 at padding."""
    B, L = real.shape
    t, row = jnp.broadcast_to(jnp.arange(L), (B, L)), jnp.arange(B)[:, None]
    back = jnp.where(real, jnp.cumsum(real, axis=1) - 1, -1)
    there = jnp.full((B, L), -1).at[row, jnp.where(real, back, L + t)].set(t, mode="drop", unique_indices=True)
    return there, back


@jax.custom_vjp
def moved(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """`x[there]` along the length, zero where that is -1. `back` undoes it, which is the gradient: nothing is added."""
    return jnp.where((there >= 0)[..., None], jnp.take_along_axis(x, jnp.maximum(there, 0)[..., None], axis=1), 0)


def moved_forward(x, there, back):
    return moved(x, there, back), (there, back)


def moved_backward(saved, g):
    there, back = saved
    return moved(g, back, there), None, None


moved.defvjp(moved_forward, moved_backward)
