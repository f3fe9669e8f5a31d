"""The GPU kernels of linear attention, interpreted, against a loop in float64; and that they lower for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from model.ops.fused_channels import fused_channels
from model.ops.fused_state import fused_state
from tests.test_fused_ssd import made_for

B, H, K, V, Q = 2, 2, 16, 32, 16
KINDS = ("plain", "head", "channels")


def fused(kind, x, opens, chunk, interpret=True):
    run = fused_channels if kind == "channels" else fused_state
    return run(x["q"], x["k"], x["v"], x.get("a"), x["h0"], opens, chunk, interpret=interpret)


def loop(kind, x, opens):
    """The definition: a token after another."""

    def step(h, t):
        if "a" in t:
            h = jnp.exp(t["a"]).reshape(B, H, -1, 1) * h
        h = jnp.where(t["opens"][:, None, None, None], 0, h)
        h += t["k"][..., None] * t["v"][..., None, :]
        return h, jnp.einsum("bhk,bhkv->bhv", t["q"], h)

    tokens = {name: jnp.swapaxes(leaf, 0, 1) for name, leaf in x.items() if name != "h0"}
    h, y = lax.scan(step, x["h0"], tokens | {"opens": opens.T})
    return jnp.swapaxes(y, 0, 1), h


def inputs(kind: str, L: int, strength: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = dict(q=(B, L, H, K), k=(B, L, H, K), v=(B, L, H, V), h0=(B, H, K, V))
    shapes |= {"head": dict(a=(B, L, H)), "channels": dict(a=(B, L, H, K))}.get(kind, {})
    made = {name: rng.normal(size=shape) for name, shape in shapes.items()}
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
        ("plain", 63, False),
        ("head", 100, True),
        ("channels", 63, True),
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
    assert distance(kind, inputs(kind, length), documents(length) if cut else None) < 2e-6


@pytest.mark.scale
@pytest.mark.parametrize("strength", [1e-4, 0.1, 1e2, 1e6])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_any_decay_is_exact(kind, strength):
    assert distance(kind, inputs(kind, 64, strength)) < 2e-6


@pytest.mark.scale
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_may_be_longer_than_a_row(kind):
    assert distance(kind, inputs(kind, 40), documents(40), chunk=64) < 2e-6


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.scale)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_lower_for_a_gpu(kind, dtype):
    x = {name: jnp.asarray(leaf, dtype if name in "qkv" else "float32") for name, leaf in inputs(kind, 200).items()}

    def pulled(x, opens):
        out, pull = jax.vjp(lambda x: fused(kind, x, opens, 64, interpret=False), x)
        return out, pull(out)

    with made_for("NVIDIA H200"):
        text = jax.jit(pulled).trace(x, documents(200)).lower(lowering_platforms=("cuda",)).as_text()
    own = kind if kind in ("channels",) else "state"
    assert all(f'name = "{own}_{kernel}' in text for kernel in ("added", "outputs", "gradients"))
    assert 'name = "state_carried' in text
