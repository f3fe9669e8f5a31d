"""Position encodings that add to the scores a function of the query's and the key's position.

Each is a function of (parameters, q_positions, k_positions) that attention calls tile by tile, and a module that
declares the parameters. A key that the query does not see has a finite value too, and a finite gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from model.contract import wide
from model.errors import UserError
from model.ops.scores import Bias, Pairwise
from model.positions.position import Position
from model.settings import WIDEST, Count, Dim, Positive, even, within


def distances(q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
    """How far back each key lies, `[B or 1, L, M]`: negative for later keys."""
    return q_positions[:, :, None] - k_positions[:, None, :]


def alibi_slopes(n_heads: int) -> np.ndarray:
    """`2^(-8h/n)` for a power of two; else those of the next lower power, then every other one of its double."""
    power = 2 ** int(np.floor(np.log2(n_heads)))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, between])[:n_heads]


@dataclass(frozen=True)
class ALiBiBias(Pairwise):
    """`-m |i - j|`, slopes m a head."""

    linear: ClassVar[bool] = True

    def score(self, params: dict[str, jax.Array], i: jax.Array, j: jax.Array) -> jax.Array:
        m = jax.lax.stop_gradient(params["m"])  # they are fixed: spares their gradient
        return -m * jnp.abs(i - j).astype(m.dtype)


class ALiBi(Position):
    """Linear biases on the scores, falling with distance (https://arxiv.org/abs/2108.12409)."""

    needs_attention: ClassVar[bool] = True

    def bias(self, n_heads: int, causal: bool) -> Bias:
        slopes = jnp.asarray(alibi_slopes(n_heads), wide(self.dtype))
        return Bias(params={"m": slopes}, fn=ALiBiBias(), axes={"m": ("heads",)})


def bucket_edges(buckets: int, max_distance: int) -> list[int]:
    """The first distance of each bucket past those of a single one: `exact (max_distance / exact)^(i / shared)`.

    In whole numbers, because a rounded logarithm may fall on either side of an edge.
    """
    exact = buckets // 2
    shared = buckets - exact
    edges = []
    for i in range(1, shared):
        edge = int(exact * (max_distance / exact) ** (i / shared)) - 1
        while edge**shared < max_distance**i * exact ** (shared - i):
            edge += 1
        edges.append(edge)
    return edges


def t5_bucket(distance: jax.Array, buckets: int, max_distance: int, causal: bool) -> jax.Array:
    """The bucket of each distance: small ones have their own, larger ones share; later keys have the upper half."""
    if causal:
        first, n = 0, jnp.maximum(distance, 0)
    else:
        buckets //= 2
        first, n = jnp.where(distance < 0, buckets, 0), jnp.abs(distance)
    passed = sum((n >= edge).astype(n.dtype) for edge in bucket_edges(buckets, max_distance))
    return first + jnp.minimum(n, buckets // 2) + passed


@dataclass(frozen=True)
class T5Bias(Pairwise):
    """`table[bucket(i - j)]`; table: [buckets, H]."""

    buckets: int
    max_distance: int
    causal: bool

    linear: ClassVar[bool] = True

    @property
    def settles(self) -> int:
        return self.max_distance

    def __call__(self, params: dict[str, jax.Array], q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        bucket = t5_bucket(distances(q_positions, k_positions), self.buckets, self.max_distance, self.causal)
        return jnp.moveaxis(entries(params["table"], bucket), -1, 1)

    def score(self, params: dict[str, Sequence[jax.Array]], i: jax.Array, j: jax.Array) -> jax.Array:
        """From bucket to bucket, where a kernel cannot look anything up."""
        table, n = params["table"], self.buckets if self.causal else self.buckets // 2
        starts = [*range(n // 2 + 1), *bucket_edges(n, self.max_distance)]

        def entry(distance: jax.Array, first: int) -> jax.Array:
            found = table[first]
            for c in range(1, n):
                found = found + jnp.where(distance >= starts[c], table[first + c] - table[first + c - 1], 0)
            return found

        back = entry(i - j, 0)
        return back if self.causal else jnp.where(i < j, entry(j - i, n), back)


@jax.custom_vjp
def entries(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]`; its gradient is one product, where adding up entry by entry would be slow on an accelerator."""
    return jnp.take(table, index, axis=0)


def entries_forward(table, index):
    return entries(table, index), (index, table.shape[0])


def entries_backward(kept, g):
    index, size = kept
    chosen = jax.nn.one_hot(index, size, dtype=g.dtype)
    return jnp.einsum("blmc,blmh->ch", chosen, g, precision=jax.lax.Precision.HIGHEST), None


entries.defvjp(entries_forward, entries_backward)


class T5(Position):
    """A learned bias for each head and bucket of distances (https://arxiv.org/abs/1910.10683).

    Every layer has its own table, or as in T5 all layers of a stack have one.
    """

    buckets: Annotated[int, within(4, WIDEST), even] = 32  # bidirectional: half of them are for later keys
    max_distance: Count = 128  # from here on all distances share the last bucket
    shared: bool = False  # one table for all layers; False: one for each

    needs_attention: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {"table": "no_decay"}

    @property
    def shares(self) -> bool:
        return self.shared

    def check(self, head_dim: int) -> None:
        if self.max_distance <= self.buckets // 2:
            raise UserError(
                f"model.t5.max_distance {self.max_distance} must be above {self.buckets // 2}, half of the buckets; "
                f"closest: {self.buckets // 2 + 1}"
            )

    @nn.compact
    def bias(self, n_heads: int, causal: bool) -> Bias:
        self.check(head_dim=0)
        axes = (None, "heads")
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)
        table = self.param("table", init, (self.buckets, n_heads), wide(self.dtype))
        return Bias(params={"table": table}, fn=T5Bias(self.buckets, self.max_distance, causal), axes={"table": axes})


@dataclass(frozen=True)
class KerpleLog(Pairwise):
    """`-r1 log(1 + r2 |i - j|)`, with r1, r2 > 0 the softplus of the parameters."""

    def score(self, params: dict[str, jax.Array], i: jax.Array, j: jax.Array) -> jax.Array:
        r1, r2 = jax.nn.softplus(params["r1"]), jax.nn.softplus(params["r2"])
        return -r1 * jnp.log1p(r2 * jnp.abs(i - j).astype(r1.dtype))


@dataclass(frozen=True)
class KerplePower(Pairwise):
    """`-r1 |i - j|^r2`, with r1 > 0 a softplus and 0 < r2 < 2 twice a sigmoid."""

    def score(self, params: dict[str, jax.Array], i: jax.Array, j: jax.Array) -> jax.Array:
        r1, r2 = jax.nn.softplus(params["r1"]), 2 * jax.nn.sigmoid(params["r2"])
        distance = jnp.abs(i - j).astype(r1.dtype)
        # The logarithm of 0 would be the gradient to r2.
        return jnp.where(distance > 0, -r1 * jnp.exp(r2 * jnp.log(jnp.maximum(distance, 1))), 0)


def starting(top: float, inverse: Callable[[jax.Array], jax.Array]) -> nn.initializers.Initializer:
    """The parameter of a value that starts uniform up to `top`, as in the authors' code."""
    return lambda key, shape, dtype: inverse(jax.random.uniform(key, shape, dtype, 0.01, top))


def softplus_inverse(r: jax.Array) -> jax.Array:
    return jnp.log(jnp.expm1(r))


KERPLES = {"log": KerpleLog(), "power": KerplePower()}
KERPLE_INITS = {
    "log": {"r1": starting(2.0, softplus_inverse), "r2": starting(1.0, softplus_inverse)},
    "power": {"r1": starting(1.0, softplus_inverse), "r2": starting(1.99, lambda r: jax.scipy.special.logit(r / 2))},
}


class Kerple(Position):
    """Learned kernels of the distance, falling with it at each head's own rate (https://arxiv.org/abs/2205.09921)."""

    variant: Literal[*KERPLES] = "log"

    needs_attention: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {"r1": "no_decay", "r2": "no_decay"}

    @nn.compact
    def bias(self, n_heads: int, causal: bool) -> Bias:
        params = {
            name: self.param(name, nn.with_logical_partitioning(init, ("heads",)), (n_heads,), wide(self.dtype))
            for name, init in KERPLE_INITS[self.variant].items()
        }
        return Bias(params=params, fn=KERPLES[self.variant], axes=dict.fromkeys(params, ("heads",)))


def fire_input(c: jax.Array, threshold: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """`psi(|i - j|) / psi(max(threshold, i, j))` in [0, 1], with `psi(x) = log(1 + c x)`, elementwise.

    The paper divides by `psi(max(threshold, i))`, which is the same where no key is later than the query, as there.
    """
    distance, later = jnp.abs(i - j).astype(c.dtype), jnp.maximum(i, j).astype(c.dtype)
    # At least 1, which matters only to position 0 itself: its distance 0 is not divided by 0.
    return jnp.log1p(c * distance) / jnp.log1p(c * jnp.maximum(jnp.maximum(threshold, later), 1))


@dataclass(frozen=True)
class FIREBias(Pairwise):
    """An MLP of the interpolated distance. log_c, log_L: [H]; hidden, hidden_bias, out: [units, H]; but for the last,
    all heads' are the same."""

    network: ClassVar[bool] = True

    def __call__(self, params: dict[str, jax.Array], q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        """Units once for all heads."""
        log_c, log_L, hidden, hidden_bias = (params[name][..., 0] for name in FIRE_SHARED)
        x = fire_input(jnp.exp(log_c), jnp.exp(log_L), q_positions[:, :, None], k_positions[:, None, :])
        units = jax.nn.relu(x[..., None] * hidden + hidden_bias)
        # In full: accelerators would round the factors, some to 8 bits.
        return jnp.einsum("blmu,uh->bhlm", units, params["out"], precision="highest")

    def score(self, params: dict[str, Any], i: jax.Array, j: jax.Array) -> jax.Array:
        x = fire_input(jnp.exp(params["log_c"]), jnp.exp(params["log_L"]), i, j)
        units = zip(params["hidden"], params["hidden_bias"], params["out"], strict=True)
        return sum(out * jax.nn.relu(hidden * x + bias) for hidden, bias, out in units)


FIRE_SHARED = ("log_c", "log_L", "hidden", "hidden_bias")


class FIRE(Position):
    """A learned function of the distance as a part of the query's position (https://arxiv.org/abs/2310.04418).

    What it reads lies between 0 and 1 at every length. The output has no bias: softmax does not see a constant.
    """

    width: Dim = 32  # of the MLP
    c: Positive = 0.1  # at the start; the larger, the finer are small distances told apart
    threshold: Positive = 512.0  # L at the start: queries before it divide by it, not by their position

    needs_attention: ClassVar[bool] = True
    relative: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {"log_c": "no_decay", "log_L": "no_decay", "hidden_bias": "no_decay"}

    @nn.compact
    def bias(self, n_heads: int, causal: bool) -> Bias:

        def uniform(bound: float):
            return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)

        constant, W = nn.initializers.constant, self.width
        made = {  # initializer, shape, logical axes
            "log_c": (constant(math.log(self.c)), (), ()),
            "log_L": (constant(math.log(self.threshold)), (), ()),
            "hidden": (uniform(1.0), (W,), (None,)),
            "hidden_bias": (uniform(1.0), (W,), (None,)),
            "out": (uniform(W**-0.5), (W, n_heads), (None, "heads")),
        }
        params = {
            name: self.param(name, nn.with_logical_partitioning(init, axes), shape, wide(self.dtype))
            for name, (init, shape, axes) in made.items()
        }
        for name in FIRE_SHARED:  # as a pairwise bias has them, for every head
            params[name] = jnp.broadcast_to(params[name][..., None], (*params[name].shape, n_heads))
        return Bias(params, FIREBias(), {name: (None,) * (x.ndim - 1) + ("heads",) for name, x in params.items()})
