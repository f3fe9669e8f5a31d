"""The linear scan: real and complex, over devices that share the length, and what it needs to be kept."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from model.ops import scan
from model.ops.scan import IMPLEMENTATIONS, linear_scan, selective_scan

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


def selective(L: int):
    """Inputs of the selective scan, and a function of them that documents, outputs and the last state matter to."""
    B, E, N = 2, 4, 3
    shapes = dict(x=(B, L, E), dt=(B, L, E), A=(E, N), B=(B, L, N), C=(B, L, N), h0=(B, E, N))
    arrays = {k: jnp.asarray(normal(*s, seed=i), jnp.float32) for i, (k, s) in enumerate(shapes.items())}
    arrays |= dict(dt=jnp.abs(arrays["dt"]), A=-jnp.abs(arrays["A"]))
    keep = np.random.default_rng(0).uniform(size=(B, L)) > 0.1

    def objective(arrays, implementation):
        y, h = selective_scan(**arrays, keep=jnp.asarray(keep), implementation=implementation)
        return jnp.sum(y**2) + jnp.sum(h**2), (y, h)

    return arrays, objective


def test_platforms_add_up_in_their_own_ways_to_the_same(monkeypatch):
    arrays, objective = selective(L=100)
    want = jax.grad(objective, has_aux=True)(arrays, "sequential")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got = jax.grad(objective, has_aux=True)(arrays, None)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_devices_share_the_length_of_a_sequence():
    """The same values and gradients, with batch, time and channels split, and no more sent than states."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "tensor"), axis_types=(AxisType.Auto,) * 3)
    places = dict(x=P("data", "sequence", "tensor"), A=P("tensor"), B=P("data", "sequence"), h0=P("data", "tensor"))
    places |= dict(dt=places["x"], C=places["B"])
    arrays, objective = selective(L=512)

    def on_mesh(arrays):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.grad(objective, has_aux=True)(arrays, None)

    want = jax.jit(jax.grad(objective, has_aux=True), static_argnums=1)(arrays, "sequential")
    placed = {key: jax.device_put(x, NamedSharding(mesh, places[key])) for key, x in arrays.items()}
    got = jax.jit(on_mesh)(placed)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", jax.jit(on_mesh).lower(placed).compile().as_text())
    assert (
        gathered and max(np.prod([int(n) for n in size.split(",")]) for size in gathered) <= 2 * 2 * arrays["h0"].size
    )


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


def test_a_gpu_holds_all_states_only_while_they_are_few(monkeypatch):
    monkeypatch.setattr(scan, "on_this_platform", lambda: scan.parallel)
    assert scan.best(256, scan.FEW) == "associative"
    assert scan.best(256, scan.FEW + 1) == "chunked"


@pytest.mark.parametrize(("rows", "chunk"), [(1, 512), (2, 256), (8, 64), (64, 64)])
def test_a_gpu_takes_longer_chunks_of_smaller_states(monkeypatch, rows, chunk):
    monkeypatch.setattr(scan, "on_this_platform", lambda: scan.parallel)
    assert scan.best_chunk(rows * 2048 * 16 * 4) == chunk
