"""The GPU kernels of B2S6's scan, interpreted, against the recurrence in float64; and that they lower for a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from model.contract import Context
from model.errors import UserError
from model.mixers import b2s6
from model.mixers.b2s6 import B2S6
from model.ops import fused_modes as op
from tests import zoo
from tests.test_fused_selective import for_a_gpu, values_and_gradients

B, J, D, N = 2, 2, 6, 4
COMPLEX = ("A", "B", "bias", "h0")


def inputs(L: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens, maps = (B, L, J, D), (B, L, J, N)
    shapes = dict(x=tokens, dt=tokens, A=(N,), B=maps, C=maps, bias=(J, D, N), h0=(B, J, D, N))
    made = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    made |= {name: made[name] + 1j * rng.normal(size=shapes[name]) for name in COMPLEX}
    return made | {"dt": np.exp(made["dt"] - 2), "A": -0.5 + 3j * np.arange(N)}


def narrow(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: leaf.astype(np.complex64 if name in COMPLEX else np.float32) for name, leaf in x.items()}


def recurrence(x, dt, A, B, C, bias, h0, keep):
    def step(h, token):
        x, dt, B, C, keep = token
        left = jnp.exp(dt[..., None] * A)
        h = keep[:, None, None, None] * left * h + (left - 1) * (B[..., None, :] + bias) * x[..., None]
        return h, jnp.sum(h.real * C[..., None, :], axis=-1)

    tokens = (jnp.moveaxis(leaf, 1, 0) for leaf in (x, dt, B, C, keep))
    h, y = lax.scan(step, h0, tuple(tokens))
    return jnp.moveaxis(y, 0, 1), h


def in_parts(run, x: dict) -> dict[str, np.ndarray]:
    """Values and gradients, complex numbers as two: gradients by these are what any convention agrees on."""
    split = {
        f"{name}.{part}": getattr(leaf, part) if name in COMPLEX else leaf
        for name, leaf in x.items()
        for part in (("real", "imag") if name in COMPLEX else ("",))
    }

    def parts(**split):
        whole = {name: split[f"{name}."] for name in x if name not in COMPLEX}
        y, h = run(**whole, **{name: lax.complex(split[f"{name}.real"], split[f"{name}.imag"]) for name in COMPLEX})
        return y, jnp.stack([h.real, h.imag])

    return values_and_gradients(parts, split)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("L", "P", "documents"),
    [(64, 1, False), (100, 1, True), (300, 4, False), (257, 2, True)],
    ids=["a chunk", "documents", "parts", "documents in parts"],
)
def test_kernels_are_the_recurrence(L, P, documents):
    x = inputs(L)
    keep = np.random.default_rng(2).random((B, L)) > 0.05 if documents else None
    with jax.enable_x64(True):
        kept = jnp.ones((B, L)) if keep is None else jnp.asarray(keep, float)
        truth = in_parts(lambda **x: recurrence(**x, keep=kept), jax.tree.map(jnp.asarray, x))
    found = in_parts(
        lambda **x: op.fused_modes(**x, keep=None if keep is None else jnp.asarray(keep), P=P, interpret=True),
        narrow(x),
    )
    for name, want in truth.items():
        assert np.abs(found[name] - want).max() <= 2e-5 * np.abs(want).max(), name


def test_short_steps_lose_nothing():
    """e^{dt A} - 1 of a step of a millionth is not what is left of 1."""
    x = inputs(64) | {"dt": np.full((B, 64, J, D), 1e-6), "h0": np.zeros((B, J, D, N), complex)}
    with jax.enable_x64(True):
        truth, _ = recurrence(**jax.tree.map(jnp.asarray, x), keep=jnp.ones((B, 64)))
    y, _ = op.fused_modes(**narrow(x), P=1, interpret=True)
    np.testing.assert_allclose(y, truth, atol=2e-5 * np.abs(truth).max())


@pytest.mark.quick
def test_how_far_a_step_moves_is_known_at_any_length():
    """Of it, a millionth; and what float32 does not know of the angle. Across where one formula hands on to the other,
    through many turns, and where nothing is left."""
    A = np.array([-0.5, -0.5 + 3j, -0.01 + 100j, -20 + 1j, -1e-6, 0.1 - 2j], np.complex64)
    dt = np.float32(np.exp(np.linspace(np.log(1e-7), np.log(300), 4096)))
    see = dict(A=np.stack([A.real, A.imag]), bias=np.zeros((2, len(A), len(dt))))

    def far(dt):
        token = op.Token(dt, None, None, None, None, 1.0)
        return lax.complex(*op.far(op.constants(see)[1], token))

    z = dt.astype(float) * A.astype(complex)[:, None]
    truth, angle = np.expm1(z), np.abs(z.imag) * np.exp(z.real)
    assert (np.abs(jax.jit(far)(dt) - truth) <= 1e-6 * np.abs(truth) + 3e-7 * angle).all()


@pytest.mark.quick
def test_kernels_lower_for_a_gpu():
    text = for_a_gpu(lambda x: op.fused_modes(**x, keep=jnp.ones((B, 256), bool), P=2), narrow(inputs(256)))
    assert all(f'name = "modes_{kernel}' in text for kernel in ("ends", "outputs", "adjoints", "gradients"))


def test_rows_read_both_ways_are_those_of_the_recurrence(monkeypatch):
    """In one launch, each with the C of its way; of documents too, with padding between them."""
    monkeypatch.setattr(op, "fused_modes", partial(op.fused_modes, interpret=True))
    monkeypatch.setattr(b2s6, "kernels_lack", lambda u, A: [])
    draw, maps = np.random.default_rng(0).normal, (J, D, N)
    values = dict(w=draw(size=(J, D)), b=draw(size=(J, D)) - 2, A=-0.5 + 3j * np.arange(N), C=draw(size=(2, *maps)))
    values |= {name: draw(size=maps) + 1j * draw(size=maps) for name in ("B_weight", "B_bias")}
    values = {k: v.astype(np.complex64 if np.iscomplexobj(v) else np.float32) for k, v in values.items()}
    u, start = draw(size=(B, 40, J * D)).astype(np.float32), jnp.zeros((B, J * D, N), jnp.complex64)
    ctx = zoo.context([[1] * 15 + [0] * 5 + [2] * 20, [1] * 40])
    y, h = b2s6.b2s6_recurrence(u, start, ctx, "fused", **values)
    true_y, true_h = b2s6.b2s6_recurrence(u, start, ctx, "sequential", **values)
    real = np.asarray(ctx.segments) > 0
    assert np.abs(y - true_y)[real].max() <= 2e-5 * np.abs(true_y).max()
    assert np.abs(h - true_h).max() <= 2e-5 * np.abs(true_h).max()


@pytest.mark.quick
def test_asked_for_by_name_it_says_what_it_lacks():
    mixer, x = B2S6(width=16, blocks=2, state=12, implementation="fused"), jnp.zeros((1, 8, 16))
    with pytest.raises(UserError, match=r"'fused' cannot serve the platform cpu .*; 6 modes .*'chunked'"):
        mixer.init(jax.random.key(0), x, Context())
