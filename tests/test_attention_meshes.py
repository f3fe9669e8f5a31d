"""Attention on a mesh is the same function; every device computes its part, and loops gather nothing."""

import collections
import math
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from model import placement
from model.errors import UserError
from model.ops import attention as op
from model.ops import ring_attention, sharing, tiled_attention
from model.ops.attention import Bias, attention
from model.ops.fused_attention import splash
from model.ops.mask import CAUSAL, FULL, Prefix, window
from tests import meshes, zoo
from tests.test_attention import slope
from train.sharding import AXES, make_mesh

pytestmark = pytest.mark.scale

B, L, H, K = 4, 64, 4, 8
SEGMENTS = np.asarray([[1] * 30 + [2] * 20 + [0] * 14, [3] * 64] * 2)
POSITIONS = np.asarray([[*range(30), *range(20), *[0] * 14], [*range(64)]] * 2)
EVERYTHING = dict(mask=(CAUSAL | Prefix(3)) & window(40), soft_cap=3.0, q_segments=SEGMENTS, k_segments=SEGMENTS)
EVERYTHING |= dict(q_positions=POSITIONS, k_positions=POSITIONS)
MESHES = {
    "rows and heads": dict(data=2, fsdp=2, tensor=2),
    "tokens exchanged for heads": dict(data=2, tensor=2, sequence=2),
    "more devices than heads": dict(tensor=2, sequence=4),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_attention, "tile_shape", lambda o: (16, 24))


def arrays(kv_heads: int, length: int = L, dim: int = K) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = dict(q=(B, length, H, dim), k=(B, length, kv_heads, dim), v=(B, length, kv_heads, dim))
    shapes |= dict(bias=(H,), sinks=(H,), additive=(H, dim), weight=(B, length, H, dim), weight_lse=(B, length, H))
    shapes |= dict(levels=(B, length, H))
    return {name: np.abs(rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def on_mesh(function, sizes, values):
    """The function compiled for a mesh of devices here, and values as they lie on it."""
    mesh = make_mesh(dict.fromkeys(AXES, 1) | sizes, jax.devices()[: math.prod(sizes.values())])

    def traced(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(meshes.RULES):
            return function(*args)

    def put(leaf):
        names = ("batch", "length", *[None] * 2)[: leaf.ndim] if leaf.ndim > 2 else [None] * leaf.ndim
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(meshes.RULES):
            return jax.device_put(leaf, NamedSharding(mesh, placement.spec(names, leaf.shape)))

    values = jax.tree.map(put, values)
    return jax.jit(traced).lower(values).compile(), values


def step(values, implementation, additive=False, **call):
    """Value and gradients of a weighted sum of outputs and log-sum-exps."""

    def objective(values):
        extra = dict(additive=values["additive"]) if additive else {}
        extra |= dict(q_levels=values["levels"], k_levels=values["levels"])
        bias, sinks = Bias(values["bias"], slope, ("heads",)), values["sinks"]
        out, lse = attention(
            *(values[name] for name in "qkv"),
            **call,
            **extra,
            bias=bias,
            sinks=sinks,
            with_lse=True,
            implementation=implementation,
        )
        real = SEGMENTS[..., None] > 0
        return jnp.sum(out * values["weight"]) + jnp.sum(jnp.where(real, lse * values["weight_lse"], 0))

    return jax.value_and_grad(objective)(values)


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["multi-query", "grouped"])
@pytest.mark.parametrize("implementation", ["xla", "tiled", None])
def test_a_mesh_changes_nothing(implementation, kv_heads):
    """Every feature at once, on every way to share a call out."""
    values = arrays(kv_heads)
    run = partial(step, implementation=implementation, **EVERYTHING)
    want = jax.jit(partial(step, implementation="xla", **EVERYTHING))(values)
    for name, sizes in MESHES.items():
        if name == "rows and heads" and kv_heads == 2:
            continue  # nothing new
        compiled, placed = on_mesh(run, sizes, values)
        for one, other in zip(jax.tree.leaves(compiled(placed)), jax.tree.leaves(want), strict=True):
            assert zoo.far(one, other) < 1e-5, name


def test_additive_scores_on_a_mesh():
    values = arrays(2)
    run = partial(step, implementation="tiled", additive=True)
    compiled, placed = on_mesh(run, MESHES["tokens exchanged for heads"], values)
    for one, other in zip(jax.tree.leaves(compiled(placed)), jax.tree.leaves(jax.jit(run)(values)), strict=True):
        assert zoo.far(one, other) < 1e-5


@pytest.mark.parametrize("sizes", [dict(sequence=4), dict(sequence=8)], ids=["exchanged", "gathered"])
def test_loops_over_tiles_send_nothing(sizes):
    """What devices exchange they exchange once, however many tiles there are."""
    compiled, _ = on_mesh(partial(step, implementation="tiled"), sizes | dict(data=8 // sizes["sequence"]), arrays(4))
    sent = [line for line in compiled.as_text().splitlines() if re.search(r" (all|reduce|collective)-[\w-]+\(", line)]
    assert sent and not [line for line in sent if "/while/" in line]


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
def test_every_device_computes_its_part(sizes):
    with meshes.in_force(meshes.mesh_of("cpu", **sizes)):
        q, k = (jax.ShapeDtypeStruct((B, L, heads, K), jnp.float32) for heads in (H, 1))
        seen = []

        def trace(q, k):
            seen.append(sharing.share(*op.prepare(q, k, k), None, "tiled").seen)
            return q

        jax.eval_shape(trace, q, k)
    scores = math.prod(seen[0].q.shape[:4]) * seen[0].k.shape[1]
    assert scores * math.prod(sizes.values()) == B * H * L * L


@pytest.mark.parametrize(
    "options, within",
    [({}, 1e-5), ({"mask": CAUSAL & window(100), "packed": True}, 1e-5), ({"mask": window(512)}, 3e-5)],
    ids=str,
)
def test_splash_takes_a_stretch_of_the_queries(options, within, monkeypatch):
    """Interpreted, on devices that have more queries than heads to share."""
    n, options = 512, dict(options)
    values = {name: leaf[:2, :, :2] for name, leaf in arrays(2, n, 64).items() if leaf.ndim == 4}
    segments = np.asarray([[1] * 200 + [2] * 212 + [0] * 100])
    places = dict(q_segments=segments, k_segments=segments) if options.pop("packed", False) else {}

    def run(values, implementation):
        def objective(values):
            out = attention(*(values[x] for x in "qkv"), **places, **options, implementation=implementation)
            return jnp.sum(out * values["weight"])

        return jax.value_and_grad(objective)(values)

    want = jax.jit(partial(run, implementation="xla"))(values)
    monkeypatch.setitem(op.IMPLEMENTATIONS, "splash", op.Implementation(partial(splash, interpret=True), "interpreted"))
    compiled, placed = on_mesh(partial(run, implementation="splash"), dict(data=2, sequence=4), values)
    for one, other in zip(jax.tree.leaves(compiled(placed)), jax.tree.leaves(want), strict=True):
        assert zoo.far(one, other) < within


RINGS = {
    "causal": dict(),
    "bidirectional": dict(mask=FULL),
    "a window back": dict(mask=CAUSAL & window(12)),
    "a window both ways": dict(mask=window(12)),
    "a window that reaches all": dict(mask=window(60)),
    "a prefix": dict(mask=CAUSAL | Prefix(9)),
    "padding": dict(mask=FULL, q_segments=SEGMENTS > 0, k_segments=SEGMENTS > 0, right_padded=True),
    "documents": dict(q_segments=SEGMENTS, k_segments=SEGMENTS, q_positions=POSITIONS, k_positions=POSITIONS),
    "additive": dict(additive=True),
}


@pytest.mark.parametrize("call", RINGS.values(), ids=RINGS)
@pytest.mark.parametrize("sizes", [dict(sequence=8), dict(data=2, sequence=4)], ids=["8", "2 x 4"])
def test_a_ring_is_attention(call, sizes):
    """Whoever sees whom; with an odd number of tiles to a stretch, and a half that tiles do not divide."""
    values = arrays(2)
    want = jax.jit(partial(step, implementation="xla", **call))(values)
    compiled, placed = on_mesh(partial(step, implementation="ring", **call), sizes, values)
    for one, other in zip(jax.tree.leaves(compiled(placed)), jax.tree.leaves(want), strict=True):
        assert zoo.far(one, other) < 1e-5


def plain(values, implementation):
    return jax.grad(lambda values: jnp.sum(attention(*(values[x] for x in "qkv"), implementation=implementation) ** 2))(
        values
    )


def test_a_ring_gathers_nothing_and_shares_out_memory(monkeypatch):
    """Compiled for 1, 2, 4 and 8 devices: what one of them needs falls as their number grows."""
    monkeypatch.setattr(tiled_attention, "tile_shape", lambda o: (64, 64))
    values = {name: leaf[:1, :, :1] for name, leaf in arrays(1, 16_384, 32).items() if name in "qkv"}
    memory = {}
    for n in (1, 2, 4, 8):
        compiled, _ = on_mesh(partial(plain, implementation="ring" if n > 1 else "tiled"), dict(sequence=n), values)
        memory[n] = compiled.memory_analysis().temp_size_in_bytes
        sent = set(
            re.findall(r" (all-gather|all-to-all|reduce-scatter|collective-permute)[\w-]*\(", compiled.as_text())
        )
        assert sent == ({"collective-permute"} if n > 1 else set())
    assert memory[8] < 0.3 * memory[2] and memory[4] < 0.6 * memory[2], memory


@pytest.mark.parametrize("work", ["add_tile", "pull_tile"], ids=["forward", "backward"])
def test_causal_work_is_balanced(work, monkeypatch):
    """Every device computes as many tiles, counted as it does so; in the order of the tokens the last has the most."""
    n, counts = 8, collections.Counter()
    done = getattr(tiled_attention, work)

    def counted(*args):
        jax.debug.callback(lambda device: counts.update([int(device)]), jax.lax.axis_index("sequence"))
        return done(*args)

    monkeypatch.setattr(tiled_attention, "tile_shape", lambda o: (4, 4))  # the half of a stretch
    monkeypatch.setattr(tiled_attention, work, counted)
    compiled, placed = on_mesh(partial(plain, implementation="ring"), dict(sequence=n), arrays(2))
    compiled(placed)
    jax.effects_barrier()
    # Of its own stretch three tiles of four, of each other one two, whoever's it is.
    assert counts == dict.fromkeys(range(n), 3 + 2 * (n - 1))


def test_chunks_are_dealt_and_taken_back():
    n, length = 8, 64
    order = np.arange(length).reshape(2 * n, -1)
    zigzag = np.stack([np.concatenate([order[d], order[2 * n - 1 - d]]) for d in range(n)])
    mesh = make_mesh(dict.fromkeys(AXES, 1) | dict(sequence=n))
    spec = jax.sharding.PartitionSpec(None, "sequence")

    def there_and_back(x):
        there = ring_attention.dealt(x, ("sequence",))
        return there, ring_attention.taken_back(there, ("sequence",))

    there, back = jax.shard_map(there_and_back, mesh=mesh, in_specs=spec, out_specs=(spec, spec))(
        jnp.arange(length)[None]
    )
    np.testing.assert_array_equal(np.asarray(there)[0].reshape(n, -1), zigzag)
    np.testing.assert_array_equal(np.asarray(back)[0], np.arange(length))


def test_a_ring_needs_devices_that_share_the_length():
    q = jnp.zeros((1, 8, 2, 4))
    with pytest.raises(UserError, match="'ring' cannot serve a call without keys and values that go round"):
        attention(q, q, q, implementation="ring")


def test_a_ring_is_among_the_choices_where_devices_share_the_length():
    q = jnp.zeros((1, 64, 1, 8))
    here = meshes.in_force(meshes.mesh_of("cpu", sequence=4))
    with here, pytest.raises(UserError, match="choose from ring, xla, tiled, "):
        attention(q, q, q, implementation="splash")


def test_what_is_gathered_is_told_once(caplog):
    """Of two layers, and of the one row that a model is initialised with and a batch; and whose doing it is."""
    sharing.say.cache_clear()
    mesh = meshes.mesh_of("tpu", sequence=8)

    def layers(q):
        return attention(attention(q, q, q, implementation="tiled"), q, q, implementation="tiled")

    with caplog.at_level("WARNING"):
        for rows in (1, B):
            q = jax.ShapeDtypeStruct((rows, 1024, H, 64), jnp.bfloat16)
            meshes.lowered(mesh, layers, meshes.laid(mesh, q, None, "sequence"))
    (line,) = [record.message for record in caplog.records if "gathers" in record.message]
    assert "all keys and values along the length, 1 MiB a row and layer" in line
    assert "tiled is asked for" in line and "4 heads do not divide over 8 devices" in line
