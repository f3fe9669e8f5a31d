"""Attention whose weights are Laplace's distribution function of the scores, each for itself: no softmax, no sum to 1.

From Mega (https://arxiv.org/abs/2209.10655), where it stands in for the squared ReLU of
https://arxiv.org/abs/2202.10447. With no normaliser to share, tiles of scores add up as they come.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.contract import wide
from model.errors import choose
from model.ops.attention import few_scores, prepare
from model.ops.named import running
from model.ops.scores import Form, Operands, raw_scores, shape_scores, visible
from model.ops.tiled_attention import Pairs, at, candidates, in_tiles, learned, needed, pad, tile_shape, unblocks, when

Array = jax.Array

# At the root of 1/2, value and slope are those of a squared ReLU.
MEAN, DEVIATION = math.sqrt(0.5), math.sqrt(0.25 / math.pi)


def laplace(scores: Array) -> Array:
    return 0.5 * (1 + lax.erf((scores - MEAN) / (DEVIATION * math.sqrt(2))))


def laplace_attention(q: Array, k: Array, v: Array, *, implementation: str | None = None, **call: Any) -> Array:
    """`sum_j laplace(score_ij) v_j`, `[B, L, H, V]`, over the keys that a query sees; `call` as `attention` has it."""
    form, o = prepare(q, k, v, **call)
    picked = implementation or ("xla" if few_scores(o) else "tiled")
    run = choose("implementation of laplace attention", picked, IMPLEMENTATIONS)
    with running("laplace_attention", picked):
        return run(form, o).reshape(*q.shape[:3], v.shape[-1]).astype(v.dtype)


def laplace_weights(q: Array, k: Array, v: Array, **call: Any) -> Array:
    """The weights `[B, H, L, M]` of a call, all of them: for looking at."""
    weights = weighed(*prepare(q, k, v, **call))
    return weights.reshape(weights.shape[0], -1, *weights.shape[3:])


def weighed(form: Form, o: Operands) -> Array:
    """`[B, G, R, L, M]`, zero where a query does not see a key."""
    scores = shape_scores(form, raw_scores(o.q, o.k, None), o.bias, o.q_positions, o.k_positions)
    weights = laplace(scores)
    seen = visible(form, o.q_positions, o.k_positions, o.q_segments, o.k_segments)
    return weights if seen is None else jnp.where(seen[:, None, None], weights, 0)


def dense(form: Form, o: Operands) -> Array:
    """All scores at once, `[B, L, G, R, V]`."""
    weights = weighed(form, o).astype(o.v.dtype)
    return jnp.einsum("bgrlm,bmgv->blgrv", weights, o.v, preferred_element_type=wide(o.q.dtype))


def tiled(form: Form, o: Operands, block: tuple[int, int] | None = None) -> Array:
    """A tile of scores at a time: memory grows with L."""
    L, M = o.q.shape[1], o.k.shape[1]
    rows, columns = block or tile_shape(o)
    l, m = min(rows, L), min(columns, M)
    o = pad(o, -L % l, -M % m)
    pairs = candidates(form, -(-L // l), -(-M // m), l, m)
    sparse = form.stretches != 1 or o.k_segments is not None
    return summed(form, (l, m), Pairs(pairs, sparse), o)[:, :L]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def summed(form: Form, tile: tuple[int, int], pairs: Pairs, o: Operands) -> Array:
    c, wanted = tiles_of(form, tile, pairs, o)

    def step(out, pair):
        i, j, want = pair
        (new,) = when(pairs.sparse, want, lambda old: (old + dense(form, at(c, i, j)),), out[i])
        return lax.dynamic_update_index_in_dim(out, new, i, 0), None

    start = jnp.zeros((*c.q.shape[:-1], o.v.shape[-1]), wide(o.q.dtype))
    return unblocks(lax.scan(step, start, (pairs.i, pairs.j, wanted))[0])


def summed_forward(form, tile, pairs, o):
    return summed(form, tile, pairs, o), o


def summed_backward(form, tile, pairs, o, d_out):
    c, wanted = tiles_of(form, tile, pairs, o)
    d_outs = in_tiles(o.replace(q=d_out), tile).q

    def step(carry, pair):
        i, j, want = pair
        t = at(c, i, j)

        def see(*old):
            _, pull = jax.vjp(
                lambda q, k, v, bias: dense(form, t.replace(q=q, k=k, v=v, bias=bias)), t.q, t.k, t.v, t.bias
            )
            return jax.tree.map(lambda x, more: x + more.astype(x.dtype), old, pull(d_outs[i]))

        d_q, d_k, d_v, d_bias = carry
        q, k, v, d_bias = when(pairs.sparse, want, see, d_q[i], d_k[j], d_v[j], d_bias)
        new = [lax.dynamic_update_index_in_dim(x, y, n, 0) for x, y, n in ((d_q, q, i), (d_k, k, j), (d_v, v, j))]
        return (*new, d_bias), None

    start = [jnp.zeros(x.shape, wide(x.dtype)) for x in (c.q, c.k, c.v)]
    (*d_tokens, d_bias), _ = lax.scan(step, (*start, jax.tree.map(jnp.zeros_like, o.bias)), (pairs.i, pairs.j, wanted))
    d_q, d_k, d_v = (unblocks(d).astype(x.dtype) for d, x in zip(d_tokens, (o.q, o.k, o.v), strict=True))
    return (learned(o).replace(q=d_q, k=d_k, v=d_v, bias=d_bias),)


summed.defvjp(summed_forward, summed_backward)


def tiles_of(form: Form, tile: tuple[int, int], pairs: Pairs, o: Operands) -> tuple[Operands, Array | np.ndarray]:
    """The operands in blocks, and which pairs of those are wanted."""
    c = in_tiles(o, tile)
    return c, needed(form, c, pairs) if pairs.sparse else np.ones(len(pairs.i), bool)


IMPLEMENTATIONS = {"reference": dense, "xla": dense, "tiled": tiled}
