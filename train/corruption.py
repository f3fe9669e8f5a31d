"""Corruptions of one row of tokens `[L]`, pure in their key: what a model is shown in place of the text.

Shapes are static: how many tokens and spans go follows from the length alone.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def row_keys(key: jax.Array, tokens: jax.Array) -> jax.Array:
    """A key for each row of `[B, L]`, of the given one and the row's content: the same in any batch, on any mesh."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jax.vmap(content)(tokens))


def content(tokens: jax.Array) -> jax.Array:
    """A hash of a row: the sum of its mixed-up (token, place) pairs, exact in any order of addition.

    The mixing is MurmurHash3's finaliser (https://github.com/aappleby/smhasher).
    """
    x = tokens.astype(jnp.uint32) + jnp.arange(tokens.shape[0], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)).sum(dtype=jnp.uint32)


def mask_count(length: int, rate: float) -> int:
    """Tokens of a row that `mask` chooses."""
    return min(max(round(rate * length), 1), length)


def mask(
    key: jax.Array,
    tokens: jax.Array,
    real: jax.Array | None,
    rate: float,
    mask_token: int,
    mask_share: float,
    random_share: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """BERT's (https://arxiv.org/abs/1810.04805): the row with some tokens changed, where those stand, which count.

    Of the tokens that are `real`, no padding, a share `rate` is chosen. Of the chosen, `mask_share` become the mask
    token, `random_share` any of the ids below it, and the rest stay as they are. The places `[n]` are as many as a row
    without padding has; those that do not count were not changed.
    """
    L, n = tokens.shape[0], mask_count(tokens.shape[0], rate)
    draws = jax.random.split(key, 3)
    order = jax.random.uniform(draws[0], (L,))
    counts = jnp.ones(n, bool)
    if real is not None:  # the real ones first, and of them as many as the rate asks for
        order = jnp.where(real, order, 2.0)
        there = real.sum()
        counts = jnp.arange(n) < jnp.minimum(jnp.clip(jnp.round(rate * there), 1, n), there)
    at = jnp.argsort(order)[:n].astype(jnp.int32)
    old = tokens[at]
    kind = jax.random.uniform(draws[1], (n,))
    drawn = jax.random.randint(draws[2], (n,), 0, mask_token, tokens.dtype)
    new = jnp.where(kind < mask_share, mask_token, jnp.where(kind < mask_share + random_share, drawn, old))
    new = jnp.where(counts, new, old).astype(tokens.dtype)
    return tokens.at[at].set(new, unique_indices=True), at, counts


def span_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Noise tokens and spans of them in a row, as T5 counts them; a token of text stands before every span."""
    noise = min(max(round(density * length), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), length - noise)


def spans(
    key: jax.Array, tokens: jax.Array, density: float, mean_span: float, first_sentinel: int
) -> tuple[jax.Array, jax.Array]:
    """T5's (https://arxiv.org/abs/1910.10683): a source with a sentinel for each span, and a target with what it hides.

    Spans of text and of noise take turns, text first. Sentinels count down from the first. The target has each
    sentinel followed by the tokens that it stands for. Without an end of either.
    """
    L = tokens.shape[0]
    noise, n = span_counts(L, density, mean_span)
    draws = jax.random.split(key)
    shown, hidden = segmentation(draws[0], L - noise, n), segmentation(draws[1], noise, n)
    sentinels = first_sentinel - jnp.arange(n)
    return (
        replaced(tokens, jnp.cumsum(shown) + jnp.arange(n), hidden, sentinels, L - noise + n),
        replaced(tokens, jnp.cumsum(hidden) - hidden + jnp.arange(n), shown, sentinels, noise + n),
    )


def segmentation(key: jax.Array, total: int, n: int) -> jax.Array:
    """`[n]` lengths, none of them 0, that add up to `total`; all such are equally likely."""
    cuts = jnp.sort(jax.random.permutation(key, total - 1)[: n - 1]) + 1
    return jnp.diff(cuts, prepend=0, append=total)


def infill_count(length: int, rate: float) -> int:
    """Tokens of a row that `infill` hides."""
    return min(max(round(rate * length), 1), length)


def infill(
    key: jax.Array, tokens: jax.Array, rate: float, mean_span: float, mask_token: int
) -> tuple[jax.Array, jax.Array]:
    """BART's (https://arxiv.org/abs/1910.13461): a row `[L]` with a mask token for each span, and 0 on what is padding.

    Lengths of spans are drawn from a Poisson law until they add up to the share `rate` of the tokens, the last one cut
    to fit; a span of length 0 adds a mask token. Spans stand anywhere among the tokens that stay. There are no more of
    them than tokens that go, which keeps the row's length: the last one allowed takes what is left.
    """
    L, noise = tokens.shape[0], infill_count(tokens.shape[0], rate)
    draws = jax.random.split(key)
    lengths = jnp.searchsorted(poisson(mean_span, noise), jax.random.uniform(draws[0], (noise,)), side="right")
    before = jnp.cumsum(lengths) - lengths
    lengths = jnp.minimum(lengths.at[-1].set(noise), jnp.maximum(noise - before, 0))
    n = (before < noise).sum()
    size = L - noise + n
    slots = jnp.argsort(jnp.where(jnp.arange(L) < size, jax.random.uniform(draws[1], (L,)), 2.0))[:noise]
    places = jnp.where(jnp.arange(noise) < n, slots, L)
    order = jnp.argsort(places)
    row = replaced(tokens, places[order], lengths[order], jnp.full(noise, mask_token), L)
    real = jnp.arange(L) < size
    return jnp.where(real, row, 0), real.astype(jnp.int32)


def poisson(mean: float, top: int) -> np.ndarray:
    """Chances that a Poisson number is at most 0, 1, ..., top - 1: a uniform number lies past as many as it is."""
    k = np.arange(top)
    log_factorial = np.array([math.lgamma(i + 1) for i in k])
    return np.exp(k * math.log(mean) - mean - log_factorial).cumsum().astype(np.float32)


def replaced(tokens: jax.Array, places: jax.Array, lengths: jax.Array, marks: jax.Array, size: int) -> jax.Array:
    """`[size]`: the tokens with spans of these `lengths` left out, and in the place of each its mark.

    `places` are where marks come to stand in the result, rising; those at `size` or beyond are not there.
    """
    slot = jnp.arange(size)
    before = jnp.searchsorted(places, slot)  # marks before each slot
    gone = jnp.concatenate([jnp.zeros(1, lengths.dtype), jnp.cumsum(lengths)])[before]
    token = tokens[jnp.minimum(slot - before + gone, tokens.shape[0] - 1)]
    here = jnp.minimum(before, places.shape[0] - 1)
    return jnp.where(places[here] == slot, marks[here], token).astype(tokens.dtype)
