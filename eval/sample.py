"""From logits to a token: temperature, then top-k, then top-p, then a draw."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from model.settings import NotNegative, Whole, above, at_most, check_fields


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; checked once, and hashable, so that a compiled step can be made for it."""

    temperature: NotNegative = 1.0  # 0: the likeliest token
    top_k: Whole = 0  # only the k likeliest; 0: all
    top_p: Annotated[float, above(0), at_most(1)] = 1.0  # only the fewest likeliest whose probabilities reach p; 1: all

    def __post_init__(self) -> None:
        check_fields(self)


def sample(
    key: jax.Array, logits: jax.Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> jax.Array:
    """Token ids `[B]`, drawn from the logits `[B, V]`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # From the largest down, and never by 0, so that no temperature above 0 makes infinities of finite logits.
    cooled = (logits - logits.max(-1, keepdims=True)) / max(temperature, float(jnp.finfo(logits.dtype).tiny))
    kept = filter_top_p(filter_top_k(cooled, top_k), top_p)
    return jax.random.categorical(key, kept, axis=-1).astype(jnp.int32)


def filter_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Logits `[..., V]` with all but the k largest at -inf; of equals the lower id stays. 0: unchanged."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    _, rank = ranking(logits)
    return jnp.where(rank < k, logits, -jnp.inf)


def filter_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Logits `[..., V]` with all at -inf but the fewest likeliest whose probabilities add up to p or more."""
    if p == 1:  # a sum that rounding brings to 1 early must not cost the rarest tokens
        return logits
    order, rank = ranking(logits)
    probability = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability  # of all that are likelier
    return jnp.where(jnp.take_along_axis(before < p, rank, axis=-1), logits, -jnp.inf)


def ranking(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids from the largest logit down, and each id's place in that order; equal ones by id, as in argmax."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1)
