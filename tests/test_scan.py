"""The linear scan: real and complex, over devices that share the length, and what it needs to be kept."""

import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.ops import scan
from model.ops.scan import IMPLEMENTATIONS, linear_scan, selective_scan
from model.ops.stepped_selective import power_of_two
from tests.host_mesh import made_for, mesh_of, on_mesh

ALONE = [name for name in IMPLEMENTATIONS if name != "sharded"]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def plain(a, b, h0):
    """The recurrence and nothing else; its gradient is the compiler's."""
    states = []
    for t in range(a.shape[1]):
        h0 = a[:, t] * h0 + b[:, t]
        states.append(h0)
    return jnp.stack(states, axis=1), h0


@pytest.mark.parametrize("implementation", ALONE)
def test_complex_scans_and_their_gradients(implementation):
    with jax.enable_x64(True):
        radius, angle = np.random.default_rng(0).uniform([[[0.5]], [[0.0]]], [[[0.99]], [[3.0]]], (2, 70, 3))
        a = jnp.asarray(radius * np.exp(1j * angle))[None]
        b, h0 = jnp.asarray(normal(1, 70, 3) + 1j * normal(1, 70, 3, seed=1)), jnp.asarray(1j * normal(1, 3))

        def objective(a, b, h0, scan):
            h, last = scan(a, b, h0)
            return jnp.sum(jnp.abs(h) ** 2 * (1 + jnp.arange(70.0)[:, None])) + jnp.sum(jnp.real(last))

        def grads(scan):
            return jax.jit(jax.grad(lambda *x: objective(*x, scan), argnums=(0, 1, 2)))(a, b, h0)

        got = grads(lambda *x: linear_scan(*x, implementation=implementation))
        for mine, want in zip(got, grads(plain), strict=True):
            np.testing.assert_allclose(mine, want, rtol=1e-10, atol=1e-10)


def selective(L: int, N: int = 3):
    """Inputs of the selective scan, and a function of them that documents, outputs and the last state matter to."""
    B, E = 2, 4
    shapes = dict(x=(B, L, E), dt=(B, L, E), A=(E, N), B=(B, L, N), C=(B, L, N), h0=(B, E, N))
    arrays = {k: jnp.asarray(normal(*s, seed=i), jnp.float32) for i, (k, s) in enumerate(shapes.items())}
    arrays |= dict(dt=jnp.abs(arrays["dt"]), A=-jnp.abs(arrays["A"]))
    keep = np.random.default_rng(0).uniform(size=(B, L)) > 0.1

    def objective(arrays, implementation):
        y, h = selective_scan(**arrays, keep=jnp.asarray(keep), implementation=implementation)
        return jnp.sum(y**2) + jnp.sum(h**2), (y, h)

    return arrays, objective


def put(arrays, mesh):
    """On a mesh, with batch, time and channels split."""
    places = dict(x=P("data", "sequence", "tensor"), A=P("tensor"), B=P("data", "sequence"), h0=P("data", "tensor"))
    places |= dict(dt=places["x"], C=places["B"])
    return {key: jax.device_put(x, NamedSharding(mesh, places[key])) for key, x in arrays.items()}


def test_platforms_add_up_in_their_own_ways_to_the_same():
    arrays, objective = selective(L=100)
    want = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)(arrays, "sequential")
    with made_for("gpu"):
        program = jax.make_jaxpr(jax.grad(lambda arrays: objective(arrays, None), has_aux=True))(arrays)
    got = jax.jit(jax.extend.core.jaxpr_as_fun(program))(*jax.tree.leaves(arrays))
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("L", [7, 100])
def test_a_walk_over_tokens_is_the_scan_and_its_gradient(L):
    """Which is what a CPU picks: within a chunk, and over several with a part of one at the end."""
    arrays, objective = selective(L)
    step = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)
    got, want = step(arrays, "stepped"), step(arrays, "sequential")
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    for mine, other in zip(jax.tree.leaves(step(arrays, None)), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_powers_of_two_are_those_of_the_library():
    """Of whole numbers exactly, so that a step of length 0 keeps a state; beyond the ends, those of the ends."""
    t = np.linspace(-126, 127, 100_001, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(power_of_two)(t), np.exp2(t.astype(np.float64)), rtol=1.2e-7)
    whole = np.arange(-126, 128, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(power_of_two)(whole), np.ldexp(np.float32(1), whole.astype(int)))
    ends = power_of_two(jnp.array([-jnp.inf, -1e9, 1e9, jnp.inf, jnp.nan]))
    np.testing.assert_array_equal(ends, [2.0**-126, 2.0**-126, 2.0**127, 2.0**127, np.nan])


@pytest.mark.few(3)
@pytest.mark.parametrize("implementation", ["stepped", *ALONE])
def test_narrow_tokens_are_scanned_wide_and_rounded_once(implementation):
    arrays, _ = selective(L=100)
    narrow = arrays | {name: arrays[name].astype(jnp.bfloat16) for name in "xBC"}
    weights = normal(*arrays["x"].shape, seed=9)

    @jax.jit
    def run(arrays):
        def objective(arrays):
            y, h = selective_scan(**arrays, implementation=implementation)
            return jnp.sum(y * weights.astype(jnp.bfloat16)) + jnp.sum(h**2), (y, h)

        return jax.grad(objective, has_aux=True)(arrays)

    got = run(narrow)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves((narrow, (narrow["x"], narrow["h0"]))), strict=True):
        assert mine.dtype == other.dtype
    want = run(jax.tree.map(jnp.float32, narrow))
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        rounded = np.float32(other.astype(mine.dtype))
        ulp = float(jnp.finfo(mine.dtype).eps)
        np.testing.assert_allclose(np.float32(mine), rounded, rtol=max(ulp, 1e-5), atol=1e-5)


@pytest.mark.parametrize("sizes", [dict(data=2, sequence=2, tensor=2), dict(sequence=7)], ids=str)
def test_devices_share_the_length_of_a_sequence(sizes):
    """The same values and gradients, with batch, time and channels split, and no more sent than states."""
    mesh = mesh_of(**sizes)
    arrays, objective = selective(L=64 * 7)
    step = on_mesh(lambda arrays: jax.grad(objective, has_aux=True)(arrays, None), mesh)

    want = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)(arrays, "sequential")
    placed = put(arrays, mesh)
    for mine, other in zip(jax.tree.leaves(step(placed)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
    program = step.lower(placed).compile().as_text()
    sent = re.findall(r"= \w+\[([\d,]+)\]\S* (?:all-gather|collective-permute)", program)
    assert sent and max(np.prod([int(n) for n in size.split(",")]) for size in sent) <= arrays["h0"].size


def test_a_long_selective_scan_keeps_little():
    """The gradient needs less than three times the memory of what goes in and comes out."""
    L, D, N = 65_536, 512, 16
    shapes = dict(x=(1, L, D), dt=(1, L, D), A=(D, N), B=(1, L, N), C=(1, L, N), h0=(1, D, N))
    arrays = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}

    def objective(arrays):
        y, h = selective_scan(**arrays)
        return jnp.sum(y**2) + jnp.sum(h)

    memory = jax.jit(jax.grad(objective)).lower(arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * (memory.argument_size_in_bytes + memory.output_size_in_bytes)


def test_a_stretch_no_longer_than_a_chunk_keeps_no_states():
    """Every further layer keeps less for the gradient than the states of its stretch would take."""
    arrays, objective = selective(L=8 * 64, N=64)
    mesh = mesh_of(sequence=8)

    def memory(layers):
        def run(arrays):
            y, _ = jax.lax.scan(
                lambda x, _: (objective(arrays | dict(x=x), None)[1][0], None), arrays["x"], length=layers
            )
            return jnp.sum(y**2)

        compiled = on_mesh(jax.grad(run), mesh).lower(put(arrays, mesh)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    states = 64 * arrays["h0"].nbytes
    assert memory(12) - memory(2) < 10 * 0.3 * states


@pytest.mark.parametrize(
    ("platform", "sizes", "rows", "picked"),
    [
        ("gpu", {}, 8, "associative"),
        ("gpu", {}, 16, "chunked"),
        ("gpu", dict(data=2), 16, "associative"),
        ("gpu", dict(tensor=2), 16, "associative"),
        ("gpu", dict(sequence=2), 8, "sharded"),
        ("gpu", dict(sequence=3), 8, "associative"),  # they do not divide the length, which stays whole
        ("tpu", {}, 1, "chunked"),
        ("cpu", {}, 1, "chunked_serial"),
    ],
)
def test_what_is_picked_is_for_what_one_device_holds(platform, sizes, rows, picked):
    """On a GPU all states of the length, while they are few."""
    h0 = jax.ShapeDtypeStruct((rows, 4096, 16), jnp.float32)
    with made_for(platform, **sizes):
        assert scan.best(256, scan.bytes_held(h0)) == picked


@pytest.mark.parametrize(
    ("rows", "sizes", "chunk"),
    [(1, {}, 512), (2, {}, 256), (8, {}, 64), (64, {}, 64), (8, dict(data=2, tensor=4), 512)],
)
def test_a_gpu_takes_longer_chunks_of_smaller_states(rows, sizes, chunk):
    with made_for("gpu", **sizes):
        assert scan.best_chunk(scan.bytes_held(jax.ShapeDtypeStruct((rows, 2048, 16), jnp.float32))) == chunk
