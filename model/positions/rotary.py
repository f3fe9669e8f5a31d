"""Rotary positions: queries and keys turned by their position, so that scores know the offset alone.

Long contexts turn slower (linear, NTK, YaRN, Llama 3, LongRoPE) or let far keys fade (xPos). The conventions of the
scalings are those of Hugging Face transformers, so that its settings carry over.
"""

import inspect
import math
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from model.contract import wide
from model.errors import UserError
from model.ops.turns import constant_turns, times
from model.positions.position import Position
from model.settings import Count, Length, NotNegative, Positive, above, at_least, at_most, shown

Theta = Annotated[float, above(1)]
LAYOUTS = ("half", "interleaved")

XPOS_GAMMA = 0.4
# Two scales differ by at most e^80, which leaves e^8 for the score itself: float32 ends at e^88.
XPOS_REACH = 80.0


def inverse_frequencies(dim: int, theta: float) -> np.ndarray:
    """Radians a position turns pair i by, `theta^(-2i/dim)`, `[dim/2]`."""
    return theta ** (-np.arange(0, dim, 2) / dim)


def angles(positions: jax.Array, frequencies: np.ndarray, dtype: Any) -> jax.Array:
    """`position * frequency` less whole turns, `[..., dim/2]`."""
    return times(positions[..., None], constant_turns(frequencies, wide(dtype)))


def turn_pairs(x: jax.Array, sin: jax.Array, cos: jax.Array, layout: str) -> jax.Array:
    """Turns pairs of the last axis: dims (i, i + K/2) if laid out in halves, (2i, 2i + 1) if interleaved."""
    if layout == "half":
        first, second = jnp.split(x, 2, axis=-1)
    else:
        first, second = x[..., ::2], x[..., 1::2]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1) if layout == "half" else jnp.stack(turned, -1).reshape(x.shape)


def linear(dim: int, theta: float, factor: float, original_length: int, span: int) -> tuple[np.ndarray, float]:
    """Position interpolation, `position / factor` (https://arxiv.org/abs/2306.15595)."""
    return inverse_frequencies(dim, theta) / factor, 1.0


def ntk(dim: int, theta: float, factor: float, original_length: int, span: int) -> tuple[np.ndarray, float]:
    """NTK-aware: a larger base, such that the slowest pair turns slower by the factor and the fastest as before."""
    return inverse_frequencies(dim, theta * factor ** (dim / (dim - 2))), 1.0


def dynamic_ntk(dim: int, theta: float, factor: float, original_length: int, span: int) -> tuple[np.ndarray, float]:
    """NTK-aware, by a factor that grows with the span and is 1 up to the original length."""
    return ntk(dim, theta, factor * max(span / original_length, 1.0) - (factor - 1), original_length, span)


def yarn_range(
    dim: int, theta: float, original_length: int, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, float]:
    """The pairs between which YaRN passes from kept to slowed."""

    def pair(turns: float) -> float:
        return dim * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def yarn_sharpness(factor: float, mscale: float) -> float:
    """What YaRN multiplies queries and keys by, since attention spreads out where there is more to see."""
    return 0.1 * mscale * math.log(factor) + 1


def yarn(
    dim: int,
    theta: float,
    factor: float,
    original_length: int,
    span: int,
    beta_fast: float,
    beta_slow: float,
    mscale: float,
    mscale_all_dim: float,
    truncate: bool,
) -> tuple[np.ndarray, float]:
    """YaRN: slow pairs interpolated, fast ones kept, scores made sharper (https://arxiv.org/abs/2309.00071)."""
    check_below("beta_slow", beta_slow, "beta_fast", beta_fast)
    low, high = yarn_range(dim, theta, original_length, beta_fast, beta_slow, truncate)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    temperature = yarn_sharpness(factor, mscale) / yarn_sharpness(factor, mscale_all_dim)
    return inverse_frequencies(dim, theta) * (slowed / factor + (1 - slowed)), temperature


def llama3(
    dim: int,
    theta: float,
    factor: float,
    original_length: int,
    span: int,
    low_freq_factor: float,
    high_freq_factor: float,
) -> tuple[np.ndarray, float]:
    """Llama 3: slow pairs interpolated, fast ones kept, by their turns in the original length (https://arxiv.org/abs/2407.21783)."""
    check_below("low_freq_factor", low_freq_factor, "high_freq_factor", high_freq_factor)
    plain = inverse_frequencies(dim, theta)
    turns = original_length * plain / (2 * np.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return plain * ((1 - kept) / factor + kept), 1.0


def longrope(
    dim: int,
    theta: float,
    factor: float,
    original_length: int,
    span: int,
    short_factor: tuple[float, ...],
    long_factor: tuple[float, ...],
) -> tuple[np.ndarray, float]:
    """LongRoPE, as in Phi-3: every pair slowed by a factor found for it, of two sets (https://arxiv.org/abs/2402.13753)."""
    for name, factors in dict(short_factor=short_factor, long_factor=long_factor).items():
        if len(factors) != dim // 2:
            raise UserError(
                f"model.rope.{name} has {len(factors)} factors, and {dim // 2} pairs turn; give one for each"
            )
    if original_length < 2:
        raise UserError("model.rope.scaling 'longrope' needs model.rope.original_length of at least 2; closest: 2")
    slower = np.asarray(long_factor if span > original_length else short_factor)
    return inverse_frequencies(dim, theta) / slower, math.sqrt(1 + math.log(factor) / math.log(original_length))


def check_below(low: str, lower: float, high: str, upper: float) -> None:
    if lower >= upper:
        raise UserError(f"model.rope.{low} {lower} must be below model.rope.{high} {upper}")


# Each takes what all scalings do, and then the settings of Rope that it alone reads.
SCALINGS = {
    "none": linear,
    "linear": linear,
    "ntk": ntk,
    "dynamic_ntk": dynamic_ntk,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
}
OWN = {name: tuple(inspect.signature(scale).parameters)[5:] for name, scale in SCALINGS.items()}


def rotary_dim(head_dim: int, fraction: float) -> int:
    """How many of the head's dims turn."""
    dim = int(fraction * head_dim + 1e-6)  # 0.58 of 100 is 57.99.. in floats
    if dim < 2 or dim % 2:
        what = "the head dim" if fraction == 1 else f"model.rope.fraction {fraction} of head dim {head_dim}"
        near = max(dim - 1, 2)
        hint = near if fraction == 1 else f"{near}, fraction={near / head_dim}"
        raise UserError(f"rope rotates pairs, so {what} must be even, not {dim}; closest: {hint}")
    return dim


class Rope(Position):
    """Rotary positions: queries and keys turned by their position (https://arxiv.org/abs/2104.09864).

    `dynamic_ntk` and `longrope` read the span, so a cache turns as a row of its room does, however few tokens it holds.
    """

    theta: Theta = 10_000.0
    fraction: Annotated[float, above(0), at_most(1)] = 1.0  # of the head's dims, the first ones, that turn
    layout: Literal[*LAYOUTS] = "half"  # which dims are a pair: (i, i + K/2), or (2i, 2i + 1)
    scaling: Literal[*SCALINGS] = "none"  # for lengths past the trained one
    factor: Annotated[float, at_least(1)] = 1.0  # of the scaling: the length wanted over the length trained at
    original_length: Length = 2048  # the length trained at; read by dynamic_ntk, yarn, llama3, longrope
    # YaRN keeps pairs that turn more than beta_fast times over the original length, and slows those below beta_slow.
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True  # YaRN: whether the pairs where that begins and ends are whole numbers
    # YaRN makes queries and keys larger by 0.1 mscale ln(factor) + 1. Of that, what mscale_all_dim would give is left
    # to mixers some of whose dims never turn (MLA). If one of the two is 0, transformers reads neither.
    mscale: NotNegative = 1.0
    mscale_all_dim: NotNegative = 0.0
    # Llama 3 keeps pairs that turn more than high_freq_factor times, and slows those below low_freq_factor.
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    # LongRoPE: how much slower each pair turns in spans up to the original length, and in longer ones.
    short_factor: tuple[Positive, ...] = ()
    long_factor: tuple[Positive, ...] = ()

    needs_attention: ClassVar[bool] = True

    @property
    def stretches(self) -> bool:
        return self.scaling in ("dynamic_ntk", "longrope")

    def check(self, head_dim: int) -> None:
        dim = rotary_dim(head_dim, self.fraction)
        if self.scaling == "none" and self.factor != 1:
            others = ", ".join(sorted(SCALINGS.keys() - {"none"}))
            raise UserError(
                f"model.rope.factor {self.factor} is read by no scaling; set it to 1.0, or the scaling to {others}"
            )
        for scaling, name in ((scaling, name) for scaling, names in OWN.items() for name in names):
            value, usual = getattr(self, name), getattr(Rope, name)
            if scaling != self.scaling and value != usual:
                raise UserError(
                    f"model.rope.{name} {shown(value)} is read by scaling {scaling!r} alone; set it to {usual}, "
                    f"or the scaling to {scaling}"
                )
        if self.scaling in ("ntk", "dynamic_ntk") and dim < 4:
            raise UserError(
                f"model.rope.scaling {self.scaling!r} needs at least 4 rotated dims, not {dim}; closest: linear"
            )
        self.frequencies(dim, span=1)

    def frequencies(self, dim: int, span: int) -> tuple[np.ndarray, float]:
        """The inverse frequencies `[dim/2]`, float64, and the temperature that sines and cosines are multiplied by."""
        own = {name: getattr(self, name) for name in OWN[self.scaling]}
        return SCALINGS[self.scaling](dim, self.theta, self.factor, self.original_length, span, **own)

    def sharpening(self, head_dim: int) -> tuple[float, float]:
        if self.mscale_all_dim:  # of all dims, as in DeepSeek; the rotations were made less sharp by as much
            both = yarn_sharpness(self.factor, self.mscale_all_dim) ** 2
            return both, both
        _, temperature = self.frequencies(rotary_dim(head_dim, self.fraction), span=1)
        return 1.0, temperature**2

    def rotate_queries(self, q: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        return self.rotate(q, positions, span)

    def rotate_keys(self, k: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        return self.rotate(k, positions, span)

    def rotate(self, x: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        self.check(x.shape[-1])
        dim = rotary_dim(x.shape[-1], self.fraction)
        inverse, temperature = self.frequencies(dim, span)
        angle = angles(positions, inverse, self.dtype)[..., None, :]
        sin, cos = temperature * jnp.sin(angle), temperature * jnp.cos(angle)
        turned = turn_pairs(x[..., :dim].astype(sin.dtype), sin, cos, self.layout).astype(x.dtype)
        return jnp.concatenate([turned, x[..., dim:]], axis=-1)


def xpos_scale(positions: jax.Array, dim: int, rate: float, span: int, dtype: Any) -> jax.Array:
    """`zeta^(rate (position - span/2))`, `[..., dim/2]`, with `zeta_i = (2i/dim + gamma) / (1 + gamma)`."""
    f = wide(dtype)
    zeta = (np.arange(0, dim, 2) / dim + XPOS_GAMMA) / (1 + XPOS_GAMMA)
    return jnp.exp((2 * positions - span)[..., None].astype(f) * jnp.asarray(rate / 2 * np.log(zeta), f))


class XPos(Position):
    """xPos: rotary positions whose scores fade with distance (https://arxiv.org/abs/2212.10554).

    The fading, `zeta^((i - j) / scale_base)`, is split over query and key, which shrink and grow exponentially with the
    position. So scores of later keys explode, and float32 holds lengths up to `limit()` and no more. Positions are
    counted from the middle of the span: that changes no score, and halves the exponents.
    """

    theta: Theta = 10_000.0
    layout: Literal[*LAYOUTS] = "half"  # which dims are a pair: (i, i + K/2), or (2i, 2i + 1)
    scale_base: Count = 512  # the distance over which scores fade by zeta, 0.29 for the fastest pair

    needs_attention: ClassVar[bool] = True
    causal_only: ClassVar[bool] = True

    def limit(self) -> int:
        return int(XPOS_REACH * self.scale_base / math.log((1 + XPOS_GAMMA) / XPOS_GAMMA))

    def check(self, head_dim: int) -> None:
        if head_dim % 2:
            near = max(head_dim - 1, 2)
            raise UserError(f"xpos rotates pairs, so the head dim must be even, not {head_dim}; closest: {near}")

    def rotate_queries(self, q: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        return self.rotate(q, positions, span, sign=1)

    def rotate_keys(self, k: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        return self.rotate(k, positions, span, sign=-1)

    def rotate(self, x: jax.Array, positions: jax.Array, span: int, sign: int) -> jax.Array:
        """Turned by the position, and scaled by zeta to its power, or with a sign of -1 by the inverse."""
        K, limit = x.shape[-1], self.limit()
        self.check(K)
        if span > limit:
            raise UserError(
                f"length {span} is past the {limit} that xpos can place with scale_base {self.scale_base}; "
                f"closest: model.xpos.scale_base={math.ceil(self.scale_base * span / limit)}"
            )
        angle = angles(positions, inverse_frequencies(K, self.theta), self.dtype)[..., None, :]
        scale = xpos_scale(positions, K, sign / self.scale_base, span, self.dtype)[..., None, :]
        turned = turn_pairs(x.astype(scale.dtype), scale * jnp.sin(angle), scale * jnp.cos(angle), self.layout)
        return turned.astype(x.dtype)
