"""Mamba-2's GPU kernels, interpreted, against the loop that defines them; and that they can be compiled for a GPU."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from model.contract import Context
from model.mixers.linear import Linear
from model.ops import fused_ssd as op
from model.ops.decays import STRONGEST
from model.ops.fused import say
from model.ops.ssd import lacking, ssd
from tests import zoo
from tests.test_ssd import assert_same, both, normal

B, H, P, N, Q = 2, 4, 16, 32, 16


def inputs(L: int, groups: int = 1, strength: float = 1.0) -> dict[str, jax.Array]:
    pair = (B, L, groups, N)
    made = normal(x=(B, L, H, P), dt=(B, L, H), A=(H,), B=pair, C=pair, h0=(B, H, P, N))
    made |= dict(dt=jax.nn.softplus(made["dt"]), A=-strength * jnp.exp(made["A"]))
    return {name: leaf.astype(jnp.float32) for name, leaf in made.items()}


def some_cuts(L: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).random((B, L)) > 0.05)


def run(x, dt, A, B, C, h0, keep=None, implementation="interpreted"):
    if implementation != "interpreted":
        return ssd(x, dt, A, B, C, h0, keep, implementation=implementation)
    opens = None if keep is None else ~keep
    return op.fused_ssd(x, dt, jnp.maximum(dt * A, STRONGEST), B, C, h0, opens, chunk=Q, interpret=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("length", "groups", "cut", "programs"),
    [(64, 1, False, 1), (128, 2, True, 64), (70, 4, True, 16), (5, 1, True, 1)],
    ids=["one segment", "segments and documents", "an unfinished chunk", "less than a chunk"],
)
def test_kernels_are_the_recurrence(monkeypatch, length, groups, cut, programs):
    """Outputs, last state and every gradient, from a state that is not empty."""
    monkeypatch.setattr(op, "PROGRAMS", programs)  # as if on a smaller or larger GPU
    keep = some_cuts(length) if cut else None
    slow, fast = both(lambda **arrays: run(**arrays, keep=keep), inputs(length, groups), fast="interpreted")
    assert_same(slow, fast, within=5e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("strength", [1e-3, 1e6])
def test_any_decay_is_exact(strength):
    slow, fast = both(run, inputs(64, strength=strength), fast="interpreted")
    assert_same(slow, fast, within=2e-5)


def test_narrow_inputs_are_summed_wide():
    arrays = inputs(64)
    narrow = {name: leaf.astype(jnp.bfloat16) if name in "xBC" else leaf for name, leaf in arrays.items()}
    slow, fast = both(run, narrow, fast="interpreted")
    for a, b in zip(jax.tree.leaves(slow), jax.tree.leaves(fast), strict=True):
        assert a.dtype == b.dtype and zoo.far(b, a) < 0.02


@pytest.mark.scale
@pytest.mark.parametrize("groups", [1, 2], ids=["one group", "groups of a device's own"])
def test_devices_keep_their_rows_and_heads(groups):
    """On a mesh the result is the same, and no device is sent another's tokens."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    places = dict(x=(("data",), None, "tensor"), dt=(("data",), None, "tensor"), A=("tensor",))
    places |= dict(B=(("data",),), C=(("data",),), h0=(("data",), "tensor"))
    arrays = inputs(32, groups)
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*places[name]))) for name, leaf in arrays.items()
    }

    def objective(arrays):
        y, h = run(**arrays)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(h))

    def on_mesh(arrays):
        rules = (("batch", "data"), ("inner", "tensor"))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(rules):
            return jax.value_and_grad(objective)(arrays)

    step = jax.jit(on_mesh).lower(placed).compile()
    assert_same(jax.value_and_grad(objective)(arrays), step(placed), within=2e-5)
    assert "all-gather" not in step.as_text()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "dtype", "channels", "reasons"),
    [
        ("NVIDIA H200", "bfloat16", 64, []),
        ("NVIDIA A100-SXM4-80GB", "float32", 64, []),
        ("NVIDIA H200", "float64", 64, ["float64 (it takes bfloat16, float16, float32)"]),
        ("NVIDIA L4", "float32", 24, ["24 channels of a head with 32 numbers each (it takes 16, 32, 64, 128 of both)"]),
        ("Tesla V100", "float32", 64, ["the platform gpu of compute capability 7.0 (it runs on gpu from 8.0)"]),
        ("AMD Instinct MI300X", "float32", 64, ["the platform gpu (it runs on gpu from 8.0)"]),
    ],
)
def test_what_a_gpu_leaves_to_the_products(kind, dtype, channels, reasons):
    x, k = (jax.ShapeDtypeStruct((B, 8, H, size), dtype) for size in (channels, N))
    with made_for(kind):
        assert lacking(x, k) == reasons


@pytest.mark.quick
@pytest.mark.parametrize(
    ("width", "kind", "told"),
    [
        (768, "NVIDIA H200", ["keys of 192 channels (it takes up to 128)"]),
        (512, "NVIDIA H200", []),
        (768, "Tesla V100", []),  # which has no kernels at all, and says so when a run is made
    ],
)
def test_a_gpu_says_once_that_a_shape_keeps_kernels_away(width, kind, told, caplog):
    say.cache_clear()
    mixer = Linear(width=width, dtype=jnp.bfloat16)  # 4 heads
    x = jax.ShapeDtypeStruct((1, 64, width), jnp.bfloat16)
    with made_for(kind), caplog.at_level("WARNING"):
        for _ in range(2):
            jax.eval_shape(mixer.init, jax.random.key(0), x, Context())
    rest = "so plain XLA takes its place, which is slower; set by n_heads"
    assert [record.message.partition(", or by")[0] for record in caplog.records] == [
        f"matrix_state: no kernel for {reason}, {rest}" for reason in told
    ]


def made_for(kind):
    """Programs made in this context are for such a GPU, which need not be here."""
    gpu = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=gpu))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.quick), "float16", "float32"])
def test_kernels_lower_for_a_gpu(dtype):
    arrays = {name: leaf.astype(dtype) if name in "xBC" else leaf for name, leaf in inputs(256).items()}

    def step(x, dt, A, B, C, h0):
        return op.fused_ssd(x, dt, dt * A, B, C, h0, None, chunk=64)

    def pulled(arrays):
        out, pull = jax.vjp(lambda arrays: step(**arrays), arrays)
        return out, pull(out)

    with made_for("NVIDIA H200"):
        text = jax.jit(pulled).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert all(f'name = "ssd_{kernel}' in text for kernel in ("states", "outputs", "tokens", "maps"))
