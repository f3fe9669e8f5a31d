"""How a query scores a key, and which keys it sees: the part of attention that every implementation shares.

Inside, heads are split into G groups of R that share a key-value head: q [B, L, G, R, K], k [B, M, G, K],
v [B, M, G, V], scores [B, G, R, L, M].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from model.contract import wide
from model.ops.mask import Mask, both


@struct.dataclass
class Bias:
    """Added to the scaled scores: `fn(params, q_positions [B or 1, L], k_positions [B or 1, M])`, `[B or 1, H, L, M]`.

    Implementations call `fn` on tiles of positions, so it must be elementwise in them; gradients flow to `params`.
    Devices that share the heads call it with the parameters of their own, so it must not count them.
    """

    params: Any
    fn: Callable[[Any, jax.Array, jax.Array], jax.Array] = struct.field(pytree_node=False)
    axes: Any = struct.field(pytree_node=False)  # of each parameter: a tuple, "heads" where the axis is that, or None


class Pairwise:
    """The `fn` of a bias that is plain arithmetic on two positions: kernels compute it in a tile, by `score`.

    Its parameters are a dict, heads their last axis. Subclasses are frozen dataclasses: equal ones are one bias.
    """

    settles: int | None = None  # from this distance on, before and after, the score no longer changes
    linear: bool = False  # whether a score is a weighted sum of the parameters
    network: bool = False  # whether a score takes the many operations of a network

    def score(self, params: dict[str, Any], i: jax.Array, j: jax.Array) -> jax.Array:
        """Of queries at i and keys at j, elementwise. Of parameters `[H]` it is given one head's, or all with axes for
        tokens behind; of `[n, H]`, n of those."""
        raise NotImplementedError

    def __call__(self, params: dict[str, jax.Array], q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        params = {name: x[..., None, None] for name, x in params.items()}
        return self.score(params, q_positions[:, None, :, None], k_positions[:, None, None, :])


@dataclasses.dataclass(frozen=True)
class Form:
    """What is known of a call when it is traced."""

    mask: Mask
    scale: float
    soft_cap: float  # scores are kept within this by a tanh; 0: they are not
    bias: Callable | None
    right_padded: bool  # segments, where there are any, are of one document a row with padding behind it
    stretches: int  # both positions are 0, 1, 2, ...; above 1: queries are one of so many stretches. 0: they are not
    gapless: bool = False  # two tokens of one document are as far apart in the row as their positions say
    ring: tuple[str, ...] = ()  # mesh axes round which keys and values go; a device holds a stretch of them


@struct.dataclass
class Operands:
    """The arrays of a call; None where there is nothing to say."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array  # [B or 1, L]
    k_positions: jax.Array  # [B or 1, M]
    q_segments: jax.Array | None  # [B or 1, L]
    k_segments: jax.Array | None  # [B or 1, M]
    bias: Any  # the parameters of the form's bias
    sinks: jax.Array | None  # [G, R]: a logit that takes weight and gives nothing
    additive: jax.Array | None  # [G, R, K]: scores are additive . tanh(q + k), not q . k
    q_levels: jax.Array | None = None  # [B, L, G, R]: how far apart the levels of two tokens are, scores are lower
    k_levels: jax.Array | None = None  # [B, M, G, R]
    k_filled: jax.Array | None = None  # []: keys from this place on are nothing yet; None: not said


def raw_scores(q: jax.Array, k: jax.Array, additive: jax.Array | None) -> jax.Array:
    """`q . k`, or Bahdanau's `additive . tanh(q + k)` (https://arxiv.org/abs/1409.0473)."""
    dtype = wide(q.dtype)
    # Heads first: to make the scores in another order of axes is to move all of them.
    q, k = jnp.moveaxis(q, 1, 3), jnp.moveaxis(k, 1, 2)
    if additive is None:
        return jnp.einsum("bgrlk,bgmk->bgrlm", q, k, preferred_element_type=dtype)
    hidden = jnp.tanh(q.astype(dtype)[:, :, :, :, None] + k.astype(dtype)[:, :, None, None])
    return jnp.einsum("bgrlmk,grk->bgrlm", hidden, additive.astype(dtype))


Levels = tuple[jax.Array, jax.Array]


def shape_scores(
    form: Form,
    scores: jax.Array,
    params: Any,
    q_positions: jax.Array,
    k_positions: jax.Array,
    levels: Levels | None = None,
) -> jax.Array:
    """Raw scores scaled, capped, biased, and lowered by what is forgotten between two tokens, in this order."""
    scores = scores * form.scale
    if form.soft_cap:
        scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
    if form.bias is not None:
        bias = form.bias(params, q_positions, k_positions)
        scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:3], *bias.shape[2:])
    if levels is not None:
        q, k = (jnp.moveaxis(x, 1, 3) for x in levels)
        scores = scores - jnp.abs(q[..., :, None] - k[..., None, :])
    return scores


def levels(o: Operands) -> Levels | None:
    return None if o.q_levels is None else (o.q_levels, o.k_levels)


def visible(
    form: Form,
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_segments: jax.Array | None,
    k_segments: jax.Array | None,
) -> jax.Array | None:
    """True where a query sees a key, `[B or 1, L or 1, M]`; None where all see all."""
    seen = form.mask.sees(q_positions[:, :, None], k_positions[:, None, :])
    if k_segments is None:
        return seen
    return both(seen, (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] > 0))
