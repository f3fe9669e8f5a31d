"""Sparse Sinkhorn attention: a block of tokens sees itself and a block that a learned sorting brings to it."""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.layers import dense, fan_in
from model.mixers.attention import INTO_HEADS, check_heads
from model.mixers.whole_row import WholeRow, check_length
from model.ops.product import product
from model.settings import Count, Dim, Length, Positive

Arrays = dict[str, jax.Array]
NEVER = -1e9  # the logarithm of nothing, near enough, with a gradient that is a number


def sinkhorn(
    weights: Arrays, tokens: Arrays, n: jax.Array | None, *, block: int, iterations: int, temperature: float
) -> jax.Array:
    """Attention of tokens q, k and v [B, L, H, K] to their own block and to the one sorted to it, `[B, L, H, K]`.

    Blocks are sorted by what `weights` make of their sums of tokens x [B, L, D]. Sorted blocks are mixtures, of keys
    and of values place by place; where the last block has no token, its share of that place is no key.
    """

    @jax.checkpoint
    def attend(weights, tokens, n):
        L, f = tokens["q"].shape[1], wide(tokens["q"].dtype)
        N, n = -(-L // block), jnp.full(1, L) if n is None else n
        parts = {name: jnp.pad(x, [(0, 0), (0, N * block - L)] + [(0, 0)] * (x.ndim - 2)) for name, x in tokens.items()}
        parts = {name: x.reshape(x.shape[0], N, block, *x.shape[2:]) for name, x in parts.items()}
        q, k, v = (parts[name] for name in "qkv")
        real = (jnp.arange(N * block) < n[:, None]).reshape(-1, N, block)

        order = sorting(weights, jnp.sum(parts["x"].astype(f), axis=2), temperature)
        order = balanced(order, jnp.any(real, axis=2), iterations)
        sorted_k, sorted_v = (jnp.einsum("bhnm,bmjhk->bnjhk", order.astype(x.dtype), x) for x in (k, v))
        there = jnp.einsum("bhnm,bmj->bhnj", order, real.astype(f))  # how much of a sorted place is tokens

        scores = partial(jnp.einsum, "bnihk,bnjhk->bhnij", preferred_element_type=f)
        own = jnp.where(real[:, None, :, None], scores(q, k) * q.shape[-1] ** -0.5, NEVER)
        share = jnp.where(there > 0, jnp.log(jnp.where(there > 0, there, 1)), NEVER)
        brought = scores(q, sorted_k) * q.shape[-1] ** -0.5 + share[:, :, :, None]
        seen = jax.nn.softmax(jnp.concatenate([own, brought], axis=-1), axis=-1).astype(v.dtype)
        y = jnp.einsum("bhnij,bnjhk->bnihk", seen, jnp.concatenate([v, sorted_v], axis=2))
        return y.reshape(y.shape[0], N * block, *y.shape[3:])[:, :L]

    return attend(weights, tokens, n)


def sorting(weights: Arrays, sums: jax.Array, temperature: float) -> jax.Array:
    """How much each block wants each other, `[B, H, N, N]`: two layers on the sum of its tokens, `[B, N, D]`."""
    hidden = nn.relu(product("bnd,de->bne", sums, weights["W1"]) + weights["b1"])
    wants = product("bne,ehm->bhnm", hidden, weights["W2"][..., : sums.shape[1]])
    return (wants + weights["b2"][:, None, : sums.shape[1]]) / temperature


def balanced(wants: jax.Array, there: jax.Array, iterations: int) -> jax.Array:
    """Sinkhorn's doubly stochastic matrix, near enough: columns and rows brought to sums of 1, in turns, as logarithms.

    there: [B, N], false where there is no block.
    """
    there = (there[:, :, None] & there[:, None, :])[:, None]
    log = jnp.where(there, wants, NEVER)
    for _ in range(iterations):
        for axis in (-2, -1):
            log = jnp.where(there, log - jax.nn.logsumexp(log, axis=axis, keepdims=True), NEVER)
    return jnp.where(there, jnp.exp(log), 0)


class Sinkhorn(WholeRow):
    """Attention within blocks, to keys that a differentiable sorting brings near (https://arxiv.org/abs/2002.11296).

    The matrix that sorts blocks is the square of their number, held once for each half of an iteration while the
    gradient is taken, and so is the work to mix them.
    """

    n_heads: Dim = 4
    head_dim: Literal[0] | Dim = 0  # 0: width / n_heads
    block: Length = 32  # tokens of a block
    longest: Length = 4096  # tokens of the longest row, for whose blocks the sorting has weights
    iterations: Count = 8  # of rows and columns brought to sums of 1
    temperature: Positive = 0.75  # lower ones sort harder

    groups: ClassVar[dict[str, str]] = {"b1": "no_decay", "b2": "no_decay"}
    cost: ClassVar[float] = 2

    def check(self, state: State, length: int) -> None:
        super().check(state)
        check_heads("sinkhorn", self.n_heads, self.n_heads, self.width, self.head_dim)
        check_length("sinkhorn", self.longest, length)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check(state, x.shape[1])
        D, H, K = self.width, self.n_heads, self.head_dim or self.width // self.n_heads
        tokens = {name: dense((H, K), INTO_HEADS, self.dtype, name)(x) for name in "qkv"}
        block = min(self.block, x.shape[1])  # the places behind a row's tokens would be no keys
        run = partial(sinkhorn, block=block, iterations=self.iterations, temperature=self.temperature)
        y = self.mixed(run, self.sort_weights(), tokens | dict(x=x), ctx)
        return dense(D, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), None

    def sort_weights(self) -> Arrays:
        """Of the two layers that sort: W1 [D, D], b1 [D], W2 [D, H, N] and b2 [H, N], for N blocks."""
        D, H, N = self.width, self.n_heads, -(-self.longest // self.block)

        def flat(key, shape, dtype):
            return fan_in(key, (shape[0], shape[1] * shape[2]), dtype).reshape(shape)

        zeros = nn.initializers.zeros_init()
        made = {
            "W1": (fan_in, (D, D), ("embed", None)),
            "b1": (zeros, (D,), (None,)),
            "W2": (flat, (D, H, N), (None, "heads", None)),
            "b2": (zeros, (H, N), ("heads", None)),
        }
        return {name: self.weight(name, *how) for name, how in made.items()}
