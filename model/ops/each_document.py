"""What mixes whole rows, run on one document at a time.

A row may pack several documents, and padding among their tokens. Each document in turn is moved to the front of its
row, mixed there and moved back: the cost is that of a row for every document, the memory that of one row. How many
there are is known only when the program runs, so gradients run the same loop again instead of keeping its steps.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.documents import document_positions, open_reading
from model.ops.conv import moved, places

Tree = Any
# weights, tokens (a tree of [B, L, ...]) and n [B], how many of each row are real, at least 1: y [B, L, ...]. Others
# stand behind them and are zero; what is returned for them is dropped. n is None where all are real.
Run = Callable[[Tree, Tree, jax.Array | None], jax.Array]


def each_document(
    run: Run, weights: Tree, tokens: Tree, segments: jax.Array | None, right_padded: bool = False
) -> jax.Array:
    """`run` on every document alone, `[B, L, ...]`, zero at padding; segments: [B, L] as in a context.

    What is differentiated must come by `weights` and `tokens`, not by closure.
    """
    if segments is None:
        return run(weights, tokens, None)
    if right_padded:
        real = segments > 0
        y = run(weights, jax.tree.map(partial(kept, real), tokens), count(real))
        return kept(real, y)
    return one_by_one(run, weights, tokens, numbers(segments))


def numbers(segments: jax.Array) -> jax.Array:
    """Of each token, which document of its row it belongs to, `[B, L]`: 0, 1, ... as they come; -1 at padding."""
    real = segments > 0
    positions, _ = document_positions(segments, open_reading(segments.shape[0]))
    return jnp.where(real, jnp.cumsum(real & (positions == 0), axis=1, dtype=jnp.int32) - 1, -1)


def kept(real: jax.Array, x: jax.Array) -> jax.Array:
    """x `[B, L, ...]`, zero at padding, whatever stood there."""
    return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)


def count(real: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(real, axis=1, dtype=jnp.int32), 1)


def along(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
    """`moved` for any number of axes behind the length."""
    return moved(x.reshape(*x.shape[:2], math.prod(x.shape[2:])), there, back).reshape(x.shape)


def alone(run: Run, mine: jax.Array, weights: Tree, tokens: Tree) -> jax.Array:
    """`run` on the tokens that are `mine` [B, L], each at its place in the row, zero elsewhere."""
    there, back = places(mine)
    front = jax.tree.map(lambda x: along(x, there, back), tokens)
    return along(run(weights, front, count(mine)), back, there)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def one_by_one(run: Run, weights: Tree, tokens: Tree, number: jax.Array) -> jax.Array:
    def add(d, y):
        return y + alone(run, number == d, weights, tokens)

    shape = jax.eval_shape(partial(alone, run), number == 0, weights, tokens)
    return lax.fori_loop(0, jnp.max(number) + 1, add, jnp.zeros(shape.shape, shape.dtype))


def forward(run, weights, tokens, number):
    return one_by_one(run, weights, tokens, number), (weights, tokens, number)


def backward(run, saved, g):
    weights, tokens, number = saved

    def add(d, sums):
        _, pull = jax.vjp(partial(alone, run, number == d), weights, tokens)
        return jax.tree.map(jnp.add, sums, pull(g))

    zeros = jax.tree.map(jnp.zeros_like, (weights, tokens))
    return (*lax.fori_loop(0, jnp.max(number) + 1, add, zeros), None)


one_by_one.defvjp(forward, backward)
