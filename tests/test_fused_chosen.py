"""The GPU kernels of attention to chosen blocks, interpreted, against all weights in float64; and that they lower."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.ops import chosen as op
from model.ops import fused, fused_chosen
from tests import meshes, zoo
from tests.test_fused_ssd import made_for

K = 16


class Case(NamedTuple):
    """Rows of M tokens, whose last L are queries; G groups of R heads; n blocks besides a query's own."""

    M: int
    L: int
    G: int
    R: int
    size: int
    n: int
    packed: bool = False
    V: int = K
    B: int = 2


def documents(case: Case) -> np.ndarray | None:
    """Three or so a row, of any lengths, with padding anywhere."""
    rng = np.random.default_rng(1)
    found = np.sort(rng.integers(1, 5, (case.B, case.M)), axis=1) * (rng.random((case.B, case.M)) > 0.2)
    return found if case.packed else None


def inputs(case: Case) -> dict[str, np.ndarray]:
    rng, (M, L, G, R, *_) = np.random.default_rng(0), case
    shapes = dict(q=(L, G, R, K), k=(M, G, K), v=(M, G, case.V))
    return {name: rng.normal(size=(case.B, *shape)) for name, shape in shapes.items()}


def chosen_by(case: Case, order: op.Order) -> jax.Array:
    """Each query's own block and earlier ones of its document, some at random and some of them none, `[B, L, G, n]`."""
    rng = np.random.default_rng(2)
    place, index = np.asarray(order.of_queries(order.position)), np.asarray(order.index)
    own = (index - place % case.size)[:, :, None, None]
    back = rng.permuted(np.broadcast_to(np.arange(1, 2 * case.n + 1), (*index.shape, case.G, 2 * case.n)), axis=-1)
    earlier = own - case.size * back[..., : case.n]
    earlier = np.where(earlier >= (index - place)[:, :, None, None], earlier, -1)
    return jnp.asarray(np.concatenate([np.broadcast_to(own, (*earlier.shape[:3], 1)), earlier], axis=-1), jnp.int32)


def values_and_gradients(case: Case, run: str, dtype: str) -> dict[str, np.ndarray]:
    """Outputs, and gradients of a weighted sum of them; where queries are padding these are of no weight."""
    segments = documents(case)
    order = op.order_of((case.B, case.M), segments, case.M - case.L, case.L)
    real = np.ones((case.B, case.L), bool) if segments is None else segments[:, -case.L :] > 0
    chosen, call = chosen_by(case, order), dict(q_positions=order.index, k_positions=jnp.arange(case.M)[None])
    weight = (
        np.random.default_rng(3).normal(size=(case.B, case.L, case.G, case.R, case.V)) * real[..., None, None, None]
    )

    def objective(x):
        q, k, v = (x[name] for name in "qkv")
        if run == "fused":
            call_ = op.prepare(q, k, v, chosen, order, case.size, None, **call)
            y = fused_chosen.attend(*call_, interpret=True)
        else:
            weights = op.weights_of_all(q, k, chosen, order, case.size, bias=None, **call)
            y = jnp.einsum("bgrlm,bmgv->blgrv", weights, v)
        return jnp.sum(y * weight.astype(y.dtype)), y

    x = {name: jnp.asarray(leaf, dtype) for name, leaf in inputs(case).items()}
    grads, y = jax.jit(jax.grad(objective, has_aux=True))(x)
    assert np.isfinite(np.asarray(y, np.float64)).all()
    return {name: np.asarray(leaf, np.float64) for name, leaf in (grads | dict(y=y[real])).items()}


CASES = {
    "documents": Case(M=90, L=90, G=2, R=1, size=16, n=2, packed=True),
    "a cache": Case(M=70, L=13, G=1, R=4, size=32, n=2, packed=True),
    "one document": Case(M=100, L=100, G=1, R=1, size=16, n=3),
    "heads together": Case(M=77, L=77, G=2, R=4, size=16, n=2, packed=True),
    "three heads": Case(M=50, L=50, G=1, R=3, size=16, n=1),
    "long blocks": Case(M=300, L=300, G=1, R=1, size=128, n=2, packed=True, B=1),
    "own blocks alone": Case(M=40, L=40, G=1, R=1, size=16, n=0, packed=True),
    "a block": Case(M=5, L=5, G=1, R=2, size=64, n=1),
    "one query": Case(M=40, L=1, G=2, R=1, size=16, n=2),
    "other values": Case(M=60, L=60, G=1, R=1, size=16, n=2, V=32),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_softmax_of_all_scores(name, monkeypatch):
    monkeypatch.setattr(fused_chosen, "TILES", 2)  # so that blocks go on from chunk to chunk
    with jax.enable_x64(True):
        true = values_and_gradients(CASES[name], "all", "float64")
    found = values_and_gradients(CASES[name], "fused", "float32")
    for name, leaf in true.items():
        assert np.abs(found[name] - leaf).max() <= 2e-6 * np.abs(leaf).max(), name
