"""Attention among tokens that are hashed alike: Reformer's (https://arxiv.org/abs/2001.04451).

In each of several rounds tokens are sorted by document, bucket and place in the row, and attend to a few that then
stand next to them; rounds are put together by their log-sum-exps. Queries are the keys' own tokens, q, k: [B, M, H, K],
v: [B, M, H, V]. A token sees itself only where it sees nothing else.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from model import placement
from model.contract import wide
from model.documents import document_positions, open_reading
from model.ops.chosen import by_group, shared_heads
from model.ops.conv import moved
from model.ops.dense_attention import softmax
from model.ops.scores import Bias

Array = jax.Array
ALONE = -1e5  # the score of a token with itself: less than any other, and more than what is not seen


@dataclasses.dataclass(frozen=True)
class Form:
    """What is known of a call when it is traced."""

    chunk: int
    n_buckets: int
    causal: bool
    packed: bool  # whether a row may hold several documents
    bias: Callable | None


@struct.dataclass
class Tokens:
    """What is known of the tokens of a row besides their vectors."""

    bucket: Array  # [B, M, H, rounds] int32
    document: Array  # [B, M], which of the row, from 1; 0: padding
    positions: Array  # [B, M], by which the bias is


def rotations(seed: int, heads: int, dim: int, rounds: int, n_buckets: int) -> np.ndarray:
    """Random directions `[H, K, rounds, n_buckets / 2]`, the same wherever they are made."""
    shape = (heads, dim, rounds, n_buckets // 2)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def hashed(x: Array, directions: np.ndarray) -> Array:
    """Buckets `[B, L, H, rounds]` of vectors `[B, L, H, K]`: the direction, or its opposite, that is the closest."""
    x = lax.stop_gradient(x).astype(wide(x.dtype))
    turned = jnp.einsum("blhk,hkrn->blhrn", x, jnp.asarray(directions, x.dtype), precision=lax.Precision.HIGHEST)
    return jnp.argmax(jnp.concatenate([turned, -turned], axis=-1), axis=-1).astype(jnp.int32)


def documents_of(shape: tuple[int, int], segments: Array | None) -> Array:
    """Which document of its row a token is of, `[B, M]`, from 1; 0: padding."""
    if segments is None:
        return jnp.ones(shape, jnp.int32)
    positions, _ = document_positions(segments, open_reading(shape[0]))
    real = segments > 0
    return jnp.where(real, jnp.cumsum(real & (positions == 0), axis=1, dtype=jnp.int32), 0)


def attend(q: Array, k: Array, v: Array, tokens: Tokens, form: Form, bias: Bias | None) -> Array:
    """Attention of all tokens, `[B, M, H, V]`, in time and memory that grow with M rounds chunk."""
    heads = shared_heads("attention by hashes", q.shape[2], q.shape[1])
    params = None if bias is None else by_group(bias, q.shape[2], 1)

    def lying(x, *names):
        return placement.spec(names + (None,) * (x.ndim - len(names)), x.shape)

    lies = [lying(x, "batch", None, heads) for x in (q, k, v, tokens.bucket)]
    of_tokens = Tokens(lies.pop(), lying(tokens.document, "batch"), lying(tokens.positions, "batch"))
    of_bias = jax.tree.map(lambda leaf: lying(leaf, heads), params)
    run = placement.on_each_device(partial(in_order, form), (*lies, of_bias, of_tokens), lies[2])
    return run(q, k, v, params, tokens)


def in_order(form: Form, q: Array, k: Array, v: Array, params: Any, tokens: Tokens) -> Array:
    q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))

    @partial(jax.checkpoint, prevent_cse=False)  # else every round's scores are kept
    def one(q, k, v, params, bucket):
        return sorted_round(form, q, k, v, params, bucket, tokens)

    buckets = jnp.moveaxis(tokens.bucket, (3, 2), (0, 2))  # [rounds, B, H, M]
    _, (y, lse) = lax.scan(lambda _, bucket: (None, one(q, k, v, params, bucket)), None, buckets)
    share = jax.nn.softmax(lse, axis=0)
    return jnp.moveaxis(jnp.einsum("rbhm,rbhmv->bhmv", share, y).astype(v.dtype), 2, 1)


def sorted_round(
    form: Form, q: Array, k: Array, v: Array, params: Any, bucket: Array, tokens: Tokens
) -> tuple[Array, Array]:
    """One round's output `[B, H, M, V]` and log-sum-exp `[B, H, M]`, wide; bucket: [B, H, M]."""
    (B, H, M, _), f = q.shape, wide(q.dtype)
    document = jnp.broadcast_to(tokens.document[:, None], bucket.shape)
    key = jnp.where(document > 0, document * form.n_buckets + bucket, jnp.iinfo(jnp.int32).max)
    there = jnp.argsort(key, axis=-1, stable=True)
    back = jnp.argsort(there, axis=-1)
    T = min(form.chunk, M)
    n = -(-M // T)
    # Chunks of a document that begins anywhere lie across three tiles, with the one before in a fourth.
    before, ahead = (2, 1) if form.packed and not form.causal else (1, 0)

    def tiled(x: Array) -> Array:
        """`[B, H, M, ...]` in tiles, `[B, H, n, T, ...]`."""
        x = jnp.pad(x, [(0, 0), (0, 0), (0, n * T - M)] + [(0, 0)] * (x.ndim - 3))
        return x.reshape(B, H, n, T, *x.shape[3:])

    def around(x: Array) -> Array:
        """Each tile with those beside it, `[B, H, n, (before + 1 + ahead) T, ...]`."""
        x = jnp.pad(x, [(0, 0), (0, 0), (before, ahead)] + [(0, 0)] * (x.ndim - 3))
        return jnp.concatenate([x[:, :, i : i + n] for i in range(before + 1 + ahead)], axis=3)

    def laid(x: Array) -> Array:  # a permutation, whose gradient is its inverse
        flat = moved(x.reshape(B * H, M, -1), there.reshape(B * H, M), back.reshape(B * H, M))
        return tiled(flat.reshape(x.shape))

    def told(x: Array) -> Array:
        return tiled(jnp.take_along_axis(jnp.broadcast_to(x, there.shape), there, axis=-1))

    s = jnp.broadcast_to(jnp.arange(n * T, dtype=jnp.int32).reshape(n, T), (B, H, n, T))
    document, bucket = told(document), told(bucket)
    seen = pairs(jnp.equal, document, around(document)) & (around(document) > 0)[..., None, :]
    if form.causal:
        distance = pairs(jnp.subtract, s, around(s))
        seen &= pairs(jnp.equal, bucket, around(bucket)) & (distance >= 0) & (distance <= form.chunk)
    else:
        flat = document.reshape(B, H, n * T)
        opens = jnp.concatenate([jnp.ones_like(flat[..., :1], bool), flat[..., 1:] != flat[..., :-1]], axis=-1)
        place = s - lax.cummax(jnp.where(opens, s.reshape(flat.shape), 0), axis=2).reshape(s.shape)
        back_by = pairs(jnp.subtract, place // form.chunk, around(place // form.chunk))
        seen &= (back_by == 0) | (back_by == 1)
    scores = jnp.einsum("bhntk,bhnmk->bhntm", laid(q), around(laid(k)), preferred_element_type=f)
    if form.bias is not None:
        at = told(tokens.positions[:, None])

        def of_head(params, q_at, k_at):
            return form.bias(params, q_at.reshape(B * n, T), k_at.reshape(B * n, -1))

        added = jax.vmap(of_head, in_axes=(0, 1, 1))(params, at, around(at))  # [H, B n, 1, T, m]
        scores = scores + jnp.moveaxis(added.reshape(H, B, *scores.shape[2:]), 0, 1)
    scores = jnp.where(pairs(jnp.equal, s, around(s)), ALONE, scores)
    weights, lse = softmax(scores, seen, None)
    y = jnp.einsum("bhntm,bhnmv->bhntv", weights.astype(v.dtype), around(laid(v)), preferred_element_type=f)
    y, lse = y.reshape(B * H, n * T, -1)[:, :M], lse.reshape(B, H, n * T)[..., :M]
    y = moved(y, back.reshape(B * H, M), there.reshape(B * H, M)).reshape(B, H, M, -1)
    return y, jnp.take_along_axis(lse, back, axis=-1)


def pairs(compare: Callable[[Array, Array], Array], q: Array, k: Array) -> Array:
    return compare(q[..., :, None], k[..., None, :])


def weights_of_all(q: Array, k: Array, tokens: Tokens, form: Form, bias: Bias | None, first: Array | int = 0) -> Array:
    """The definition: all weights `[B, H, L, M]` of queries `[B, L, H, K]` that are the tokens from the first on."""
    L, M, f = q.shape[1], k.shape[1], wide(q.dtype)
    scores = jnp.einsum("blhk,bmhk->bhlm", q.astype(f), k.astype(f))
    if bias is not None:
        q_at = lax.dynamic_slice_in_dim(tokens.positions, first, L, axis=1)
        scores = scores + bias.fn(bias.params, q_at, tokens.positions)
    m = jnp.arange(M, dtype=jnp.int32)
    here = first + jnp.arange(L, dtype=jnp.int32)
    itself = here[:, None] == m
    scores = jnp.where(itself, ALONE, scores)
    document = tokens.document[:, None]  # [B, 1, M]

    def of_queries(x):
        return lax.dynamic_slice_in_dim(x, first, L, axis=2)

    same = pairs(jnp.equal, of_queries(document), document) & (document > 0)[..., None, :]

    def one(bucket):  # [B, H, M]
        if form.causal:  # the last ones of the same bucket
            alike = same & pairs(jnp.equal, of_queries(bucket), bucket) & (m <= here[:, None])
            number = jnp.cumsum(alike, axis=-1, dtype=jnp.int32)
            seen = alike & (number[..., -1:] - number <= form.chunk)
        else:
            earlier = pairs(jnp.greater, bucket, bucket) | (pairs(jnp.equal, bucket, bucket) & pairs(jnp.greater, m, m))
            chunk = jnp.sum(earlier & same, axis=-1) // form.chunk
            back_by = pairs(jnp.subtract, of_queries(chunk), chunk)
            seen = same & ((back_by == 0) | (back_by == 1))
        return softmax(scores, seen, None)

    weights, lse = lax.map(one, jnp.moveaxis(tokens.bucket, (3, 2), (0, 2)))
    return jnp.einsum("rbhl,rbhlm->bhlm", jax.nn.softmax(lse, axis=0), weights)
