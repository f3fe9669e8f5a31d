"""The GPU kernels of linear attention, interpreted, against a loop in float64; and that they lower for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from model.ops.fused_state import fused_state
from tests.test_fused_ssd import made_for

B, H, K, V, Q = 2, 2, 16, 32, 16


def fused(x, opens, chunk=Q):
    return fused_state(x["q"], x["k"], x["v"], x.get("a"), x["h0"], opens, chunk, interpret=True)


def loop(x, opens):
    """The definition: a token after another."""

    def step(h, t):
        h = jnp.exp(t["a"])[..., None, None] * h if "a" in t else h
        h = jnp.where(t["opens"][:, None, None, None], 0, h) + t["k"][..., None] * t["v"][..., None, :]
        return h, jnp.einsum("bhk,bhkv->bhv", t["q"], h)

    tokens = {name: jnp.swapaxes(leaf, 0, 1) for name, leaf in x.items() if name != "h0"}
    h, y = lax.scan(step, x["h0"], tokens | {"opens": opens.T})
    return jnp.swapaxes(y, 0, 1), h


def inputs(kind: str, L: int, strength: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = dict(q=(B, L, H, K), k=(B, L, H, K), v=(B, L, H, V), h0=(B, H, K, V))
    if kind == "head":
        shapes["a"] = (B, L, H)
    made = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return made | ({"a": -strength * np.exp(made["a"])} if "a" in made else {})


def values_and_gradients(run, x, opens):
    """Outputs, and gradients of a weighted sum of outputs and last state."""

    def objective(x):
        out = run(x, opens)
        rng = np.random.default_rng(1)
        return sum(jnp.sum(leaf * rng.normal(size=leaf.shape).astype(leaf.dtype)) for leaf in out), out

    return jax.tree.map(np.asarray, jax.jit(jax.grad(objective, has_aux=True))(x))


def distance(x, opens, chunk=Q):
    """The largest error of an array, by the array's largest number."""
    with jax.enable_x64(True):
        none = jnp.zeros(x["q"].shape[:2], bool)
        true = values_and_gradients(loop, jax.tree.map(jnp.asarray, x), none if opens is None else opens)
    found = values_and_gradients(lambda *args: fused(*args, chunk), jax.tree.map(jnp.float32, x), opens)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max() / (np.abs(b).max() + 1e-9), found, true)
    return max(jax.tree.leaves(far))


def documents(L: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).random((B, L)) < 0.07)


@pytest.mark.parametrize(
    ("kind", "length", "cut"),
    [
        ("plain", 63, False),
        ("head", 100, True),
        *[
            pytest.param(kind, length, cut, marks=pytest.mark.scale)
            for kind in ("plain", "head")
            for length in (1, 7, 200)
            for cut in (False, True)
        ],
    ],
)
def test_kernels_are_the_recurrence(kind, length, cut):
    """Outputs, last state and every gradient, from a state that is not empty."""
    assert distance(inputs(kind, length), documents(length) if cut else None) < 2e-6


@pytest.mark.scale
@pytest.mark.parametrize("strength", [1e-4, 1e2, 1e6])
def test_any_decay_is_exact(strength):
    assert distance(inputs("head", 64, strength), None) < 2e-6


@pytest.mark.scale
def test_a_chunk_may_be_longer_than_a_row():
    assert distance(inputs("head", 40), documents(40), chunk=64) < 2e-6


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.scale)])
@pytest.mark.parametrize("kind", ["plain", "head"])
def test_kernels_lower_for_a_gpu(kind, dtype):
    x = {name: jnp.asarray(leaf, dtype if name in "qkv" else "float32") for name, leaf in inputs(kind, 200).items()}

    def pulled(x, opens):
        run = lambda x: fused_state(x["q"], x["k"], x["v"], x.get("a"), x["h0"], opens, 64)  # noqa: E731
        out, pull = jax.vjp(run, x)
        return out, pull(out)

    with made_for("NVIDIA H200"):
        text = jax.jit(pulled).trace(x, documents(200)).lower(lowering_platforms=("cuda",)).as_text()
    assert all(f'name = "state_{kernel}' in text for kernel in ("added", "carried", "outputs", "gradients"))
