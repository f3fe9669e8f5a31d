"""The GPU kernels of linear attention, interpreted, against a loop in float64; and that they lower for a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from model.ops import fused_channels, fused_segments, matrix_state
from model.ops import fused_delta as delta
from model.ops.fused_state import fused_state
from tests.test_fused_ssd import made_for

B, H, K, V, Q = 2, 2, 16, 32, 16
KINDS = ("plain", "head", "channels", "delta", "gated delta")


def fused(kind, x, opens, chunk, interpret=True):
    if "delta" in kind:
        args = (x["q"], x["k"], x["v"], x["beta"], x.get("a"), x["h0"], opens, chunk)
        return delta.fused_delta(*args, interpret=interpret)
    run = fused_channels.fused_channels if kind == "channels" else fused_state
    return run(x["q"], x["k"], x["v"], x.get("a"), x["h0"], opens, chunk, interpret=interpret)


def loop(kind, x, opens):
    """The definition: a token after another."""

    def step(h, t):
        if "a" in t:
            h = jnp.exp(t["a"]).reshape(B, H, -1, 1) * h
        h = jnp.where(t["opens"][:, None, None, None], 0, h)
        u = t["v"]
        if "delta" in kind:
            u = t["beta"][..., None] * (u - jnp.einsum("bhk,bhkv->bhv", t["k"], h))
        h += t["k"][..., None] * u[..., None, :]
        return h, jnp.einsum("bhk,bhkv->bhv", t["q"], h)

    tokens = {name: jnp.swapaxes(leaf, 0, 1) for name, leaf in x.items() if name != "h0"}
    h, y = lax.scan(step, x["h0"], tokens | {"opens": opens.T})
    return jnp.swapaxes(y, 0, 1), h


def inputs(kind: str, L: int, strength: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = dict(q=(B, L, H, K), k=(B, L, H, K), v=(B, L, H, V), h0=(B, H, K, V))
    if kind not in ("plain", "delta"):
        shapes["a"] = (B, L, H, K) if kind == "channels" else (B, L, H)
    made = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if "delta" in kind:
        made["beta"] = rng.uniform(size=(B, L, H))
        made["k"] /= np.linalg.norm(made["k"], axis=-1, keepdims=True)
    return made | ({"a": -strength * np.exp(made["a"])} if "a" in made else {})


def values_and_gradients(run, kind, x, opens, *args):
    """Outputs, and gradients of a weighted sum of outputs and last state."""

    def objective(x):
        out = run(kind, x, opens, *args)
        rng = np.random.default_rng(1)
        return sum(jnp.sum(leaf * rng.normal(size=leaf.shape).astype(leaf.dtype)) for leaf in out), out

    return jax.tree.map(np.asarray, jax.jit(jax.grad(objective, has_aux=True))(x))


def distance(kind, x, opens=None, chunk=Q):
    """The largest error of an array, by the array's largest number."""
    with jax.enable_x64(True):
        none = jnp.zeros(x["q"].shape[:2], bool)
        true = values_and_gradients(loop, kind, jax.tree.map(jnp.asarray, x), none if opens is None else opens)
    found = values_and_gradients(fused, kind, jax.tree.map(jnp.float32, x), opens, chunk)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max() / (np.abs(b).max() + 1e-9), found, true)
    return max(jax.tree.leaves(far))


def documents(L: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).random((B, L)) < 0.07)


@pytest.mark.parametrize(
    ("kind", "length", "cut"),
    [
        pytest.param("plain", 63, False, marks=pytest.mark.scale),
        ("head", 100, True),
        ("channels", 63, True),
        ("gated delta", 63, True),
        *[
            pytest.param(kind, length, cut, marks=pytest.mark.scale)
            for kind in KINDS
            for length in (1, 7, 200)
            for cut in (False, True)
        ],
    ],
)
def test_kernels_are_the_recurrence(kind, length, cut):
    """Outputs, last state and every gradient, from a state that is not empty."""
    assert distance(kind, inputs(kind, length), documents(length) if cut else None) < 5e-6


@pytest.mark.scale
@pytest.mark.parametrize("strength", [1e-4, 0.1, 2, 1e2, 1e6])
@pytest.mark.parametrize("kind", ["head", "channels", "gated delta"])
def test_any_decay_is_exact(kind, strength):
    assert distance(kind, inputs(kind, 64, strength)) < 2e-5


@pytest.mark.scale
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_may_be_longer_than_a_row(kind):
    assert distance(kind, inputs(kind, 40), documents(40), chunk=64) < 2e-5


@pytest.mark.scale
@pytest.mark.parametrize("segments", [1, 4])  # of eight chunks
@pytest.mark.parametrize("kind", ["delta", "gated delta"])
def test_segments_at_once_are_one_after_another(kind, segments, monkeypatch):
    monkeypatch.setattr(fused_segments, "segments", lambda programs, chunks: segments)
    assert distance(kind, inputs(kind, 120, strength=0.1), documents(120)) < 2e-6


@pytest.mark.scale
def test_keys_that_are_alike_are_told_apart():
    """Every key nearly the same, and written whole: powers of A would grow beyond all bounds."""
    x = inputs("delta", 64)
    x["k"] = x["k"][:, :1] + 1e-2 * x["k"]
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    assert distance("delta", x | dict(beta=np.ones_like(x["beta"])), chunk=64) < 1e-5


def test_half_precision_has_room_for_decays(monkeypatch):
    """Tokens measured from a chunk's middle are up to e^64 times as large."""
    monkeypatch.setattr(matrix_state, "lacking", lambda *_: [])
    monkeypatch.setattr(fused_channels, "fused_channels", partial(fused_channels.fused_channels, interpret=True))
    x = {
        name: jnp.asarray(leaf, "float16" if name in "qkv" else "float32") for name, leaf in inputs("plain", 64).items()
    }
    w = jnp.full(x["k"].shape, -1.9)
    found, true = (
        matrix_state.matrix_state(x["q"], x["k"], x["v"], w, x["h0"], implementation=name)
        for name in ("fused", "sequential")
    )
    assert found[0].dtype == jnp.float16
    assert np.abs(np.asarray(found[0], float) - true[0]).max() < 2e-2 * np.abs(true[0]).max()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[pytest.param(kind, "bfloat16", marks=pytest.mark.quick) for kind in ("head", "channels", "gated delta")],
        *[pytest.param(kind, "bfloat16", marks=pytest.mark.scale) for kind in ("plain", "delta")],
        *[pytest.param(kind, "float32", marks=pytest.mark.scale) for kind in KINDS],
    ],
)
def test_kernels_lower_for_a_gpu(kind, dtype):
    x = {name: jnp.asarray(leaf, dtype if name in "qkv" else "float32") for name, leaf in inputs(kind, 200).items()}

    def pulled(x, opens):
        out, pull = jax.vjp(lambda x: fused(kind, x, opens, 64, interpret=False), x)
        return out, pull(out)

    with made_for("NVIDIA H200"):
        text = jax.jit(pulled).trace(x, documents(200)).lower(lowering_platforms=("cuda",)).as_text()
    both = [f"channels_{name}{way}" for name in ("outputs", "queries", "keys") for way in ("", "_by_halves")]
    made = {"channels": f"channels_added {' '.join(both)} state_carried"}
    made |= dict.fromkeys(("plain", "head"), "state_added state_carried state_outputs state_gradients")
    made |= dict.fromkeys(
        ("delta", "gated delta"), "delta_solved delta_states delta_pulled delta_keys state_outputs state_gradients"
    )
    assert all(f'name = "{name}' in text for name in made[kind].split())
