"""S4: a state space whose matrix is diagonal plus low rank (https://arxiv.org/abs/2111.00396).

`A = Lambda - P P^*`: one P on both sides keeps A stable whatever is learned (https://arxiv.org/abs/2202.09729). A is
made discrete by the bilinear rule, whose inverses stay diagonal plus low rank, and so a step is O(N); a zero-order
hold would need its exponential. Sums over modes are over conjugate pairs, so P^* x is a real number.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.contract import Context
from model.mixers.state_space import Continuous, System, boundaries, check_length, filled, of_channels, paired
from model.ops.conv import TOKENS
from model.ops.hippo import legs_modes
from model.ops.stretches import by_channels

CHUNK = 64  # tokens whose states the backward pass holds at once

product = partial(jnp.einsum, precision="highest")


def dplr_kernel(Lambda: jax.Array, P: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array, L: int) -> jax.Array:
    """The convolution kernel `C A^l B` of the discrete system, `[L, D]`; Lambda, P, B, C: [D, N]; dt: [D].

    With l = i c + j and c about the root of L, it is a product of matrices, of `C A^(i c)` and `A^j B`. Each list is
    doubled until it is long enough: A^k makes of its k entries the next k. So there are log L matrices of N x N, and
    what grows with the length is the work of a diagonal A. The paper's way needs no powers, but at every frequency
    fractions of every mode.
    """
    check_length(L)
    doublings = (L - 1).bit_length()
    c = 1 << doublings // 2
    _, inverse = halves(Lambda, P, dt)
    near, far = in_parts(inverse(dt[:, None] * B))[:, None], in_parts(2 * C.conj())[:, None]
    powers = squares(Lambda, P, dt, doublings)
    for E in powers[: doublings // 2]:
        near = jnp.concatenate([near, near + product("djn,dnm->djm", near, E)], axis=1)
    for E in powers[doublings // 2 :]:
        far = jnp.concatenate([far, far + product("dim,dnm->din", far, E)], axis=1)
    return product("din,djn->ijd", far[:, : -(-L // c)], near).reshape(-1, len(dt))[:L]


def squares(Lambda: jax.Array, P: jax.Array, dt: jax.Array, n: int) -> list[jax.Array]:
    """`A^k - 1` of the discrete A, for the first n of k = 1, 2, 4, ...: rows times them advance, `[D, N, N]` each.

    The difference from 1 keeps what A itself would round off of modes that are slow beside dt. Of fast ones A is near
    -1, and so the first square is made of `A - 1 = 2 H R` and `A + 1 = 2 R`, with H the continuous A times dt / 2 and R
    the inverse of 1 - H.
    """
    half_A, inverse = halves(Lambda, P, dt)
    one = np.eye(Lambda.shape[1])
    R = inverse(jnp.asarray(np.concatenate([one, 1j * one])[:, None], Lambda.dtype))
    found = [jnp.swapaxes(in_parts(x), 0, 1) for x in (2 * half_A(R), 4 * half_A(inverse(R)))]
    while len(found) < n:
        E = found[-1]
        found.append(2 * E + product("dnk,dkm->dnm", E, E))
    return found[:n]


def in_parts(x: jax.Array) -> jax.Array:
    """Real parts, then imaginary ones, along the last axis: a state of N/2 modes as N real numbers."""
    return jnp.concatenate([x.real, x.imag], axis=-1)


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
    marked, modes = boundaries(ctx), ("inner", None)

    def run(u, h0, Lambda, P, B, C, dt, *rows):
        tokens = dict(u=u) | dict(zip(marked, rows, strict=True))
        tokens = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tokens)
        h, y = RECURRENCES[implementation](dplr_step(Lambda, P, B, C, dt), h0, tokens)
        return jnp.swapaxes(y, 0, 1), h

    state = ("batch", *modes)
    axes = (TOKENS, state, *[modes] * 4, ("inner",), *[("batch", "length")] * len(marked))
    return by_channels(run, (u, h0, Lambda, P, B, C, dt, *marked.values()), axes, (TOKENS, state))


def dplr_step(Lambda: jax.Array, P: jax.Array, B: jax.Array, C: jax.Array, dt: jax.Array) -> Callable:
    """One token: its state and output from the state before it."""
    half_A, inverse = halves(Lambda, P, dt)

    def step(h, token):
        past = jnp.where(token["opens"][:, None, None], 0, h) if "real" in token else h
        new = inverse(past + half_A(past) + dt[:, None] * B * token["u"][..., None])
        new = jnp.where(token["real"][:, None, None], new, h) if "real" in token else new
        return new, pair_sum(C, new)

    return step


def halves(Lambda: jax.Array, P: jax.Array, dt: jax.Array) -> tuple[Callable, Callable]:
    """`x -> dt A x / 2` and `x -> (1 - dt A / 2)^-1 x`, `[..., D, N]`, in O(N).

    The bilinear rule is half a step of `x' = A x` forward, the input, and half a step backward.
    """
    half = dt[:, None] / 2
    poles, low_rank = half * Lambda, half * P
    diagonal = 1 / (1 - poles)
    # Woodbury: (1 - half A)^-1 v = w - gain P^* w, with w = diagonal v.
    gain = diagonal * low_rank / (1 + pair_sum(P.conj(), diagonal * low_rank)[:, None])

    def half_A(x):
        return poles * x - low_rank * pair_sum(P.conj(), x)[..., None]

    def inverse(v):
        w = diagonal * v
        return w - gain * pair_sum(P.conj(), w)[..., None]

    return half_A, inverse


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
