"""The GPU kernels that choose blocks and attend to them, interpreted, against the definition; and that they lower."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from model.errors import UserError
from model.mixers import MIXERS
from model.ops import choice, compressed, fused_choice, fused_chosen
from model.ops import chosen as op
from model.ops.scores import Bias
from model.positions import POSITIONS
from model.positions.score_bias import ALiBiBias
from tests import meshes, zoo
from tests.host_mesh import mesh_of, on_mesh
from tests.jaxprs import inner
from tests.test_fused_ssd import made_for

K = 16


class Case(NamedTuple):
    """Rows of M tokens, whose last L are queries; G groups of R heads; n blocks besides a query's own and the first."""

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
    """Two a row, of any lengths, with padding anywhere."""
    rng = np.random.default_rng(1)
    found = np.sort(rng.integers(1, 3, (case.B, case.M)), axis=1) * (rng.random((case.B, case.M)) > 0.2)
    return found if case.packed else None


def inputs(case: Case) -> dict[str, np.ndarray]:
    rng, (M, L, G, R, *_) = np.random.default_rng(0), case
    shapes = dict(q=(L, G, R, K), k=(M, G, K), v=(M, G, case.V))
    return {name: rng.normal(size=(case.B, *shape)) for name, shape in shapes.items()}


def chosen_by(case: Case, order: choice.Order) -> jax.Array:
    """A query's own block, its document's first, and earlier ones at random, some of them none, `[B, L, G, n + 2]`."""
    rng = np.random.default_rng(2)
    place, index = np.asarray(order.of_queries(order.position)), np.asarray(order.index)
    own = (index - place % case.size)[:, :, None, None]
    back = rng.permuted(np.broadcast_to(np.arange(1, 2 * case.n + 1), (*index.shape, case.G, 2 * case.n)), axis=-1)
    earlier = own - case.size * back[..., : case.n]
    first = (index - place)[:, :, None, None]
    parts = own, np.where(first < own, first, -1), np.where(earlier > first, earlier, -1)
    return jnp.asarray(np.concatenate([np.broadcast_to(x, (*earlier.shape[:3], x.shape[-1])) for x in parts], axis=-1))


def values_and_gradients(case: Case, run: str, dtype: str) -> dict[str, np.ndarray]:
    """Outputs, and gradients of a weighted sum of them; where queries are padding these are of no weight."""
    segments = documents(case)
    order = choice.order_of((case.B, case.M), segments, case.M - case.L, case.L)
    real = np.ones((case.B, case.L), bool) if segments is None else segments[:, -case.L :] > 0
    chosen, call = chosen_by(case, order), dict(q_positions=order.index, k_positions=jnp.arange(case.M)[None])
    weight = (
        np.random.default_rng(3).normal(size=(case.B, case.L, case.G, case.R, case.V)) * real[..., None, None, None]
    )

    def objective(x):
        q, k, v = (x[name] for name in "qkv")
        if run == "fused":
            y = fused_chosen.attend(*op.prepare(q, k, v, chosen, order, case.size, None, **call), interpret=True)
        else:
            weights = op.weights_of_all(q, k, chosen, order, case.size, bias=None, **call)
            y = jnp.einsum("bgrlm,bmgv->blgrv", weights, v)
        return jnp.sum(y * weight.astype(y.dtype)), y

    x = {name: jnp.asarray(leaf, dtype) for name, leaf in inputs(case).items()}
    grads, y = jax.jit(jax.grad(objective, has_aux=True))(x)
    assert np.isfinite(np.asarray(y, np.float64)).all()
    return {name: np.asarray(leaf, np.float64) for name, leaf in (grads | dict(y=y[real])).items()}


CASES = {
    "heads together": Case(M=107, L=107, G=2, R=4, size=16, n=2, packed=True),
    "documents": Case(M=90, L=90, G=2, R=1, size=16, n=2, packed=True),
    "a cache": Case(M=70, L=13, G=1, R=4, size=32, n=2, packed=True),
    "one document": Case(M=100, L=100, G=1, R=1, size=16, n=3),
    "three heads": Case(M=50, L=50, G=1, R=3, size=16, n=1),
    "long blocks": Case(M=300, L=300, G=1, R=1, size=128, n=2, packed=True, B=1),
    "own blocks alone": Case(M=40, L=40, G=1, R=1, size=16, n=0, packed=True),
    "a block": Case(M=5, L=5, G=1, R=2, size=64, n=1),
    "one query": Case(M=40, L=1, G=2, R=1, size=16, n=2),
    "other values": Case(M=60, L=60, G=1, R=1, size=16, n=2, V=32),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_softmax_of_all_scores(name, monkeypatch):
    monkeypatch.setattr(fused_chosen, "TILES", 2)  # so that blocks go on from chunk to chunk
    with jax.enable_x64(True):
        true = values_and_gradients(CASES[name], "all", "float64")
    found = values_and_gradients(CASES[name], "fused", "float32")
    for name, leaf in true.items():
        assert np.abs(found[name] - leaf).max() <= 2e-6 * np.abs(leaf).max(), name


@pytest.mark.scale
def test_narrow_numbers_are_near():
    """bfloat16, in which a pair's own output is kept too."""
    case = CASES["heads together"]
    with jax.enable_x64(True):
        true = values_and_gradients(case, "all", "float64")
    for name, leaf in values_and_gradients(case, "fused", "bfloat16").items():
        assert np.abs(leaf - true[name]).max() <= 2e-2 * np.abs(true[name]).max(), name


MIXED = {
    "moba": dict(block=16, top=2, n_kv_heads=2, head_dim=K),
    "nsa": dict(length=8, stride=4, block=16, top=4, sliding=5, n_kv_heads=2, head_dim=K),
}


def interpreted(monkeypatch) -> None:
    """Kernels serve here too, and few queries."""
    for module in (choice, op):
        monkeypatch.setattr(module, "needs_unmet", lambda tokens: [])
        monkeypatch.setattr(module, "TILE", 4)
    for module, name in ((fused_chosen, "attend"), (fused_choice, "nearest"), (fused_choice, "weightiest")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))


@pytest.mark.scale
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", MIXED)
def test_mixers_are_the_same_by_kernels(name, packed, monkeypatch):
    """Values and gradients, of parameters too, are those of all scores."""
    interpreted(monkeypatch)
    rng, n = np.random.default_rng(4), 75
    segments = np.sort(rng.integers(1, 3, (2, n)), axis=1) * (rng.random((2, n)) > 0.1) if packed else np.ones((2, n))
    x, weight = rng.normal(size=(2, 2, n, zoo.WIDTH)).astype(np.float32) * (segments > 0)[..., None]
    ctx, found = zoo.context(segments if packed else None, n), []
    for implementation in ("fused", "reference"):
        mixer = zoo.make((name, MIXED[name], "rope"), implementation=implementation)
        grads, y = zoo.gradient(mixer)(zoo.params(mixer), x, ctx, weight)
        found.append([*jax.tree.leaves(grads), y[segments > 0]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.scale
@pytest.mark.parametrize("name", MIXED)
def test_devices_that_share_rows_and_heads_change_nothing(name, monkeypatch):
    interpreted(monkeypatch)
    rng, mixer = np.random.default_rng(8), zoo.make((name, MIXED[name], "rope"), implementation="fused")
    x, segments = rng.normal(size=(2, 70, zoo.WIDTH)).astype(np.float32), np.sort(rng.integers(1, 4, (2, 70)), axis=1)

    def step(variables, x):
        ctx = zoo.context(segments)
        return jax.value_and_grad(lambda *given: jnp.sum(mixer.apply(*given, ctx)[0] ** 2), argnums=(0, 1))(
            variables, x
        )

    mesh = mesh_of(data=2, tensor=2)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    found, want = on_mesh(step, mesh)(zoo.params(mixer), placed), jax.jit(step)(zoo.params(mixer), x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def step_of(name: str, dtype: str, packed: bool, mesh, **settings) -> str:
    """The program of a mixer's gradient on GPUs, of heads of 64."""
    mixer = MIXERS[name](width=256, dtype=jnp.dtype(dtype), position=POSITIONS["rope"], **settings)
    x, at = jax.ShapeDtypeStruct((8, 1000, 256), mixer.dtype), jax.ShapeDtypeStruct((8, 1000), jnp.int32)
    variables = jax.eval_shape(lambda x: mixer.init(jax.random.key(0), x, zoo.Context()), x)

    def objective(variables, x, segments):
        ctx = zoo.Context(segments=segments) if packed else zoo.Context()
        return jnp.sum(mixer.apply(variables, x, ctx)[0].astype(jnp.float32) ** 2)

    return meshes.lowered(mesh, jax.grad(objective, argnums=(0, 1)), variables, x, at)


KERNELS = [f"chosen_{name}" for name in ("out", "queries", "keys", "joined")]


@pytest.mark.parametrize(
    ("name", "dtype", "packed"),
    [
        pytest.param("moba", "bfloat16", True, marks=pytest.mark.quick),
        pytest.param("nsa", "bfloat16", False, marks=pytest.mark.quick),
        *[
            pytest.param(name, dtype, packed, marks=pytest.mark.scale)
            for name in MIXED
            for dtype in ("float32", "float16")
            for packed in (False, True)
        ],
    ],
)
def test_mixers_take_kernels_on_a_gpu(name, dtype, packed):
    text = step_of(name, dtype, packed, meshes.mesh_of("gpu"))
    assert all(f'name = "{kernel}' in text for kernel in KERNELS)
    assert f'name = "choice_by_{"means" if name == "moba" else "weights"}' in text
    assert ('name = "flash_out' in text) == (name == "nsa")  # of compressed keys


@pytest.mark.scale
@pytest.mark.parametrize("sizes", [dict(data=8), dict(tensor=4), dict(sequence=4), dict(data=2, tensor=2)], ids=str)
def test_kernels_lower_on_every_mesh(sizes):
    for name in MIXED:
        text = step_of(name, "bfloat16", True, meshes.mesh_of("gpu", **sizes), block=32 if name == "moba" else 512)
        assert all(f'name = "{kernel}' in text for kernel in KERNELS)


def attended(implementation: str | None, size: int = 16, K: int = K, bias=None, dtype="float32", L: int = 200):
    """The shape of what comes out of a call of some shape."""
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, L, 1, 1, K), (1, L, 1, K)))
    chosen = jax.ShapeDtypeStruct((1, L, 1, 2), jnp.int32)

    def run(q, k, v, chosen):
        order = choice.order_of((1, L), None)
        places = dict(q_positions=order.index, k_positions=order.index)
        return op.attend(q, k, v, chosen, order, size, bias=bias, implementation=implementation, **places)

    return str(jax.make_jaxpr(run)(q, k, k, chosen))


SLOPES = Bias({"m": jnp.ones(1)}, ALiBiBias(), {"m": ("heads",)})
UNSERVED = [
    (dict(size=24), r"blocks of 24 tokens \(it takes powers of two from 16 on; closest: 32\)"),
    (dict(size=8), r"blocks of 8 tokens \(it takes powers of two from 16 on; closest: 16\)"),
    (dict(K=48), r"heads of 48 channels \(it takes 16, 32, 64, 128; set by head_dim or n_heads\)"),
    (dict(bias=SLOPES), "a position that adds to scores"),
]


@pytest.mark.parametrize(("call", "says"), UNSERVED, ids=["24", "8", "48", "bias"])
def test_what_kernels_do_not_take_goes_without(call, says):
    with made_for("NVIDIA H200"):
        assert "chosen_out" in attended(None) and "chosen_out" not in attended("gathered")
        assert "chosen_out" not in attended(None, **call)
        with pytest.raises(UserError, match=f"chosen blocks implementation 'fused' cannot serve {says}.*'gathered'"):
            attended("fused", **call)


def test_kernels_are_for_gpus_and_many_queries():
    assert "chosen_out" not in attended(None)
    with pytest.raises(UserError, match=r"cannot serve the platform cpu \(it runs on gpu from 8.0\)"):
        attended("fused")
    with pytest.raises(UserError, match=r"unknown implementation of attention to chosen blocks 'fuse'.*fused"):
        attended("fuse")
    with made_for("NVIDIA H200"):
        assert "chosen_out" not in attended(None, L=100) and "chosen_out" in attended("fused", L=100)


def test_rounds_find_the_highest():
    """As `top_k` does: equal ones in their order, those at infinity too, and none where there are no more."""
    rng = np.random.default_rng(5)
    scores = rng.integers(0, 4, (3, 7, 11)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = np.inf
    scores[rng.random(scores.shape) < 0.5] = -np.inf
    (best, at), (want, want_at) = choice.in_rounds(jnp.asarray(scores), 6), lax.top_k(scores, 6)
    np.testing.assert_array_equal(best, want)
    np.testing.assert_array_equal(np.where(np.isneginf(want), -1, at), np.where(np.isneginf(want), -1, want_at))


def test_a_gpu_lets_as_many_choose_as_there_is_room_for():
    q = jax.ShapeDtypeStruct((1, 65_536, 4, 1, 64), jnp.float32)
    assert choice.choosing(q, 1024) == choice.TILE
    with made_for("NVIDIA H200"):
        assert choice.choosing(q, 1024) == 2**14
        assert choice.choosing(q, 2**30) == choice.TILE


def choices_of(name: str, packed: bool, implementation: str, R: int = 2) -> np.ndarray:
    """What 300 queries of two groups choose, sorted by token."""
    rng, n, G = np.random.default_rng(6), 300, 2
    segments = np.sort(rng.integers(1, 4, (2, n)), axis=1) * (rng.random((2, n)) > 0.1) if packed else None
    order = choice.order_of((2, n), segments)
    q, k = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, n, G, R, K), (2, n, G, K)))

    def run(q, k):
        if name == "moba":
            return choice.nearest_means(q, k, order, 3, 5, implementation)
        sizes = compressed.Sizes(4, 2, 4, 6)
        start, document = choice.whole_blocks(order, sizes.length, sizes.stride)
        keys = k[:, : start.shape[1]]
        short = compressed.Compressed(keys, keys, start, document, start)
        return compressed.attend_and_choose(q, short, order, sizes, None, order.index, implementation)[1]

    return np.sort(jax.jit(run)(q, k), axis=-1)


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("moba", True),
        *[pytest.param(*case, marks=pytest.mark.scale) for case in (("nsa", True), ("nsa", False), ("moba", False))],
    ],
)
def test_kernels_choose_the_same_blocks(name, packed, monkeypatch):
    """More blocks than a program looks at at a time, of documents that begin anywhere."""
    interpreted(monkeypatch)
    found, want = (choices_of(name, packed, implementation) for implementation in ("fused", "gathered"))
    np.testing.assert_array_equal(found, want)


def test_equal_scores_are_kept_in_their_order():
    """As by `top_k`, over parts that come after each other."""
    rng, n = np.random.default_rng(7), 5
    scores = rng.integers(0, 6, (16, 48)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.05] = np.inf
    scores[:4][rng.random((4, 48)) < 0.95] = -np.inf
    best = fused_choice.none_yet(16, n)
    for i in range(0, 48, 16):
        best = fused_choice.kept(best, jnp.asarray(scores[:, i : i + 16]), jnp.arange(i, i + 16)[None], n)
    values, at = lax.top_k(scores, n)
    want = np.where(np.isneginf(values), -1, at)
    np.testing.assert_array_equal(np.sort(np.maximum(best[1], -1)[:, :n], axis=1), np.sort(want, axis=1))


def test_nothing_is_as_large_as_what_all_queries_chose():
    """With gradient no array has more numbers than a few vectors a pair, however long blocks are."""
    L, n = 4096, 4
    with made_for("NVIDIA H200"):
        for size in (64, 512):
            program = jax.make_jaxpr(jax.grad(partial(chosen_sum, size), argnums=(0, 1)))(
                *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, L, 1, 1, 64), (1, L, 1, 64))),
                jax.ShapeDtypeStruct((1, L, 1, n), jnp.int32),
            )
            assert largest(program.jaxpr) <= 1.1 * L * n * 64


def chosen_sum(size, q, k, chosen):
    order = choice.order_of(k.shape[:2], None)
    places = dict(q_positions=order.index, k_positions=order.index)
    return jnp.sum(op.attend(q, k, k, chosen, order, size, bias=None, implementation="fused", **places))


def largest(jaxpr) -> int:
    """Numbers of the largest array that a program makes, in whatever it calls too, but for a kernel's own."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [var.aval.size for var in equation.outvars if hasattr(var.aval, "size")]
        if equation.primitive.name != "pallas_call":
            sizes += [largest(inner) for inner in inner(equation)]
    return max(sizes)
