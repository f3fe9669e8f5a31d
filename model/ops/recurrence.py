"""A state that is multiplied by a map at every token, one token after another: RNN, LSTM, GRU and sLSTM.

A cell is a pure function of the state before a token and of what the token and that state say to each of its G gates,
x and `u = U h_{t-1} + bias`. The backward pass keeps the states and u, and goes through the tokens from the end; what
U gets is one product over all tokens after that, where a sum in the loop would be read and written at each of them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from model import placement
from model.contract import wide
from model.ops.product import product

Array = jax.Array
UNROLLED = 8  # tokens of a GPU's loop that are compiled side by side: it would wait for launches
Past = dict[str, Array]  # [B, E] each; h is what is read
Cell = Callable[[Past, Array, Array], Past]  # past, x and u [B, G, E] -> the state after the token
Tokens = dict[str, Array]  # x [B, G, E], and perhaps real and opens, [B, 1]; of all tokens [L, B, ...]


def unrolled() -> int:
    return UNROLLED if placement.platform() == "gpu" else 1


def to_gates(h: Array, kernel: Array, dtype: jax.typing.DTypeLike) -> Array:
    """`[B, G, E]` from `[B, N]` and `[N, G, E]`: multiplied in `dtype`, added up and returned in at least float32.

    Of heads apart the kernel is `[H, K, G, K]`.
    """
    h = h.astype(dtype)
    if kernel.ndim == 4:
        H, K, G, _ = kernel.shape
        return product("bhk,hkgj->bghj", h.reshape(-1, H, K), kernel, wide(dtype)).reshape(-1, G, H * K)
    return product("bn,nge->bge", h, kernel, wide(dtype))


def known(past: Past, token: Tokens) -> Past:
    """What a token finds: one that opens a document, an empty past."""
    if "opens" not in token:
        return past
    return {name: jnp.where(token["opens"], 0, value) for name, value in past.items()}


def after(cell: Cell, past: Past, x: Array, u: Array, token: Tokens) -> Past:
    """The state after a token; padding leaves the past as it is."""
    new = cell(known(past, token), x.astype(u.dtype), u)
    if "real" not in token:
        return new
    return {name: jnp.where(token["real"], value, past[name]) for name, value in new.items()}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recurrence(cell: Cell, U: Array, bias: Array, past: Past, tokens: Tokens) -> tuple[Array, Past]:
    """h after every token, `[L, B, E]` in x's dtype, and the last state; U: [E, G, E], or [H, K, G, K] of heads apart;
    bias: [G, E]."""
    dtype = tokens["x"].dtype

    def step(past, token):
        u = to_gates(known(past, token)["h"], U, dtype) + bias
        new = after(cell, past, token["x"], u, token)
        return new, new["h"].astype(dtype)

    last, y = jax.lax.scan(step, past, tokens, unroll=unrolled())
    return y, last


def recurrence_forward(cell, U, bias, past, tokens):
    dtype = tokens["x"].dtype

    def step(past, token):
        h = known(past, token)["h"]
        u = to_gates(h, U, dtype) + bias
        new, pull = jax.vjp(lambda *given: after(cell, *given, token), past, token["x"], u)
        return new, (new["h"].astype(dtype), h.astype(dtype), pull)

    last, (y, h, pulls) = jax.lax.scan(step, past, tokens, unroll=unrolled())
    return (y, last), (U, bias, tokens, h, pulls)


def recurrence_backward(cell, saved, g):
    U, bias, tokens, h, pulls = saved
    dtype, (dy, d_last) = tokens["x"].dtype, g

    def step(d, at):
        token, pull, dy = at
        d_past, dx, du = pull(d | dict(h=d["h"] + dy.astype(d["h"].dtype)))
        (dh,) = jax.vjp(lambda h: to_gates(known(dict(h=h), token)["h"], U, dtype), d["h"])[1](du)
        return d_past | dict(h=d_past["h"] + dh), (dx, du)

    d_past, (dx, du) = jax.lax.scan(step, d_last, (tokens, pulls, dy), reverse=True, unroll=unrolled())
    h, du = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (h, du))
    (dU,) = jax.vjp(lambda U: to_gates(h, U, dtype), U)[1](du)
    return dU, jnp.sum(du, axis=0).astype(bias.dtype), d_past, dict.fromkeys(tokens) | dict(x=dx)


recurrence.defvjp(recurrence_forward, recurrence_backward)
