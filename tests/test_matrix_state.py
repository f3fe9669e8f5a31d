"""The recurrence of additive linear attention against a loop in float64, and as products against itself as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.ops.matrix_state import matrix_state
from tests import zoo

B, H, K, V = 2, 3, 5, 4
DECAYS = {"none": None, "head": (H,), "channel": (H, K)}


def arrays(L: int, decay: str, strength: float = 1.0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = dict(q=(B, L, H, K), k=(B, L, H, K), v=(B, L, H, V), h0=(B, H, K, V))
    made = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    if DECAYS[decay]:
        made["w"] = -strength * np.exp(rng.normal(size=(B, L, *DECAYS[decay])))
    return made


def cuts(L: int) -> np.ndarray:
    """False where the past is forgotten: at a few places, other ones in each row."""
    return np.random.default_rng(1).random((B, L)) > 0.05


def definition(q, k, v, h0, w=None, keep=None):
    y, h = np.zeros(v.shape), h0.copy()
    for b in range(B):
        for t in range(q.shape[1]):
            for i in range(H):
                decay = 1.0 if w is None else np.exp(np.broadcast_to(w[b, t, i], K))[:, None]
                past = decay * h[b, i] if keep is None or keep[b, t] else 0
                h[b, i] = past + np.outer(k[b, t, i], v[b, t, i])
                y[b, t, i] = q[b, t, i] @ h[b, i]
    return y, h


def run(implementation, q, k, v, h0, w=None, keep=None):
    return matrix_state(q, k, v, w, h0, keep, implementation=implementation)


@pytest.mark.parametrize("implementation", ["sequential", "chunked"])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_recurrence_is_its_definition(decay, implementation):
    """In documents, from a state that is not empty, over more than a chunk."""
    L = 150
    given, keep = arrays(L, decay), cuts(L)
    with jax.enable_x64(True):
        got = jax.jit(run, static_argnums=0)(implementation, **given, keep=keep)
    for one, other in zip(got, definition(**given, keep=keep), strict=True):
        assert zoo.far(one, other) < 1e-12


def gradients(implementation, given, keep):
    rng = np.random.default_rng(7)
    weights = rng.normal(size=given["v"].shape), rng.normal(size=given["h0"].shape)

    def objective(given):
        out = run(implementation, **given, keep=keep)
        return sum(jnp.sum(leaf * weight) for leaf, weight in zip(out, weights, strict=True))

    return jax.jit(jax.grad(objective))(given)


@pytest.mark.few(3)
@pytest.mark.parametrize("cut", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("decay", DECAYS)
def test_products_have_the_loops_gradients(decay, cut):
    L = 150
    given, keep = arrays(L, decay), cuts(L) if cut else None
    with jax.enable_x64(True):
        slow, fast = (gradients(form, given, keep) for form in ("sequential", "chunked"))
    for name in given:
        assert zoo.far(fast[name], slow[name]) < 1e-10, name


@pytest.mark.few(3)
@pytest.mark.parametrize("strength", [1e-3, 30.0, 1e6])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_any_decay_has_finite_gradients(decay, strength):
    given = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in arrays(100, decay, strength).items()}
    slow, fast = (gradients(form, given, cuts(100)) for form in ("sequential", "chunked"))
    for name in given:
        assert np.isfinite(fast[name]).all()
        assert zoo.far(fast[name], slow[name], least=1e-3) < 2e-5, name


@pytest.mark.parametrize("decay", DECAYS)
def test_padding_leaves_the_state(decay):
    """A step with neither a key nor a decay."""
    given = arrays(20, decay)
    for name in given.keys() & {"k", "w"}:
        given[name][:, 7:] = 0
    short = {name: leaf if name == "h0" else leaf[:, :7] for name, leaf in given.items()}
    with jax.enable_x64(True):
        _, after = run("chunked", **given)
    assert zoo.far(after, definition(**short)[1]) < 1e-12


def test_narrow_inputs_are_summed_wide():
    given = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in arrays(300, "head").items()}
    narrow = {name: leaf.astype(jnp.bfloat16) if name in "qkv" else leaf for name, leaf in given.items()}
    y, h = run(None, **narrow)
    assert y.dtype == jnp.bfloat16 and h.dtype == jnp.float32
    for one, other in zip((y, h), run("sequential", **narrow), strict=True):
        assert zoo.far(one, other) < 0.01


def test_an_unknown_implementation_is_named():
    with pytest.raises(UserError, match=r"matrix_state implementation 'chunk'.*closest"):
        run("chunk", **arrays(4, "none"))
