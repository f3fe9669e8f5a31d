"""Nystromformer: softmax attention by way of a few landmarks."""

from functools import partial
from typing import Annotated, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.errors import UserError
from model.layers import check_divides, dense, fan_in
from model.mixers.attention import INTO_HEADS
from model.mixers.whole_row import WholeRow
from model.ops.conv import short_conv
from model.settings import WIDEST, Bound, Count, Dim, within

odd = Bound("that is odd", lambda x: x % 2 == 1, lambda x: x + 1)
exactly = partial(jnp.einsum, precision="highest")  # an inverse has no digits to spare


def nystrom(
    kernel: jax.Array | None,
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    n: jax.Array | None,
    *,
    landmarks: int,
    iterations: int,
) -> jax.Array:
    """`softmax(Q K~^T) softmax(Q~ K~^T)^+ softmax(Q~ K^T) V`, `[B, L, H, K]`, with Q~ and K~ the landmarks of Q and K.

    A depthwise convolution of the values by `kernel` [W, H] is added, unless that is None.
    """

    @jax.checkpoint  # what each token gives to each landmark is kept for no gradient
    def attend(q, k, v, n):
        L, f = q.shape[1], wide(q.dtype)
        member = segment_means(L, jnp.full(1, L) if n is None else n, landmarks, f)
        there = jnp.any(member > 0, axis=1)[:, None, None]  # [B, 1, 1, M]: fewer tokens are fewer landmarks
        near_q, near_k = (exactly("blm,blhk->bmhk", member, x.astype(f)) for x in (q, k))

        def weights(q, k, seen):
            scores = exactly("blhk,bmhk->bhlm", q.astype(f), k.astype(f)) * q.shape[-1] ** -0.5
            return jax.nn.softmax(scores, axis=-1, where=seen)

        seen = None if n is None else (jnp.arange(L) < n[:, None])[:, None, None]
        between = weights(near_q, near_k, there) * jnp.swapaxes(there, -1, -2)
        read = exactly("bhml,blhk->bhmk", weights(near_q, k, seen), v.astype(f))
        read = exactly("bhmj,bhjk->bhmk", inverse(between, iterations), read)
        return exactly("bhlm,bhmk->blhk", weights(q, near_k, there), read).astype(v.dtype)

    q, k, v = tokens
    y = attend(q, k, v, n)
    return y if kernel is None else y + around(v, kernel)


def segment_means(L: int, n: jax.Array, M: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What makes M means of the first n [B] tokens, `[B, L, M]`, each of those next to each other, as many as may be.

    Token t is of mean `floor(t M / n)`. With fewer tokens than means some stay empty, and zero.
    """
    j, n = jnp.arange(M + 1), n[:, None]
    starts = j * (n // M) - -j * (n % M) // M  # the least t with t M / n at least j; j n itself may be too large
    t = jnp.arange(L)[:, None]
    member = (starts[:, None, :-1] <= t) & (t < starts[:, None, 1:])
    return member / jnp.maximum(starts[:, 1:] - starts[:, :-1], 1)[:, None].astype(dtype)


def inverse(A: jax.Array, iterations: int) -> jax.Array:
    """The pseudo-inverse of A `[..., M, M]`, near enough, by products alone (https://doi.org/10.1016/j.amc.2013.10.010).

    It starts from the transpose over the largest sums of rows and of columns, of this matrix and no other's.
    """
    one = jnp.eye(A.shape[-1], dtype=A.dtype)
    rows, columns = (jnp.max(jnp.sum(A, axis=axis), axis=-1) for axis in (-1, -2))
    Z = jnp.swapaxes(A, -1, -2) / (rows * columns)[..., None, None]
    product = partial(jnp.matmul, precision="highest")
    for _ in range(iterations):
        AZ = product(A, Z)
        Z = product(Z, 13 * one - product(AZ, 15 * one - product(AZ, 7 * one - AZ))) / 4
    return Z


def around(v: jax.Array, kernel: jax.Array) -> jax.Array:
    """The convolution of v `[B, L, H, K]` with a kernel `[W, H]` of each head, centred, W odd."""
    (B, L, H, K), half = v.shape, kernel.shape[0] // 2
    flat = jnp.pad(v.reshape(B, L, H * K), [(0, 0), (0, half), (0, 0)])
    each = jnp.repeat(kernel, K, axis=1)
    past = jnp.zeros((B, 2 * half, H * K), v.dtype)
    return short_conv(flat, each, jnp.zeros(H * K, kernel.dtype), past)[:, half:].reshape(v.shape)


class Nystrom(WholeRow):
    """Attention through the means of stretches of queries and keys (https://arxiv.org/abs/2102.03902).

    A document of fewer tokens than there are landmarks has each of its tokens for one.
    """

    n_heads: Dim = 4
    landmarks: Literal[0] | Dim = 0  # 0: 64, or every token of shorter rows
    iterations: Count = 6  # towards the pseudo-inverse
    conv: Literal[0] | Annotated[int, within(1, WIDEST), odd] = 33  # width of the convolution beside; 0: none

    def check(self, state: State) -> None:
        super().check(state)
        check_divides("model.nystrom.n_heads", self.n_heads, "model.width", self.width)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check(state)
        H, K = self.n_heads, self.width // self.n_heads
        tokens = tuple(dense((H, K), INTO_HEADS, self.dtype, name)(x) for name in "qkv")
        kernel = None
        if self.conv:
            kernel = self.weight("conv", fan_in, (self.conv, H), (None, "heads"))
        run = partial(nystrom, landmarks=self.landmarks_of(x.shape[1]), iterations=self.iterations)
        y = self.mixed(run, kernel, tokens, ctx)
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), None

    def landmarks_of(self, length: int) -> int:
        if self.landmarks > length:
            raise UserError(
                f"model.nystrom.landmarks {self.landmarks} is more than the {length} tokens of a row; allowed: 1 to "
                f"{length}, or 0 for 64 where there are as many; closest: {length}"
            )
        return self.landmarks or min(64, length)
