"""B2S6: Mamba's selection in blocks, beside a part that does not select (https://arxiv.org/abs/2505.09022)."""

from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context
from model.documents import reverse
from model.layers import check_divides
from model.mixers.mamba import inverse_softplus_dt
from model.mixers.s4d import INITS, starting_modes
from model.mixers.state_space import StateSpace, System, boundaries, paired
from model.ops.fused import needs_unmet, refuse
from model.ops.named import running
from model.ops.scan import IMPLEMENTATIONS as SCANS
from model.ops.scan import diagonal_scan
from model.settings import Dim, Positive

Array = jax.Array


def b2s6_recurrence(
    u: Array,
    h0: Array,
    ctx: Context,
    implementation: str | None,
    *,
    w: Array,
    b: Array,
    A: Array,
    B_weight: Array,
    B_bias: Array,
    C: Array,
) -> tuple[Array, Array]:
    """`h_t = exp(dt_t A) h_{t-1} + (exp(dt_t A) - 1) / A (B_t + B_bias) u_t`, `y_t = 2 Re C_t h_t`, and the last state.

    Of J blocks of P channels each decides alone, by its part of the token: `dt_t = softplus(w u_t + b)`,
    `B_t = B_weight u_t` and `C_t = C u_t`. B_bias is a channel's own. u, y: [B, L, J P]; h0: [B, J P, N]; w, b: [J, P];
    A: [N]; B_weight, B_bias: [J, P, N]; C: [W, J, P, N], of the W ways that a row is read, forward and maybe
    backward too: outputs are their sum, and the state is that of the first. One scan runs them all, as rows of its own:
    there are often too few to fill a GPU.
    """
    rows, L, D = u.shape
    inputs = read(u.reshape(rows, L, *w.shape), ctx, len(C))
    h0 = jnp.repeat(h0.reshape(rows, *w.shape, -1), len(C), axis=0)
    shared = (w, b, A, B_weight / A, B_bias / A, C)
    if implementation is None and L > 1 and not kernels_lack(u, A):
        implementation = "fused"
    if implementation == "fused":
        refuse("scan", kernels_lack(u, A))
        with running("scan", implementation):
            y, h = by_kernels(inputs, h0, *shared)
    else:
        y, h = diagonal_scan(expand, contract, h0, inputs, shared, implementation=implementation)
    forward, *backward = jnp.moveaxis(y.reshape(rows, -1, L, D), 1, 0)
    return sum((one[:, ::-1] for one in backward), start=forward), h.reshape(rows, len(C), D, -1)[:, 0]


def read(x: Array, ctx: Context, W: int) -> dict[str, Array]:
    """What the scan is told of each row, in one of W ways after another: `[B W, L, ...]`."""
    ways = [dict(x=x) | boundaries(ctx)]
    if W > 1:
        ways.append(dict(x=x[:, ::-1]) | boundaries(reverse(ctx)))
    return jax.tree.map(lambda *leaves: jax.lax.collapse(jnp.stack(leaves, axis=1), 0, 2), *ways)


def expand(inputs, w, b, A, B_weight, B_bias, C):
    """With the tokens that a scan has at hand: of all of them, what they choose would be larger than they are."""
    x, (dt, forgets) = inputs["x"], steps(inputs, w, b)
    grown = jnp.expm1(dt[..., None] * A)
    a, B = 1 + grown, written(x, B_weight)[..., None, :] + B_bias
    if forgets is not None:
        a = jnp.where(forgets[..., None, None, None], 0, a)
    return a, grown * B * x[..., None]


def contract(h, inputs, w, b, A, B_weight, B_bias, C):
    x = inputs["x"]
    return 2 * jnp.sum(h.real * of_each_way(x, C, x.ndim - 3)[..., None, :], axis=-1)


def by_kernels(inputs, h0, w, b, A, B_weight, B_bias, C):
    from model.ops.fused_modes import fused_modes  # here: Pallas takes a second to load

    x, (dt, forgets) = inputs["x"], steps(inputs, w, b)
    keep = None if forgets is None else ~forgets
    return fused_modes(x, dt, A, written(x, B_weight), 2 * of_each_way(x, C, 0), B_bias, h0, keep)


def steps(inputs: dict[str, Array], w: Array, b: Array) -> tuple[Array, Array | None]:
    """dt, `[..., J, P]`, and where the past is forgotten, if anywhere."""
    dt = jax.nn.softplus(jnp.einsum("...jp,jp->...j", inputs["x"], w)[..., None] + b)
    if "real" not in inputs:
        return dt, None
    dt = jnp.where(inputs["real"][..., None, None], dt, 0)  # which leaves the state as it was
    return dt, inputs["opens"] & inputs["real"]


def chosen(x: Array, weight: Array) -> Array:
    """What a block's part of the token makes of a weight, for all its channels: `[..., J, N]`."""
    return jnp.einsum("...jp,jpn->...jn", x, weight)


def of_each_way(x: Array, C: Array, rows: int) -> Array:
    """The same, where the rows of W ways, which are an axis of x, have weights of their own."""
    x = x.reshape(*x.shape[:rows], -1, len(C), *x.shape[rows + 1 :])
    return jax.lax.collapse(jax.vmap(chosen, (rows + 1, 0), rows + 1)(x, C), rows, rows + 2)


def written(x: Array, weight: Array) -> Array:
    return jax.lax.complex(chosen(x, weight.real), chosen(x, weight.imag))


def kernels_lack(u: Array, A: Array) -> list[str]:
    """Why the kernels cannot serve a call; empty if they can. u: [B, L, D]; A: [N]."""
    reasons, N = needs_unmet(u, dtypes=("float32",)), len(A)
    if N & (N - 1):
        reasons.append(f"{N} modes (it takes a power of two)")
    return reasons


class B2S6(StateSpace):
    """Block-biased S6: complex modes, blocks of channels that select each for itself, and a bias that does not select.

    As in the paper's Long Range Arena models it stands where S4D does, between a skip, a GELU and a gated output. How
    weights start is not said there: here steps and modes as Mamba's and S4D's, the others at random, so that outputs
    have the size of S4D's. w starts small: steps ten times as long would turn the fastest modes in whole circles.
    """

    blocks: Dim = 8
    A_init: Literal[*INITS] = "lin"  # as S4D's
    dt_min: Positive = 0.001
    dt_max: Positive = 0.1
    implementation: Literal[*SCANS, "fused"] | None = None  # of the scan; None picks

    convolves: ClassVar[bool] = False
    groups: ClassVar[dict[str, str]] = {
        "w": "ssm",
        "b": "ssm",
        "A_real": "ssm",
        "A_imag": "ssm",
        "B_bias": "no_decay",
        "D": "no_decay",
    }

    def systems(self) -> list[System]:
        J, P, N, normal = self.blocks, self.width // self.blocks, self.state // 2, nn.initializers.normal
        own, maps = ("inner", None), (None, "inner", None, None)
        shared = dict(
            w=self.weight("w", normal(0.1 * P**-0.5), (J, P), own),
            b=self.weight("b", inverse_softplus_dt(self.dt_min, self.dt_max), (J, P), own),
            A=self.modes("A", starting_modes(self.A_init, N), (N,), (None,)),
            B_weight=paired(self.weight("B_weight", normal(0.5 * P**-0.5), (2, J, P, N), maps)),
            B_bias=paired(self.weight("B_bias", normal(0.5), (2, J, P, N), maps)),
        )
        C = self.weight("C", normal(P**-0.5), (1 if self.causal else 2, J, P, N), maps)
        return [System(None, partial(b2s6_recurrence, **shared, C=C))]

    def check(self) -> None:
        check_divides("b2s6's blocks", self.blocks, "its width,", self.width)
