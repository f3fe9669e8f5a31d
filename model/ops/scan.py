"""Diagonal linear recurrences `h_t = a_t h_{t-1} + b_t`, with what makes and reads the states kept inside the scan.

`diagonal_scan` expands inputs to transitions and contracts states to outputs chunk by chunk, so the states, which
are N times larger than inputs and outputs, need never exist for the whole length at once.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model import placement
from model.errors import UserError, choose
from model.ops.fused import needs_unmet, refuse
from model.ops.named import running
from model.ops.stepped_selective import stepped_selective
from model.ops.stretches import Share, handed_on, on_stretches, stretches

Array = jax.Array
Inputs = Any  # a pytree of arrays whose first two axes are batch and length, in either order
Expand = Callable[..., tuple[Array, Array]]  # (inputs, *shared) -> a, b with the state's axes behind those two
Contract = Callable[..., Array]  # (states, inputs, *shared) -> outputs


def serial(a: Array, b: Array, h0: Array) -> Array:
    """All states, `[L, B, ...]`, one after another."""
    return lax.scan(lambda h, x: (h := x[0] * h + x[1], h), h0, (a, b))[1]


def parallel(a: Array, b: Array, h0: Array) -> Array:
    """All states, `[L, B, ...]`, in log(L) rounds."""

    def combine(first, second):  # two steps as one: associative, which is what lets the scan run in parallel
        (a1, b1), (a2, b2) = first, second
        return a2 * a1, a2 * b1 + b2

    products, states = lax.associative_scan(combine, (a, b))
    return states + products * h0


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def states_of(method: Callable, a: Array, b: Array, h0: Array) -> Array:
    """All states by `serial` or `parallel`. The gradient is the same kind of scan, run backwards in time."""
    return method(a, b, h0)


def states_forward(method, a, b, h0):
    h = method(a, b, h0)
    return h, (a, h, h0)


def states_backward(method, saved, g):
    a, h, h0 = saved
    later = jnp.concatenate([a[1:], jnp.zeros_like(a[:1])])
    total = method(later[::-1], g[::-1], jnp.zeros_like(h0))[::-1]
    before = jnp.concatenate([h0[None], h[:-1]])
    return total * before, total, a[0] * total[0]


states_of.defvjp(states_forward, states_backward)


def sequential(expand: Expand, contract: Contract, h0: Array, inputs: Inputs, chunk: int) -> tuple[Array, Array]:
    """One token after another, made, applied and read: the definition."""

    def step(h, x):
        x = jax.tree.map(lambda leaf: leaf[None], x)
        a, b = expand(x)
        h = a[0] * h + b[0]
        return h, contract(h[None], x)[0]

    h, y = lax.scan(step, h0, inputs)
    return y, h


def whole(
    expand: Expand, contract: Contract, h0: Array, inputs: Inputs, chunk: int, method: Callable
) -> tuple[Array, Array]:
    """All tokens at once, all states held."""
    states = states_of(method, *expand(inputs), h0)
    return contract(states, inputs), states[-1]


def chunked(
    expand: Expand, contract: Contract, h0: Array, inputs: Inputs, chunk: int, method: Callable
) -> tuple[Array, Array]:
    """One chunk after another; the backward pass recomputes the states of one chunk at a time."""

    def step(h, x, a, b):
        states = states_of(method, a, b, h)
        return states[-1], contract(states, x)

    h, y = over_chunks(step, expand, h0, inputs, chunk)
    return y, h


def over_chunks(step: Callable, expand: Expand, carry: Any, inputs: Inputs, chunk: int) -> tuple[Any, Any]:
    """The last carry and all outputs of `carry, y = step(carry, x, a, b)`, chunk by chunk; only carries are kept."""
    L = jax.tree.leaves(inputs)[0].shape[0]
    if L <= chunk:
        return jax.checkpoint(lambda carry, x: step(carry, x, *expand(x)))(carry, inputs)
    n = -(-L // chunk)
    fill = n * chunk - L

    def in_chunks(leaf):  # [L, ...] -> [n, chunk, ...]
        leaf = jnp.pad(leaf, [(0, fill)] + [(0, 0)] * (leaf.ndim - 1))
        return leaf.reshape(n, chunk, *leaf.shape[1:])

    def body(carry, x):
        x, real = x
        a, b = expand(x)
        if fill:  # fill must leave the state as it was, whatever `expand` makes of zeros
            real = real.reshape(chunk, *[1] * (b.ndim - 1))
            a, b = jnp.where(real, a, 1), jnp.where(real, b, 0)
        return step(carry, x, a, b)

    real = (jnp.arange(n * chunk) < L).reshape(n, chunk)
    carry, y = lax.scan(jax.checkpoint(body, prevent_cse=False), carry, (jax.tree.map(in_chunks, inputs), real))
    return carry, jax.tree.map(lambda leaf: leaf.reshape(n * chunk, *leaf.shape[2:])[:L], y)


def joined(a: Array, b: Array) -> tuple[Array, Array]:
    """All steps `[L, ...]` as one, `h -> a h + b`: neighbours are joined, and then those that came of it."""
    while a.shape[0] > 1:
        if a.shape[0] % 2:
            a, b = (jnp.concatenate([x, jnp.full_like(x[:1], rest)]) for x, rest in ((a, 1), (b, 0)))
        a, b = a[1::2] * a[::2], a[1::2] * b[::2] + b[1::2]
    return a[0], b[0]


def sharded(
    expand: Expand, contract: Contract, h0: Array, inputs: Inputs, shared: tuple[Array, ...], chunk: int
) -> tuple[Array, Array]:
    """Each of the devices that share the length scans its own stretch of it.

    A first pass finds what a stretch does to any state, `h -> products h + ends`; these are all that devices exchange.
    """
    if stretches(jax.tree.leaves(inputs)[0].shape[0]) == 1:
        raise UserError(
            "scan implementation 'sharded' needs devices that share the length evenly; set mesh.sequence above 1"
        )
    method = on_this_platform()

    def stretch(x, others, share):
        h, shared = others
        read, write = bind(expand, shared), bind(contract, shared)

        def join(carry, x, a, b):
            products, ends = carry
            a, b = joined(a, b)
            return (a * products, a * ends + b), ()

        effect, _ = over_chunks(join, read, (jnp.ones_like(h), jnp.zeros_like(h)), x, chunk)
        start, last = handed_on(*effect, h, share)
        return chunked(read, write, start, x, chunk, method)[0], last

    return on_stretches(stretch, inputs, (h0, shared), axis=0)


def bind(function: Callable, shared: tuple[Array, ...]) -> Callable:
    """`function` with its last arguments given."""
    return lambda *args: function(*args, *shared)


def on_this_platform() -> Callable:
    """Few cores gain nothing from a scan that does log(chunk) times the work."""
    return serial if placement.platform() == "cpu" else parallel


IMPLEMENTATIONS = {
    "sequential": sequential,
    "serial": partial(whole, method=serial),
    "associative": partial(whole, method=parallel),
    "chunked": partial(chunked, method=parallel),
    "chunked_serial": partial(chunked, method=serial),
    "sharded": sharded,  # over the devices that share the length
}


LINEAR = (*IMPLEMENTATIONS, "fused")  # of the linear scan
SELECTIVE = (*IMPLEMENTATIONS, "stepped", "fused")  # of the selective scan


def diagonal_scan(
    expand: Expand,
    contract: Contract,
    h0: Array,
    inputs: Inputs,
    shared: tuple[Array, ...] = (),
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Outputs `[B, L, ...]` and the last state, for the recurrence that `expand` and `contract` describe.

    Both see arrays `[L, B, ...]`: time leads inside the scan. Arrays that are the same at every step come to them as
    `shared`, not by closure: devices that share the length could not differentiate what they close over. h0: [B, E,
    ...] with inner channels E, whatever a channel holds.
    """
    inputs = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), inputs)
    length, state = jax.tree.leaves(inputs)[0].shape[0], bytes_held(h0)
    implementation = implementation or best(length, state)
    chunk = best_chunk(state)
    run = choose("scan implementation", implementation, IMPLEMENTATIONS)
    with running("scan", implementation):
        if run is sharded:
            y, h = sharded(expand, contract, h0, inputs, shared, chunk)
        else:
            y, h = run(bind(expand, shared), bind(contract, shared), h0, inputs, chunk)
    return jnp.swapaxes(y, 0, 1), h


def bytes_held(h0: Array) -> int:
    """Of a state, what one device holds."""
    return math.prod(placement.held(("batch", "inner"), h0.shape[:2])) * math.prod(h0.shape[2:]) * h0.dtype.itemsize


FEW = 2**29  # bytes of states that a device may hold, which is faster
CHUNK = 64  # tokens, on a CPU


def best(length: int, state: int) -> str:
    """The implementation that `None` picks for a state of that many bytes: the fastest that does not hold many of them.

    Mamba's scan, forward and with gradient: on 2 CPU cores, serial chunks took about half the time of parallel ones;
    on an H200 (8 rows of 2,048, 2,048 channels, 16 numbers each) parallel chunks took 6.9 and 37 ms in 0.75 GiB, the
    whole length at once 6.6 and 20 ms in 10 GiB. Of states of 512 MiB (128 rows of 256, 256 channels) chunks took 1.6
    and 20 ms in 0.76 GiB, the whole 1.5 and 12 ms in 2.5 GiB. A TPU, which has less memory, gets chunks.
    """
    if length == 1:
        return "sequential"
    if stretches(length) > 1:
        return "sharded"
    few = length * state <= FEW
    if on_this_platform() is serial:
        return "serial" if few and length <= CHUNK else "chunked_serial"
    return "associative" if few and placement.platform() == "gpu" else "chunked"


def best_chunk(state: int) -> int:
    """Tokens of a chunk, for a state of that many bytes: on a GPU as many as make 64 MiB.

    Mamba's scan with gradient on an H200, 2,048 channels: 8 rows of 2,048 took 37 ms in chunks of 64 (41 in chunks of
    32, 84 of 128), 2 rows of 8,192 37 ms in chunks of 256 (48 of 64, 78 of 512), and one row of 65,536 273 ms in chunks
    of 512 (359 of 64, 248 of 1,024).
    """
    if on_this_platform() is serial:
        return CHUNK
    return min(max(64, 2**26 // state // 64 * 64), 512)


def linear_kernels_lack(a: Array, b: Array, h0: Array) -> list[str]:
    """Why the kernels of the linear scan cannot serve a call; empty if they can."""
    reasons = needs_unmet(b, dtypes=("float32",))
    if not a.dtype == b.dtype == h0.dtype:
        reasons.append(f"a of {a.dtype} and a first state of {h0.dtype} beside b of {b.dtype}")
    return reasons


def linear_scan(a: Array, b: Array, h0: Array, *, implementation: str | None = None) -> tuple[Array, Array]:
    """All states `[B, L, E, ...]` of `h_t = a_t h_{t-1} + b_t`, and the last one.

    a, b: [B, L, E, ...]; h0: [B, E, ...]. Implementations are those of `diagonal_scan`, and `fused`, kernels for GPUs:
    on an H200 a row of 1,048,576 tokens, 256 channels, took 1.5 ms and 3.4 with gradient, where chunks took 27 and 106.
    """
    if implementation is None and b.shape[1] > 1 and not linear_kernels_lack(a, b, h0):
        implementation = "fused"
    if implementation == "fused":
        refuse("scan", linear_kernels_lack(a, b, h0))
        from model.ops.fused_linear import fused_linear  # here: Pallas takes a second to load

        with running("scan", implementation):
            return fused_linear(a, b, h0)
    return diagonal_scan(lambda x: x, lambda h, x: h, h0, (a, b), implementation=implementation)


def kernels_lack(x: Array, A: Array) -> list[str]:
    """Why the kernels of the selective scan cannot serve a call; empty if they can."""
    reasons, (E, N) = needs_unmet(x), A.shape
    if placement.held(("inner",), (E,))[0] % 32 or N & (N - 1):
        reasons.append(f"{E} channels of {N} numbers (it takes multiples of 32 on a device, of a power of two)")
    return reasons


def stepped(tokens: Inputs, others: tuple[Array, Array], share: Share | None, chunk: int) -> tuple[Array, Array]:
    """On each of the devices that share the length; a first walk finds what its stretch does to any state."""
    (x, dt, B, C, keep), (A, h0) = tokens, others

    def walk(h: Array) -> tuple[Array, Array]:
        return stepped_selective(x, dt, A, B, C, h, keep, chunk)

    if share is None:
        return walk(h0)
    left = jnp.exp(jnp.sum(dt, axis=1)[..., None] * A)
    if keep is not None:
        left *= jnp.min(keep, axis=1)[:, None, None]
    start, last = handed_on(left, walk(jnp.zeros_like(h0))[1], h0, share)
    return walk(start)[0], last


def selective_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    h0: Array,
    keep: Array | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Mamba's recurrence (https://arxiv.org/abs/2312.00752), `y_t = C_t h_t`, `[B, L, E]`, and the last state.

    `h_t = keep_t exp(dt_t A) h_{t-1} + dt_t B_t x_t` with x, dt: [B, L, E]; A: [E, N]; B, C: [B, L, N];
    h0: [B, E, N]; keep: [B, L], 0 where the past is forgotten. A step with dt = 0 leaves the state as it was. dt, A and
    h0 are wide; x, B and C may be narrow, and y is then of x's dtype, rounded once.
    Implementations are those of `diagonal_scan`, and two of its own: `stepped`, which a CPU gets (with gradient it took
    0.3 to 0.5 of the time of serial chunks, at 64 rows of 16 and at 4 of 1,024), and `fused`, kernels for GPUs.
    """
    if implementation is None and x.shape[1] > 1:
        cpu = placement.platform() == "cpu"
        implementation = "stepped" if cpu else None if kernels_lack(x, A) else "fused"
    if implementation == "stepped":
        # The gradient holds a chunk's states and decays: 2 MiB of each, so that they stay in the cache.
        chunk = min(max(4, 2**21 // bytes_held(h0)), CHUNK)
        with running("scan", implementation):
            return on_stretches(partial(stepped, chunk=chunk), (x, dt, B, C, keep), (A, h0))
    if implementation == "fused":
        refuse("scan", kernels_lack(x, A))
        from model.ops.fused_selective import fused_selective  # here: Pallas takes a second to load

        with running("scan", implementation):
            return fused_selective(x, dt, A, B, C, h0, keep)

    def expand(inputs, A):
        a = jnp.exp(inputs["dt"][..., None] * A)
        if keep is not None:
            a = a * inputs["keep"][..., None, None]
        return a, (inputs["dt"] * inputs["x"])[..., None] * inputs["B"][..., None, :]

    def contract(h, inputs, A):
        return jnp.sum(h * inputs["C"][..., None, :], axis=-1)

    inputs = dict(x=x, dt=dt, B=B, C=C)
    if keep is not None:
        inputs["keep"] = keep.astype(dt.dtype)
    y, h = diagonal_scan(expand, contract, h0, inputs, (A,), implementation=implementation)
    return y.astype(x.dtype), h
