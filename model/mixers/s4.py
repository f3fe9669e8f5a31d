"""S4: a state space whose matrix is diagonal plus low rank (https://arxiv.org/abs/2111.00396).

`A = Lambda - P P^*`: one P on both sides keeps A stable whatever is learned (https://arxiv.org/abs/2202.09729). A is
made discrete by the bilinear rule, whose inverses stay diagonal plus low rank; a zero-order hold would need its
exponential. No form has a matrix of N x N. Sums over modes are over conjugate pairs, so P^* x is a real number.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model import placement
from model.contract import Context
from model.mixers.state_space import Continuous, System, check_length, filled, marks, of_channels, paired
from model.ops.conv import TOKENS
from model.ops.hippo import legs_modes
from model.ops.stretches import by_channels

HELD = {"cpu": 2**20, "gpu": 2**24, "tpu": 2**24}  # numbers of the Cauchy matrix, M x D x N, held at once
CHUNK = 64  # tokens whose states the backward pass holds at once


def dplr_kernel(Lambda: jax.Array, P: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array, L: int) -> jax.Array:
    """The convolution kernel `C A^l B` of the discrete system, `[L, D]`; Lambda, P, B, C: [D, N]; dt: [D].

    Its generating function `K(z) = C (1 - A z)^-1 B` is a few sums over modes of `v / (g(z) - Lambda)`, the Cauchy
    kernel, as the low-rank part is taken out of the inverse by Woodbury's identity. It is read at M points on a circle
    of radius r < 1, where an inverse Fourier transform finds `r^l (K_l + r^M K_(l+M) + ...)`. With M = 4 L and r^M the
    rounding error, what wraps around is lost in rounding and r^-l costs little; no power of A need be known, and so
    the parameters mean the same at any length, unlike a C that has `1 - A^L` in it.
    """
    check_length(L)
    M, half = 4 * L, dt / 2
    sigma = -np.log(np.finfo(dt.dtype).eps) / (2 * M)  # r = exp(-2 sigma)
    pole = half[:, None] * Lambda
    v = jnp.stack([C * B, C * P, P.conj() * B, P.conj() * P])
    # v / (x - pole) and its conjugate partner make one fraction with real coefficients: half the work, none complex.
    above = 2 * jnp.stack([v.real, -(v * pole.conj()).real])
    below = -2 * pole.real, pole.real**2 + pole.imag**2

    @jax.checkpoint
    def generating(phase):
        # z = exp(-2 (sigma + i phase)), g(z) = (2 / dt) sinh / cosh: no 1 - z near 1, and no 1 + z near -1.
        cos, sin = jnp.cos(phase), jnp.sin(phase)
        sinh = lax.complex(np.sinh(sigma) * cos, np.cosh(sigma) * sin)
        cosh = lax.complex(np.cosh(sigma) * cos, np.sinh(sigma) * sin)
        d = sinh**2 + below[0] * (sinh * cosh) + below[1] * cosh**2
        size = d.real**2 + d.imag**2
        real, imag = (jnp.einsum("ikdn,dn->ikd", above, part / size, precision="highest") for part in (d.real, -d.imag))
        first, second = lax.complex(real, imag)
        CB, CP, PB, PP = sinh * first + cosh * second
        w = half * cosh
        return half * np.exp(sigma) * lax.complex(cos, sin) * (CB - w * CP * PB / (1 + w * PP))

    phases = jnp.arange(M // 2 + 1).astype(dt.dtype) * (np.pi / M)
    spectrum = lax.map(generating, phases, batch_size=max(1, HELD[placement.platform()] // pole.size))
    growth = jnp.exp(2 * sigma * jnp.arange(L).astype(dt.dtype))
    return jnp.fft.irfft(spectrum, n=M, axis=0)[:L] * growth[:, None]


def pair_sum(v: jax.Array, x: jax.Array) -> jax.Array:
    """`sum_n v_n x_n` over all modes, of which half are given: a real number."""
    return 2 * jnp.sum(v.real * x.real - v.imag * x.imag, axis=-1)


def dplr_recurrence(
    u: jax.Array,
    Lambda: jax.Array,
    P: jax.Array,
    B: jax.Array,
    C: jax.Array,
    dt: jax.Array,
    h0: jax.Array,
    ctx: Context,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The same map token by token, `[B, L, D]`, and the last state; O(N) a step."""
    if implementation is None:
        implementation = "chunked" if u.shape[1] > CHUNK else "sequential"
    marked, modes = marks(ctx), ("inner", None)

    def run(u, h0, Lambda, P, B, C, dt, *rows):
        tokens = dict(u=u) | dict(zip(marked, rows, strict=True))
        tokens = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tokens)
        h, y = RECURRENCES[implementation](dplr_step(Lambda, P, B, C, dt), h0, tokens)
        return jnp.swapaxes(y, 0, 1), h

    state = ("batch", *modes)
    axes = (TOKENS, state, *[modes] * 4, ("inner",), *[("batch", "length")] * len(marked))
    return by_channels(run, (u, h0, Lambda, P, B, C, dt, *marked.values()), axes, (TOKENS, state))


def dplr_step(Lambda: jax.Array, P: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array) -> Callable:
    """One token: its state and output from the state before it.

    The bilinear rule is half a step of `x' = A x` forward, the input, and half a step backward.
    """
    half = dt[:, None] / 2
    inverse = 1 / (1 - half * Lambda)
    # Woodbury: (1 - half A)^-1 v = w - gain inverse P (P^* w), with w = inverse v.
    gain = half * inverse * P / (1 + half * pair_sum(P.conj(), inverse * P)[:, None])

    def step(h, token):
        past = jnp.where(token["opens"][:, None, None], 0, h) if "real" in token else h
        v = (1 + half * Lambda) * past - half * P * pair_sum(P.conj(), past)[..., None]
        w = inverse * (v + dt[:, None] * B * token["u"][..., None])
        new = w - gain * pair_sum(P.conj(), w)[..., None]
        new = jnp.where(token["real"][:, None, None], new, h) if "real" in token else new
        return new, pair_sum(C, new)

    return step


def chunked(step: Any, h: jax.Array, tokens: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """One token after another; the backward pass recomputes the states of one chunk at a time."""
    whole = tokens["u"].shape[0] // CHUNK * CHUNK
    chunks = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, CHUNK, *leaf.shape[1:]), tokens)
    h, y = lax.scan(jax.checkpoint(lambda h, x: lax.scan(step, h, x), prevent_cse=False), h, chunks)
    h, rest = lax.scan(step, h, jax.tree.map(lambda leaf: leaf[whole:], tokens))
    return h, jnp.concatenate([y.reshape(whole, *y.shape[2:]), rest])


RECURRENCES = {"sequential": lax.scan, "chunked": chunked}


class S4(Continuous):
    """S4: HiPPO-LegS, learned; a state space per channel, a convolution in training."""

    implementation: Literal["convolution", *RECURRENCES] | None = None  # None picks

    groups: ClassVar[dict[str, str]] = {
        "log_dt": "ssm",
        "Lambda_real": "ssm",
        "Lambda_imag": "ssm",
        "P": "ssm",
        "B": "ssm",
        "C": "no_decay",
        "D": "no_decay",
    }

    def systems(self) -> list[System]:
        D, N, channels = self.width, self.state // 2, ("inner", None)
        modes, P, B, _ = legs_modes(self.state)

        def vector(name, start):
            parts = filled(np.stack([start, np.zeros(N)])[:, None])
            return paired(self.weight(name, parts, (2, D, N), (None, *channels)))

        dt = self.steps(D)
        Lambda = self.modes("Lambda", modes, (D, N), channels)
        P, B = vector("P", P), vector("B", B)

        def system(C):
            return of_channels(
                dplr_kernel,
                (Lambda, P, B, C, dt),
                lambda u, h0, ctx, form: dplr_recurrence(u, Lambda, P, B, C, dt, h0, ctx, form),
            )

        return [system(C) for C in self.readout("C", nn.initializers.normal(0.5**0.5), channels)]
