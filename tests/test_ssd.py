"""Recurrences in matrix form against the loops that define them: Mamba-2's, and RWKV's two."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.mixers.mamba2 import Mamba2
from model.mixers.rwkv import wkv
from model.mixers.rwkv6 import RWKV6
from model.ops import decays as op
from model.ops import fused_channels, matrix_state
from model.ops import ssd as ssd_op
from model.ops import wkv as wkv_op
from model.ops.decays import spans
from model.ops.ssd import gaps
from tests import zoo

B, H, P, G, N = 2, 4, 3, 2, 5
SMALL = 16  # tokens of a chunk
LENGTHS = [1, 63, 256]


@partial(jax.jit, static_argnames=("implementation", "chunk"))
def ssd(*args, **settings):
    return ssd_op.ssd(*args, **settings)


@partial(jax.jit, static_argnames="implementation")
def wkv6(*args, **settings):
    return wkv_op.wkv6(*args, **settings)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def few_chunks_a_group(monkeypatch):
    monkeypatch.setattr(op, "GROUP", 4)  # so that groups of groups are carried too


def normal(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


def inputs(L: int, groups: int = G) -> dict[str, jax.Array]:
    pair = (B, L, groups, N)
    made = normal(x=(B, L, H, P), dt=(B, L, H), A=(H,), B=pair, C=pair, h0=(B, H, P, N))
    return made | dict(dt=jax.nn.softplus(made["dt"]), A=-jnp.exp(made["A"]))


def cuts(L: int, seed: int = 1) -> jax.Array:
    """False where the past is forgotten: at a few places, other ones in each row."""
    return jnp.asarray(np.random.default_rng(seed).random((B, L)) > 0.05)


def both(run, arrays: dict[str, jax.Array], slow: str = "sequential", fast: str | None = "chunked"):
    """Outputs, and gradients of a weighted sum of outputs and states, of two implementations of one op."""

    def objective(arrays, implementation):
        out = run(**arrays, implementation=implementation)
        weights = normal(7, **{str(i): leaf.shape for i, leaf in enumerate(jax.tree.leaves(out))})
        return sum(jnp.sum(o * w) for o, w in zip(jax.tree.leaves(out), weights.values(), strict=True)), out

    step = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)
    return step(arrays, slow), step(arrays, fast)


def assert_same(one, other, within: float):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.isfinite(a).all() and np.isfinite(b).all()
        assert zoo.far(b, a) < within or np.abs(a - b).max() < 1e-3 * within


@pytest.mark.few(3)
@pytest.mark.parametrize("cut", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", LENGTHS)
def test_products_are_the_recurrence(float64, length, cut):
    """Outputs, last state and every gradient, from a state that is not empty."""
    keep = cuts(length) if cut else None

    def run(implementation, **arrays):
        return ssd(**arrays, keep=keep, implementation=implementation, chunk=SMALL)

    assert_same(*both(run, inputs(length)), within=1e-10)


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.scale), 8, 40, 128, 1000])
def test_the_chunk_is_speed_alone(float64, chunk):
    arrays = inputs(100)
    y, h = ssd(**arrays, implementation="sequential")
    assert_same((y, h), ssd(**arrays, implementation="chunked", chunk=chunk), within=1e-12)


@pytest.mark.scale
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_a_group_share_their_maps(float64, groups):
    arrays = inputs(20, groups)
    repeated = {name: jnp.repeat(arrays[name], H // groups, axis=2) for name in ("B", "C")}
    for implementation in ("sequential", "chunked"):
        one = ssd(**arrays, implementation=implementation, chunk=SMALL)
        assert_same(one, ssd(**arrays | repeated, implementation=implementation, chunk=SMALL), within=1e-12)


def test_documents_do_not_see_each_other(float64):
    """Packed equals each alone, and no gradient crosses; a step of size 0 leaves the state."""
    L, start = 60, 27
    arrays = inputs(L)
    keep = jnp.ones((B, L), bool).at[:, start].set(False)
    packed, _ = ssd(**arrays, keep=keep, implementation="chunked", chunk=SMALL)
    own = {name: leaf if name in ("A", "h0") else leaf[:, start:] for name, leaf in arrays.items()}
    alone, _ = ssd(**own | dict(h0=jnp.zeros_like(arrays["h0"])), implementation="sequential")
    assert_same(packed[:, start:], alone, within=1e-12)

    def later(x):
        y, h = ssd(**arrays | dict(x=x), keep=keep, implementation="chunked", chunk=SMALL)
        return jnp.sum(y[:, start:] ** 2) + jnp.sum(h**2)

    pull = jax.jit(jax.grad(later))(arrays["x"])
    assert (pull[:, :start] == 0).all() and (np.abs(pull[:, start:]).sum(axis=(2, 3)) > 0).all()

    still = arrays | dict(dt=arrays["dt"].at[:, start:].set(0))
    _, before = ssd(**{k: v if k in ("A", "h0") else v[:, :start] for k, v in arrays.items()}, chunk=SMALL)
    assert_same(before, ssd(**still, chunk=SMALL)[1], within=1e-12)


def test_sums_do_not_cancel():
    """Strong decays in a chunk leave the weak ones around them exact, in float32."""
    Q = 256
    a = -np.random.default_rng(0).uniform(0.001, 0.1, Q)
    a[5::3] = op.STRONGEST
    a = a.astype(np.float32).astype(np.float64)
    sums = np.cumsum(a)
    got = np.asarray(gaps(jnp.asarray(a, jnp.float32), jnp.float32), np.float64)
    np.testing.assert_allclose(np.tril(got), np.tril(sums[:, None] - sums), rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(spans(jnp.asarray([1.0, 2.0])), [[0, -np.inf, -np.inf], [1, 0, -np.inf], [3, 2, 0]])


@pytest.mark.few(2)
@pytest.mark.parametrize("strength", [1e-3, 30.0, 1e6])
def test_any_decay_has_finite_gradients(strength):
    arrays = {name: leaf.astype(jnp.float32) for name, leaf in inputs(100).items()}
    arrays["A"] = strength * arrays["A"]
    slow, fast = both(lambda **arrays: ssd(**arrays, keep=cuts(100), chunk=SMALL), arrays)
    assert_same(slow, fast, within=2e-5)


def test_narrow_inputs_are_summed_wide():
    arrays = inputs(300)
    narrow = {name: leaf.astype(jnp.bfloat16) if name in "xBC" else leaf for name, leaf in arrays.items()}
    slow, fast = both(lambda **arrays: ssd(**arrays, keep=cuts(300), chunk=SMALL), narrow)
    for a, b in zip(jax.tree.leaves(slow), jax.tree.leaves(fast), strict=True):
        assert a.dtype == b.dtype and zoo.far(b, a) < 0.02
    y, h = fast[1]
    assert y.dtype == jnp.bfloat16 and h.dtype == jnp.float32
    assert fast[0]["A"].dtype == fast[0]["dt"].dtype == jnp.float32


def test_memory_is_that_of_chunks_and_not_of_states():
    """The compiled gradient holds less than the states of all tokens would take, and grows with the length."""
    heads, channels, state = 2, 32, 64

    def memory(L):
        pair = jnp.zeros((1, L, 1, state))
        x, dt, h0 = jnp.zeros((1, L, heads, channels)), jnp.ones((1, L, heads)), jnp.zeros((1, heads, channels, state))

        def objective(x, dt, A, pair):
            y, h = ssd(x, dt, A, pair, pair, h0, implementation="chunked")
            return jnp.sum(y**2) + jnp.sum(h**2)

        step = jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3)))
        return step.lower(x, dt, -jnp.ones(heads), pair).compile().memory_analysis().temp_size_in_bytes

    states = 4 * 4096 * heads * channels * state
    assert memory(4096) < 0.5 * states
    assert memory(4096) < 2.3 * memory(2048)


# RWKV


@pytest.mark.few(3)
@pytest.mark.parametrize("cut", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", LENGTHS)
def test_matrix_valued_states(float64, length, cut):
    keep = cuts(length) if cut else None
    tokens = (B, length, 3, 4)
    arrays = normal(r=tokens, k=tokens, v=tokens, w=tokens, u=(3, 4), h0=(B, 3, 4, 4))
    arrays["w"] = -jnp.exp(3 * arrays["w"])  # from hardly to wholly forgotten
    assert_same(*both(lambda **arrays: wkv6(**arrays, keep=keep), arrays), within=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize(("x64", "within"), [(True, 1e-12), (False, 1e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("length", [7, 100])
def test_heads_of_any_decay(length, x64, within):
    """Hardly any, strong, of all sizes, and with channels that forget by themselves; each head against itself."""
    heads, channels = 4, 5

    def head(tree, i):
        return [np.take(np.asarray(x), i, axis=x.shape.index(heads)) for x in jax.tree.leaves(tree)]

    with jax.enable_x64(x64):
        tokens = (B, length, heads, channels)
        arrays = normal(r=tokens, k=tokens, v=tokens, w=tokens, u=tokens[2:], h0=(B, heads, channels, channels))
        w = -jnp.exp(3 * arrays["w"])
        w = w.at[:, :, 0].set(-1e-4).at[:, :, 1].set(-30).at[:, 3::10, 2, ::2].set(op.FORGET)
        keep = cuts(length).at[:, 5].set(jnp.asarray([True, False]))
        slow, fast = both(lambda **arrays: wkv6(**arrays, keep=keep), arrays | dict(w=w))
    for i in range(heads):
        for a, b in zip(head(slow, i), head(fast, i), strict=True):
            assert np.isfinite(b).all() and zoo.far(b, a) < within


def test_rwkv6_in_the_kernels_of_linear_attention(monkeypatch):
    """Interpreted: outputs, last state and every gradient, in documents, from a state that is not empty."""
    monkeypatch.setattr(matrix_state, "lacking", lambda k, v: [])
    monkeypatch.setattr(fused_channels, "fused_channels", partial(fused_channels.fused_channels, interpret=True))
    tokens = (B, 63, 3, 4)
    arrays = normal(r=tokens, k=tokens, v=tokens, w=tokens, u=(3, 4), h0=(B, 3, 4, 4))
    arrays["w"] = -jnp.exp(2 * arrays["w"])
    keep = cuts(63).at[0, -1].set(False).at[1, 0].set(False)
    assert_same(*both(lambda **arrays: wkv_op.wkv6(**arrays, keep=keep), arrays, fast=None), within=1e-5)


def test_memory_is_that_of_chunks_and_not_of_matrices():
    L, heads, channels = 2048, 2, 32
    tokens = jnp.zeros((1, L, heads, channels))

    def objective(r, k, v, w, u, h0):
        return sum(jnp.sum(x**2) for x in wkv6(r, k, v, w, u, h0, implementation="chunked"))

    step = jax.jit(jax.grad(objective, argnums=range(6)))
    compiled = step.lower(
        *[tokens] * 4, jnp.zeros((heads, channels)), jnp.zeros((1, heads, channels, channels))
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.4 * channels * tokens.nbytes


@pytest.mark.parametrize("implementation", ["sequential", "chunked"])
def test_a_document_begins_with_an_empty_matrix(float64, implementation):
    L, start = 40, 13
    tokens = (B, L, 3, 4)
    arrays = normal(r=tokens, k=tokens, v=tokens, w=tokens)
    arrays["w"] = -jnp.exp(arrays["w"])
    others = normal(u=(3, 4), h0=(B, 3, 4, 4))
    keep = jnp.ones((B, L), bool).at[:, start].set(False)
    packed, h = wkv6(**arrays, **others, keep=keep, implementation=implementation)
    own = {name: leaf[:, start:] for name, leaf in arrays.items()}
    alone = wkv6(**own, u=others["u"], h0=jnp.zeros_like(others["h0"]), implementation="sequential")
    assert_same(alone, (packed[:, start:], h), within=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize("length", LENGTHS)
def test_averages_with_decaying_weights(float64, length):
    """Documents, padding, and keys so large that no exponential of them would fit."""
    rng = np.random.default_rng(3)
    real = jnp.asarray(rng.random((B, length)) < 0.8)
    first = ~cuts(length) & real
    arrays = normal(k=(B, length, 5), v=(B, length, 5), w=(5,), u=(5,), aa=(B, 5), bb=(B, 5))
    arrays |= dict(k=300 * arrays["k"], w=-jnp.exp(arrays["w"]), bb=jnp.exp(arrays["bb"]))

    def run(aa, bb, implementation, **arrays):
        state = (aa, bb, jnp.zeros_like(bb))
        y, (aa, bb, pp) = wkv(**arrays, state=state, first=first, real=real, implementation=implementation)
        return jnp.where(real[..., None], y, 0), aa / bb, jnp.log(bb) + pp

    assert_same(*both(run, arrays), within=1e-10)


# Mistakes


@pytest.mark.parametrize(
    ("mixer", "told"),
    [
        (Mamba2(width=16, head_dim=5), "head_dim 5 does not divide the inner width 32; closest that does: 4"),
        (Mamba2(width=16, n_groups=3), "n_groups 3 does not divide the number of heads 4; closest that does: 2"),
        (Mamba2(width=16, dt_min=0.2), "dt_min 0.2 must be at most dt_max 0.1"),
        (Mamba2(width=16, implementation="fused"), "'fused' cannot serve the platform cpu .*; leave it unset, or use"),
        (RWKV6(width=16, head_dim=3), "head_dim 3 does not divide the width 16; closest that does: 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told(mixer, told):
    with pytest.raises(UserError, match=told):
        jax.eval_shape(mixer.init, jax.random.key(0), zoo.inputs(1, 4), zoo.context(L=4))
