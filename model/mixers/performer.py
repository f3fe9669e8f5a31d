"""Performer: softmax's kernel as the mean of products of random features (FAVOR+, https://arxiv.org/abs/2009.14794)."""

from typing import Literal

import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.documents import at_real, marks, reverse
from model.mixers.linear import Kernelised, averaged, both_ways
from model.ops.decays import FORGET, exponents, stabilised
from model.ops.features import directions, log_positive
from model.ops.matrix_state import matrix_state
from model.settings import Dim, Seed

Array = jax.Array
LEAST = 1e-30  # that a sum of scores is taken to be, where the largest feature is 1


def largest(top: Array, ctx: Context) -> Array:
    """The largest of a document's numbers at each of its tokens; top: [B, L, H]."""
    real, _ = marks(ctx)
    if real is None or ctx.right_padded:
        top = top if real is None else jnp.where(real[..., None], top, FORGET)
        return jnp.max(top, axis=1, keepdims=True)

    def so_far(top, ctx):
        real, keep = (mark[..., None] for mark in marks(ctx))
        entering = jnp.where(real, top, -jnp.inf)
        return exponents(jnp.where(keep, 0, -jnp.inf), entering, jnp.full_like(top[:, 0], FORGET))[1]

    return jnp.maximum(so_far(top, ctx), so_far(top[:, ::-1], reverse(ctx))[:, ::-1])


def of_keys(real: Array | None, logs: Array) -> Array:
    """Features of keys, none at padding, whose logarithms may be anything and must not even be tried."""
    return at_real(real, jnp.exp(at_real(real, logs)))


class Performer(Kernelised):
    """Performer's attention: positive, orthogonal random features, fixed by a seed.

    Features are exponentials. Those of a query are divided by their largest and those of keys by the largest so far, or
    where all tokens are seen by the largest of the document, which changes no average.
    """

    n_features: Literal[0] | Dim = 0  # F; 0: four for each channel of a key
    seed: Seed = 0  # of the directions; layers of one seed have the same

    def features(self) -> int:
        return self.n_features or 4 * self.keys

    def mix(self, q: Array, k: Array, v: Array, ctx: Context, state: State) -> tuple[Array, State]:
        random, f = directions(self.seed, self.features(), self.keys), wide(self.dtype)
        q, k = log_positive(q, random), log_positive(k, random)
        q = jnp.exp(q - jax.lax.stop_gradient(jnp.max(q, axis=-1, keepdims=True)))
        (real, keep), top = marks(ctx), jax.lax.stop_gradient(jnp.max(k, axis=-1))
        if not self.causal:
            k = of_keys(real, k - largest(top, ctx)[..., None])
            return averaged(both_ways(q, k, v, ctx, self.implementation), LEAST), None
        past = self.init_state(v.shape[0], 0) if state is None else state
        w, m, last = stabilised(jnp.zeros_like(top), top, past["m"], real, keep)
        k = of_keys(real, k - m[..., None])
        y, h = matrix_state(q, k, v, w, past["h"], keep, implementation=self.implementation)
        return averaged(y.astype(f), LEAST), None if state is None else dict(h=h, m=last)

    def init_state(self, batch: int, max_len: int) -> State:
        m = jnp.full((batch, self.n_heads), FORGET, wide(self.dtype))
        return dict(h=super().init_state(batch, max_len), m=m)

    def state_bytes(self, length: int) -> int:
        return super().state_bytes(length) + self.n_heads * jnp.dtype(wide(self.dtype)).itemsize
