"""The GPU kernels of the general delta rule, interpreted, against a loop in float64; and that they lower for a GPU."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from model.ops import delta_rule as op
from model.ops import fused_segments
from model.ops.decays import FORGET, STRONGEST
from model.ops.fused_pairs import LITTLE
from tests.jaxprs import equations, inner
from tests.test_fused_ssd import made_for

B, H, K, V, Q = 2, 2, 16, 32, 16
KINDS = ("kda", "rwkv7", "head")  # by beta; along a and b; likewise, where a head decays as one


def inputs(kind: str, L: int, strength: float = 0.1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = (B, L, H, K)
    made = {name: rng.normal(size=keys) for name in ("q", "k", "b")}
    made |= dict(v=rng.normal(size=(B, L, H, V)), h0=rng.normal(size=(B, H, K, V)))
    made["w"] = -strength * np.exp(rng.normal(size=keys[:3] if kind == "head" else keys))
    for name in ("k", "b"):
        made[name] /= np.linalg.norm(made[name], axis=-1, keepdims=True)
    if kind == "kda":
        del made["b"]
        return made | dict(beta=rng.uniform(size=keys[:3]))
    return made | dict(a=-made["b"] * rng.uniform(size=keys))


def documents(L: int, share: float = 0.07) -> np.ndarray:
    """False where one begins."""
    return np.random.default_rng(2).random((B, L)) > share


def apart(x):
    return {name: leaf for name, leaf in x.items() if name != "h0"}, x["h0"]


def interpreted(x, keep, chunk=Q):
    return op.fused_general(*apart(x), None if keep is None else jnp.asarray(keep), chunk, interpret=True)


def loop(x, keep):
    return op.sequential(*apart(x), None if keep is None else jnp.asarray(keep))


def values_and_gradients(run, x, keep, *args):
    """Outputs, and gradients of a weighted sum of outputs and last state."""

    def objective(x):
        out = run(x, keep, *args)
        rng = np.random.default_rng(1)
        return sum(jnp.sum(leaf * rng.normal(size=leaf.shape).astype(leaf.dtype)) for leaf in out), out

    return jax.tree.map(np.asarray, jax.jit(jax.grad(objective, has_aux=True))(x))


def distances(x, keep=None, found=None, chunk=Q):
    """The largest error of each array, by the array's largest number."""
    with jax.enable_x64(True):
        true = values_and_gradients(loop, jax.tree.map(jnp.asarray, x), keep)
    found = values_and_gradients(interpreted, found or jax.tree.map(jnp.float32, x), keep, chunk)
    far = jax.tree.map(lambda a, b: np.abs(a.astype("float64") - b).max() / (np.abs(b).max() + 1e-9), found, true)
    return jax.tree.leaves(far)


@pytest.mark.parametrize(
    ("kind", "length", "cut"),
    [
        ("kda", 63, True),
        ("rwkv7", 63, True),
        *[
            pytest.param(kind, length, cut, marks=pytest.mark.scale)
            for kind in KINDS[:2]
            for length, cut in ((1, False), (7, True), (200, False), (200, True))
        ],
        pytest.param("head", 63, True, marks=pytest.mark.scale),
    ],
)
def test_kernels_are_the_recurrence(kind, length, cut):
    """Outputs, last state and every gradient, from a state that is not empty."""
    assert max(distances(inputs(kind, length), documents(length) if cut else None)) < 2e-6


@pytest.mark.parametrize(
    ("kind", "segments"),
    [
        ("rwkv7", 1),
        ("kda", 4),
        *[pytest.param(*case, marks=pytest.mark.scale) for case in (("kda", 1), ("rwkv7", 4), ("rwkv7", 8))],
    ],
)
def test_segments_at_once_are_one_after_another(kind, segments, monkeypatch):
    """Of eight chunks. Some segments are of one document, so that states go through them."""
    monkeypatch.setattr(fused_segments, "segments", lambda programs, chunks: segments)
    keep = documents(120, share=0.015)
    apart = keep.reshape(B, 4, -1).all(axis=-1)
    assert apart[:, 1:3].any()
    assert not apart.all()
    assert max(distances(inputs(kind, 120, strength=0.02), keep)) < 2e-6


def test_segments_are_for_what_would_leave_a_gpu_empty():
    counts = {(128, 1024): 1, (127, 1000): 5, (16, 1024): 32, (2, 16384): 128, (16, 64): 8, (16, 16): 1, (16, 37): 1}
    assert {case: fused_segments.segments(*case) for case in counts} == counts


@pytest.mark.scale
def test_kernels_are_exact_up_to_their_bound():
    """Near e^-64 in a half of a chunk; and where a document begins, any decay is as good as another."""
    x, keep = inputs("rwkv7", 48), documents(48)
    x["w"] = np.where(keep[..., None, None], np.random.default_rng(3).uniform(-7.9, -7.8, x["w"].shape), FORGET)
    x["w"][..., ::2] /= 1e3
    assert max(distances(x, keep)) < 2e-6


@pytest.mark.scale
@pytest.mark.parametrize(("kind", "length"), [("kda", 40), ("rwkv7", 100)])
def test_chunks_of_their_real_size(kind, length):
    """And keys that are nearly alike, written whole: powers of what is solved for would grow beyond all bounds."""
    x = inputs(kind, length)
    for name in ("k", "b") if kind == "rwkv7" else ("k",):
        x[name] = x[name][:, :1] + 1e-2 * x[name]
        x[name] /= np.linalg.norm(x[name], axis=-1, keepdims=True)
    x |= dict(beta=np.ones_like(x["beta"])) if kind == "kda" else dict(a=-x["b"])
    assert max(distances(x, documents(length), chunk=32)) < 5e-6


@pytest.mark.scale
@pytest.mark.parametrize("strength", [1e-4, 1, 1e6])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_any_decay_is_exact(kind, strength):
    assert max(distances(inputs(kind, 48, strength))) < 5e-6


@pytest.mark.parametrize("kind", ["kda", pytest.param("rwkv7", marks=pytest.mark.scale)])
def test_weak_and_strong_decays_in_one_row(kind):
    x = inputs(kind, 48)
    x["w"][1, 20:25, 1, 3] *= 1e3
    assert max(distances(x, documents(48))) < 2e-6


def decays_at_first(shape: tuple[int, ...]) -> np.ndarray:
    """Those of a layer of Kimi Delta Attention before its first step, for inputs as large as normalised ones."""
    rng = np.random.default_rng(4)
    A, dt = rng.uniform(1, 16, shape[2:3]), np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape[2:]))
    return -A[:, None] * np.log1p(np.exp(rng.normal(size=shape)) * np.expm1(dt))


def decays_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng, L = np.random.default_rng(3), shape[1]
    if name == "strongest":
        return np.full(shape, STRONGEST)
    if name == "beyond":
        return np.where(rng.random(shape) < 0.5, 100 * STRONGEST, -1e-3)
    at_first = decays_at_first(shape)
    return at_first if name == "at first" else np.where(np.arange(L)[:, None, None] % 128 < 64, at_first, -1e-2)


@pytest.mark.scale
@pytest.mark.parametrize(
    ("kind", "decays", "length"),
    [
        ("kda", "at first", 100),
        ("kda", "strongest", 63),
        ("rwkv7", "strongest", 7),
        ("rwkv7", "beyond", 100),
        ("kda", "chunks apart", 200),
        ("rwkv7", "chunks apart", 200),
    ],
)
def test_strong_decays_in_long_chunks(kind, decays, length):
    """Outputs, last state and every gradient, in documents; where some chunks decay little and others do not, too."""
    x = inputs(kind, length)
    x["w"] = decays_of(decays, x["w"].shape)
    strong = np.add.reduceat(x["w"], np.arange(0, length, 32), axis=1).min(axis=-1) < -LITTLE  # of halves of chunks
    assert strong.any()
    assert decays != "chunks apart" or not strong[:, 2:4].any()
    assert max(distances(x, documents(length, share=0.015), chunk=64)) < 5e-6


def test_kernels_serve_any_decay():
    """No program is made for another way, and no device is asked which to take."""
    x = jax.tree.map(jnp.float32, inputs("kda", 32))
    program = jax.make_jaxpr(jax.grad(lambda x: sum(map(jnp.sum, interpreted(x, None)))))(x).jaxpr
    kernels = [inside for eqn in equations(program, "pallas_call") for inside in inner(eqn)]
    within = sum(len(list(equations(inside, "cond"))) for inside in kernels)
    assert within == len(list(equations(program, "cond"))) == 2 + 2 * 3  # of pairs, and of gradients by three names


@pytest.mark.scale
@pytest.mark.parametrize(
    ("kind", "dtype", "strength"), [("kda", "bfloat16", 1), ("kda", "bfloat16", 10), ("rwkv7", "float16", 1)]
)
def test_narrow_tokens_are_summed_wide(kind, dtype, strength):
    x = inputs(kind, 63, strength)
    narrow = {name: jnp.asarray(leaf, dtype if name in "qkv" else "float32") for name, leaf in x.items()}
    assert max(distances(jax.tree.map(lambda leaf: np.asarray(leaf, "float64"), narrow), documents(63), narrow)) < 0.02


def test_narrow_keys_are_made_wide_nowhere():
    """Only log decays are: tokens are scaled by them in both passes, and paired; by three names they get something."""
    narrow = {
        name: jnp.asarray(leaf, "bfloat16" if name in "qkv" else "float32") for name, leaf in inputs("kda", 32).items()
    }
    program = jax.make_jaxpr(jax.grad(lambda x: sum(map(jnp.sum, interpreted(x, None)))))(narrow).jaxpr
    seen = [leaf.aval for eqn in equations(program, "pallas_call") for leaf in (*eqn.invars, *eqn.outvars)]
    keys = [leaf for leaf in seen if leaf.shape == narrow["k"].shape]
    # Pairs and gradients take two launches, the second onto what the first has made.
    taken, got, from_middles = 2 + 2 + 2 * 3, 2 * (3 + 2) + 3, 2 + 2 + 2 * 3
    assert sum(leaf.dtype == jnp.float32 for leaf in keys) == taken + got + from_middles


@pytest.mark.scale
def test_devices_keep_their_rows_and_heads():
    """On a mesh the result is the same, and no device is sent another's tokens."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    x = jax.tree.map(jnp.float32, inputs("kda", 32))
    places = {name: PartitionSpec(("data",), *([] if name == "h0" else [None]), "tensor") for name in x}
    placed = {name: jax.device_put(leaf, NamedSharding(mesh, places[name])) for name, leaf in x.items()}

    def objective(x):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in interpreted(x, None))

    def on_mesh(x):
        rules = (("batch", "data"), ("heads", "tensor"))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(rules):
            return jax.grad(objective)(x)

    step = jax.jit(on_mesh).lower(placed).compile()
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.grad(objective)(x), step(placed))
    assert max(jax.tree.leaves(far)) < 2e-5
    assert "all-gather" not in step.as_text()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("rwkv7", "bfloat16", marks=pytest.mark.quick),
        pytest.param("kda", "bfloat16", marks=pytest.mark.scale),
        *[pytest.param(kind, "float32", marks=pytest.mark.scale) for kind in KINDS[:2]],
    ],
)
def test_kernels_lower_for_a_gpu(kind, dtype, monkeypatch):
    monkeypatch.setattr(fused_segments, "segments", lambda programs, chunks: chunks)
    x = {name: jnp.asarray(leaf, dtype if name in "qkv" else "float32") for name, leaf in inputs(kind, 200).items()}

    def pulled(x, keep):
        out, pull = jax.vjp(lambda x: op.delta_rule(**x, keep=keep, implementation="fused"), x)
        return out, pull(out)

    with made_for("NVIDIA H200"):
        text = jax.jit(pulled).trace(x, documents(200)).lower(lowering_platforms=("cuda",)).as_text()
    by_decay = ["pairs", *[f"gradient_{name}" for name in ("qab" if kind == "kda" else "qabk")]]
    made = ["scaled", "solved", "states", "outputs", "pulled", *by_decay, *[f"{name}_by_halves" for name in by_decay]]
    made += ["gradient_v"] if kind == "rwkv7" else []
    assert all(f'name = "dplr_{name}"' in text for name in made)
    assert text.count('name = "dplr_states"') == 6  # in segments: forward, what they do to states and add, and again
