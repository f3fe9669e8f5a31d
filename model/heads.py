"""Heads: what is read off a backbone's vectors. Logits, in float32 at least whatever the dtype, or what they cost."""

from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import wide
from model.layers import Embed, Unembed, dense, norm
from model.mlps.mlp import FORMS
from model.ops.cross_entropy import Readout, Scores, Targets, scores, vocabulary_logits, vocabulary_scores
from model.ops.embedding import at_places
from model.positions.added import Sinusoidal

Answers = jax.Array | Scores  # logits, or what they cost where targets are given


class HeadContext(NamedTuple):
    """What a head knows about the tokens besides their vectors; each takes what it needs."""

    segments: jax.Array | None  # [B, L] int32, 0 is padding; None: there is none
    at: jax.Array | None = None  # [B, Q], the positions that are asked for; None: all
    embed: Embed | None = None  # of the tokens, where they have ids


class Head(nn.Module):
    """What all heads have in common: a norm before them, and how they are called."""

    norm: str = "rmsnorm"  # or none
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    n_classes: ClassVar[int] = 0  # it is no classifier
    of_row: ClassVar[bool] = False  # whether its answer is of a whole row

    def __call__(self, x: jax.Array, ctx: HeadContext, targets: Targets | None = None) -> Answers:
        """An answer to every vector of x `[B, L, D]`, to those that are asked for, or to each row.

        Of a head that chooses, it is the logits of the choices, or, where targets are given, their scores.
        """
        raise NotImplementedError

    def normed(self, x: jax.Array, name: str = "norm") -> jax.Array:
        return x if self.norm == "none" else norm(self.norm, self.dtype, name, self.norm_eps)(x)

    def linear(self, x: jax.Array, features: int, name: str) -> jax.Array:
        return dense(features, ("embed", None), self.dtype, name, bias=True, out=wide(self.dtype))(x)

    def choice(self, x: jax.Array, targets: Targets | None) -> Answers:
        return scored(self.linear(x, self.n_classes, "classes"), targets)


class TokenHead(Head):
    """Logits over the vocabulary at every position, or at those asked for: `[B, L, V]` or `[B, Q, V]`."""

    vocab_size: int = 0
    tied: bool = True  # to the embedding
    bias: bool = False  # of the logits
    map_to: str = "none"  # before the norm, a linear map and the activation of this MLP
    scale: float = 1.0  # of the logits
    soft_cap: float = 0.0  # keeps logits within this by a tanh; 0: off

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext, targets: Targets | None = None) -> Answers:
        x = at_positions(x, ctx.at)  # before the unembedding, which costs V per position
        if self.map_to != "none":
            x = dense(x.shape[-1], ("embed", None), self.dtype, "map", bias=True)(x)
            x = FORMS[self.map_to].keywords["activation"](x)
        x = self.normed(x)
        unembed = ctx.embed if self.tied else Unembed(self.vocab_size, x.shape[-1], self.dtype, name="unembed")
        bias = None
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
            bias = self.param("unembed_bias", zeros, (self.vocab_size,), wide(self.dtype))
        return over_vocabulary(x.astype(self.dtype), unembed, bias, Readout(self.scale, self.soft_cap), targets)


class ClassHead(Head):
    """Logits over classes, of each row: `[B, C]`."""

    n_classes: int = 1
    pool: str = "mean"

    of_row: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext, targets: Targets | None = None) -> Answers:
        return self.choice(self.normed(pooled(x, ctx.segments, self.pool)), targets)


class LabelHead(Head):
    """Logits over classes, of each token: `[B, L, C]` or `[B, Q, C]`."""

    n_classes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext, targets: Targets | None = None) -> Answers:
        return self.choice(self.normed(at_positions(x, ctx.at)), targets)


class DecodedHead(Head):
    """Logits over classes, of each token, all from the last vector of its row: `[B, L, C]` or `[B, Q, C]`.

    Waves tell the places apart, and two layers that do not widen decode (MAD, https://arxiv.org/abs/2403.17844).
    """

    n_classes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext, targets: Targets | None = None) -> Answers:
        D, places = x.shape[-1], jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        last = jnp.broadcast_to(pooled(x, ctx.segments, "last")[:, None], x.shape)
        x = at_positions(Sinusoidal(amplitude=1.0, dtype=self.dtype, name="places").embed(last, places), ctx.at)
        for i in range(2):
            x = nn.gelu(dense(D, ("embed", None), self.dtype, f"decode_{i}", bias=True)(self.normed(x, f"norm_{i}")))
        return self.choice(self.normed(x), targets)


class ValueHead(Head):
    """Real numbers, of each vector or patch: `[B, L, C]`."""

    n_values: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, ctx: HeadContext) -> jax.Array:
        return self.linear(self.normed(x), self.n_values, "values")


def scored(logits: jax.Array, targets: Targets | None) -> Answers:
    return logits if targets is None else scores(logits, targets)


def over_vocabulary(
    x: jax.Array, unembed: Embed | Unembed, bias: jax.Array | None, readout: Readout, targets: Targets | None
) -> Answers:
    if targets is None:
        return vocabulary_logits(x, unembed.table, bias, readout)
    return vocabulary_scores(x, unembed.table, bias, readout, targets)


def at_positions(x: jax.Array, at: jax.Array | None) -> jax.Array:
    """The vectors at these positions, `[B, Q, D]`; None: all of them."""
    return x if at is None else at_places(x, at)


def pooled(x: jax.Array, segments: jax.Array | None, pool: str) -> jax.Array:
    """One vector a row, `[B, D]`: the first, or the mean or last of those that are not padding."""
    B, L, _ = x.shape
    if pool == "cls":
        return x[:, 0]
    real = jnp.ones((B, L), bool) if segments is None else segments > 0
    if pool == "last":
        last = jnp.max(jnp.where(real, jnp.arange(L), 0), axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    weight = real.astype(wide(x.dtype))
    total = jnp.einsum("bl,bld->bd", weight, x, preferred_element_type=weight.dtype)
    return (total / jnp.maximum(weight.sum(1, keepdims=True), 1)).astype(x.dtype)
