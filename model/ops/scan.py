"""Diagonal linear recurrences `h_t = a_t h_{t-1} + b_t`, with what makes and reads the states kept inside the scan.

`diagonal_scan` expands inputs to transitions and contracts states to outputs chunk by chunk, so the states, which
are N times larger than inputs and outputs, need never exist for the whole length at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.errors import choose

Array = jax.Array
Inputs = Any  # a pytree of arrays with axes [B, L, ...]
Expand = Callable[[Inputs], tuple[Array, Array]]  # inputs -> a, b, both [B, L, ...state]
Contract = Callable[[Array, Inputs], Array]  # states [B, L, ...state], inputs -> outputs [B, L, ...]


def combine(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two steps of the recurrence as one: associative, which is what lets the scan run in parallel."""
    (a1, b1), (a2, b2) = first, second
    return a2 * a1, a2 * b1 + b2


def sequential(
    expand: Expand, contract: Contract, h0: Array, inputs: Inputs, chunk: int
) -> tuple[Array, Array]:
    """One token after another: the definition."""

    def step(h, x):
        x = jax.tree.map(lambda leaf: leaf[:, None], x)
        a, b = expand(x)
        h = a[:, 0] * h + b[:, 0]
        return h, contract(h[:, None], x)[:, 0]

    h, y = lax.scan(step, h0, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), inputs))
    return jnp.moveaxis(y, 0, 1), h


def associative(
    expand: Expand, contract: Contract, h0: Array, inputs: Inputs, chunk: int
) -> tuple[Array, Array]:
    """All tokens at once through `lax.associative_scan`: log-depth, all states held."""
    a, b = expand(inputs)
    products, states = lax.associative_scan(combine, (a, b), axis=1)
    states = states + products * h0[:, None]
    return contract(states, inputs), states[:, -1]


def chunked(
    expand: Expand, contract: Contract, h0: Array, inputs: Inputs, chunk: int, inner: Callable = associative
) -> tuple[Array, Array]:
    """Chunks in sequence, by `inner` within; the backward pass recomputes the states of one chunk at a time."""
    L = jax.tree.leaves(inputs)[0].shape[1]
    chunk = min(chunk, L)
    n = -(-L // chunk)
    fill = n * chunk - L

    def cut(leaf):  # [B, L, ...] -> [n, B, chunk, ...]
        leaf = jnp.pad(leaf, [(0, 0), (0, fill)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(leaf.reshape(leaf.shape[0], n, chunk, *leaf.shape[2:]), 1, 0)

    def masked(x):  # fill must leave the state as it was, whatever `expand` makes of zeros
        x, real = x
        a, b = expand(x)
        if not fill:
            return a, b
        real = real.reshape(*real.shape, *[1] * (b.ndim - 2))
        return jnp.where(real, a, 1), jnp.where(real, b, 0)

    def step(h, x):
        y, h = inner(masked, lambda states, x: contract(states, x[0]), h, x, chunk)
        return h, y

    real = (jnp.arange(n * chunk) < L).reshape(n, 1, chunk)
    h, y = lax.scan(jax.checkpoint(step, prevent_cse=False), h0, (jax.tree.map(cut, inputs), real))
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], n * chunk, *y.shape[3:])[:, :L], h


IMPLEMENTATIONS = {
    "sequential": sequential,
    "associative": associative,
    "chunked": chunked,
    "chunked_sequential": partial(chunked, inner=sequential),
}


def diagonal_scan(
    expand: Expand,
    contract: Contract,
    h0: Array,
    inputs: Inputs,
    *,
    implementation: str | None = None,
    chunk: int = 64,
) -> tuple[Array, Array]:
    """Outputs `[B, L, ...]` and the last state, for the recurrence that `expand` and `contract` describe."""
    length = jax.tree.leaves(inputs)[0].shape[1]
    if implementation is None:
        # Few cores gain nothing from a scan that does log(chunk) times the work.
        inner = "chunked_sequential" if jax.default_backend() == "cpu" else "chunked"
        implementation = "sequential" if length == 1 else inner
    return choose("scan implementation", implementation, IMPLEMENTATIONS)(expand, contract, h0, inputs, chunk)


def linear_scan(a: Array, b: Array, h0: Array, *, implementation: str | None = None) -> tuple[Array, Array]:
    """All states `[B, L, ...]` of `h_t = a_t h_{t-1} + b_t`, and the last one."""
    return diagonal_scan(lambda x: x, lambda h, x: h, h0, (a, b), implementation=implementation)


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
    h0: [B, E, N]; keep: [B, L], 0 where the past is forgotten. A step with dt = 0 leaves the state as it was.
    """

    def expand(inputs):
        a = jnp.exp(inputs["dt"][..., None] * A)
        if keep is not None:
            a = a * inputs["keep"][:, :, None, None]
        return a, (inputs["dt"] * inputs["x"])[..., None] * inputs["B"][:, :, None]

    def contract(h, inputs):
        # Not an einsum: a product and a sum fuse with the scan's last pass, a batch of tiny matrix products does not.
        return jnp.sum(h * inputs["C"][:, :, None], axis=-1)

    inputs = dict(x=x, dt=dt, B=B, C=C)
    if keep is not None:
        inputs["keep"] = keep.astype(dt.dtype)
    return diagonal_scan(expand, contract, h0, inputs, implementation=implementation)
