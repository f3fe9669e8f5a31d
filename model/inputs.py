"""From what a task brings to a row of vectors `[B, L, D]`: token ids, real vectors, images cut into patches.

An input is called with the task's rows, their segments and whatever else it takes, by name.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.asked import Asked, Image, Vectors
from model.contract import wide
from model.layers import Dense, Embed, check_divides

Segments = jax.Array | None


class Row(NamedTuple):
    """What a backbone reads."""

    x: jax.Array  # [B, L, D]
    segments: Segments  # [B, L]
    front: int = 0  # vectors in front of those that the task counts


def patches(image: jax.Array, size: int) -> jax.Array:
    """Squares of `size` x `size` pixels, row by row, `[B, N, size * size * C]`; image: [B, height, width, C]."""
    B, height, width, C = image.shape
    cut = image.reshape(B, height // size, size, width // size, size, C)
    return jnp.einsum("brycxv->brcyxv", cut).reshape(B, -1, size * size * C)


def patch_grid(image: Image, patch: int) -> tuple[int, int]:
    """Rows and columns of an image's patches."""
    for side in ("height", "width"):
        check_divides("model.patch", patch, f"the image's {side}", getattr(image, side))
    return image.height // patch, image.width // patch


def n_values(inputs: Vectors | Image, patch: int) -> int:
    """Numbers in a vector, or in a patch."""
    return inputs.channels * (patch**2 if isinstance(inputs, Image) else 1)


class Input(nn.Module):
    """What all inputs have in common: the width of their vectors, and what others ask of them."""

    width: int
    dtype: Any = jnp.float32

    vocab_size: ClassVar[int] = 0  # it takes no tokens
    pads_between: ClassVar[bool] = False  # whether padding behind the task's rows comes to stand between its vectors

    def row_length(self, length: int) -> int:
        """Vectors that a task's rows of `length` tokens become."""
        return length

    @property
    def unembedding(self) -> Embed | None:
        """What the logits of a head can be tied to."""
        return None


class TokenInput(Input):
    """Token ids, `[B, L]`, each with a vector of its own."""

    vocab_size: int = 0
    scale: float = 1.0  # of the vectors
    deviation: float = 0.02  # of the vectors at the start

    def setup(self) -> None:
        self.embed = Embed(self.vocab_size, self.width, self.deviation, self.dtype)

    def __call__(self, tokens: jax.Array, segments: Segments = None) -> Row:
        x = self.embed(tokens)
        return Row(x if self.scale == 1 else x * jnp.asarray(self.scale, x.dtype), segments)

    @property
    def unembedding(self) -> Embed:
        return self.embed


class LinearInput(Input):
    """Real vectors, `[B, L, C]`, or an image's patches (https://arxiv.org/abs/2010.11929), through a linear map."""

    patch: int | None = None  # the side of the squares that images `[B, height, width, C]` are cut into
    n_patches: int = 0
    masks: bool = False  # whether some may be masked: one learned vector then stands in their place

    def setup(self) -> None:
        self.embed = Dense((self.width,), (None, "embed"), bias=True, dtype=self.dtype)
        if self.masks:
            init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("embed",))
            self.mask = self.param("mask", init, (self.width,), wide(self.dtype))

    def __call__(self, values: jax.Array, segments: Segments = None, masked: jax.Array | None = None) -> Row:
        """`masked`, of each vector `[B, L]` or each pixel `[B, height, width]`; a patch is masked as a whole."""
        x = self.embed(patches(values, self.patch) if self.patch else values)
        if masked is not None:
            masked = patches(masked[..., None], self.patch)[..., :1] if self.patch else masked[..., None]
            x = jnp.where(masked, self.mask.astype(x.dtype), x)
        return Row(x, segments)

    def row_length(self, length: int) -> int:
        return self.n_patches if self.patch else length


class ImageTextInput(TokenInput):
    """An image's patches, and behind them the tokens of a text."""

    image: Callable[..., LinearInput] = LinearInput

    def setup(self) -> None:
        super().setup()
        self.seen = self.image(width=self.width, dtype=self.dtype)

    def __call__(self, tokens: jax.Array, segments: Segments = None, image: jax.Array | None = None) -> Row:
        text = super().__call__(tokens, segments)
        if image is None:  # a text that goes on from a state
            return text
        x = self.seen(image).x
        if segments is not None:  # the image belongs to the row's first document
            first = jnp.argmax(segments > 0, axis=1, keepdims=True)
            whose = jnp.take_along_axis(segments, first, axis=1)
            segments = jnp.concatenate([jnp.broadcast_to(whose, x.shape[:2]), segments], axis=1)
        return Row(jnp.concatenate([x, text.x], axis=1), segments, front=x.shape[1])

    def row_length(self, length: int) -> int:
        return self.image(width=self.width, parent=None).n_patches + length


class PairInput(TokenInput):
    """Both texts of a pair in one row, a separator between them: a cross-encoder, as BERT reads pairs.

    The separator is the last of the ids. Vectors of the two sides differ by one that is learned for each.
    """

    pads_between: ClassVar[bool] = True

    def setup(self) -> None:
        super().setup()
        self.sides = Embed(2, self.width, dtype=self.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        segments: Segments = None,
        other: jax.Array | None = None,
        other_segments: Segments = None,
    ) -> Row:
        (B, L), M = tokens.shape, other.shape[1]
        separator = jnp.full((B, 1), self.vocab_size - 1, tokens.dtype)
        x = super().__call__(jnp.concatenate([tokens, separator, other], axis=1)).x
        side = (jnp.arange(L + 1 + M) > L).astype(jnp.int32)
        if segments is not None or other_segments is not None:  # one document: each text sees the other
            real = [jnp.ones(t.shape, bool) if s is None else s > 0 for t, s in ((tokens, segments), (separator, None))]
            real += [jnp.ones(other.shape, bool) if other_segments is None else other_segments > 0]
            segments = jnp.concatenate(real, axis=1).astype(jnp.int32)
        return Row(x + self.sides(side), segments)

    def row_length(self, length: int) -> int:
        return 2 * length + 1


def input_for(c: Mapping[str, Any], asked: Asked, dtype: Any) -> Callable[..., Input]:
    """The input that a task's rows call for, by the settings of a config's model section."""
    shared = dict(width=c["width"], dtype=dtype)
    image = asked.image or asked.inputs
    linear = partial(LinearInput)
    if isinstance(image, Image):
        linear = partial(LinearInput, patch=c["patch"], n_patches=math.prod(patch_grid(image, c["patch"])))
    if asked.inputs is not None:
        return partial(linear, **shared, masks=asked.values)
    tokens = dict(shared, vocab_size=asked.vocab_size, scale=c["embed_scale"], deviation=c["embed_init"])
    if asked.pair:
        return partial(PairInput, **tokens | dict(vocab_size=asked.vocab_size + 1))
    return partial(ImageTextInput, **tokens, image=linear) if image else partial(TokenInput, **tokens)
