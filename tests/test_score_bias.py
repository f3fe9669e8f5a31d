"""Biases of the scores: published numbers, and what each promises of distance and of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.positions import FIRE, T5, ALiBi, Kerple
from model.positions.score_bias import FIREBias, KerpleLog, KerplePower, T5Bias, alibi_slopes, fire_input, t5_bucket
from tests.places import (
    BIASES,
    HEADS,
    at,
    biases,
    finite,
    named,
    opened,
    parameters,
    random,
    run,
    run_back,
)


@pytest.mark.quick
def test_alibi_slopes_and_bias():
    eight = [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(8), eight)
    np.testing.assert_allclose(alibi_slopes(12), [*eight, 0.707107, 0.353553, 0.176777, 0.088388], atol=1e-6)
    for n in range(1, 20):
        assert len(alibi_slopes(n)) == n and 0 < alibi_slopes(n).min() <= alibi_slopes(n).max() < 1
    bias = ALiBi().apply({}, 8, True, method="bias")
    found = run(bias.fn, bias.params, at(5), at(2, 5, 9))
    np.testing.assert_allclose(found[0, :2, 0], [[-1.5, 0, -2], [-0.75, 0, -1]])


BOTH_WAYS = {
    -200: 15, -64: 14, -32: 12, -16: 10, -15: 9, -9: 8, -8: 8, -7: 7, -1: 1, 0: 0,
    1: 17, 7: 23, 8: 24, 16: 26, 32: 28, 64: 30, 128: 31,
}  # fmt: skip
ONE_WAY = {-200: 31, -128: 31, -127: 31, -64: 26, -32: 21, -16: 16, -15: 15, -8: 8, -1: 1, 0: 0, 1: 0, 9: 0, 200: 0}


@pytest.mark.quick
@pytest.mark.parametrize(("causal", "vectors"), [(False, BOTH_WAYS), (True, ONE_WAY)])
def test_t5_buckets(causal, vectors):
    distance = -np.asarray([*vectors], np.int32)  # the vectors count from query to key
    np.testing.assert_array_equal(run(lambda d: t5_bucket(d, 32, 128, causal), distance), [*vectors.values()])


@pytest.mark.quick
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (6, 4), (64, 1000), (4, 3)])
def test_t5_buckets_are_the_formula(buckets, max_distance):
    exact, n = buckets // 2, np.arange(2 * max_distance)
    rise = np.log(np.maximum(n, 1) / exact) / np.log(max_distance / exact) * (buckets - exact)
    want = np.where(n < exact, n, np.minimum(exact + np.floor(rise + 1e-9), buckets - 1))
    np.testing.assert_array_equal(run(lambda d: t5_bucket(d, buckets, max_distance, True), n.astype(np.int32)), want)


@pytest.mark.quick
def test_t5_looks_up_its_table():
    bias = opened(T5(), causal=False)
    found = run(bias.fn, bias.params, at(1000, 1001), at(999, 1000, 1008))
    want = np.asarray(bias.params["table"])[np.asarray([[1, 0, 24], [2, 1, 23]])]
    np.testing.assert_allclose(found[0], np.moveaxis(want, -1, 0))


@pytest.mark.quick
def test_kerple_numbers():
    # softplus(0) = log 2; twice sigmoid(0) = 1.
    r = {"r1": np.zeros(1, np.float32), "r2": np.zeros(1, np.float32)}
    log2, distance = np.log(2), np.asarray([0, 1, 9, 500])
    log, power = (run(fn, r, at(509), at(*(509 - distance)))[0, 0, 0] for fn in (KerpleLog(), KerplePower()))
    np.testing.assert_allclose(log, -log2 * np.log(1 + log2 * distance), rtol=1e-5)
    np.testing.assert_allclose(power, -log2 * distance, rtol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("variant", ["log", "power"])
def test_kerple_starts_as_its_authors_and_stays_a_kernel(variant):
    """Whatever the parameters: 0 at distance 0, falling with it, and conditionally positive definite."""
    start = parameters(Kerple(variant=variant), 1000)
    r1 = np.log1p(np.exp(start["r1"]))
    r2 = np.log1p(np.exp(start["r2"])) if variant == "log" else 2 / (1 + np.exp(-start["r2"]))
    tops = {"log": (2, 1), "power": (1, 2)}[variant]
    for r, top in zip((r1, r2), tops, strict=True):
        assert 0 < r.min() < 0.05 * top and 0.95 * top < r.max() < top
        assert abs(r.mean() - top / 2) < 0.05 * top

    fn = {"log": KerpleLog(), "power": KerplePower()}[variant]
    raw = np.asarray([(a, b) for a in (-8, 0, 3) for b in (-8, -1, 0, 8)], np.float32).T
    kernels = run(fn, {"r1": raw[0], "r2": raw[1]}, at(*range(40)), at(*range(40)))[0]
    for kernel in np.asarray(kernels, np.float64):
        assert (np.diag(kernel) == 0).all() and (np.diff(kernel[0]) < 0).all()
        centred = kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()
        assert np.linalg.eigvalsh(centred).min() > -1e-4 * np.abs(kernel).max()


@pytest.mark.quick
def test_fire_reads_a_distance_between_zero_and_one():
    places = at(*range(40), 63, 64, 65, 1000, 100_000)
    x = run(fire_input, np.float32(0.1), np.float32(64), places.T, places)
    assert x.min() == 0 and x.max() == 1 and (np.diag(x) == 0).all()
    np.testing.assert_array_equal(x[-3:, 0], 1)  # past the threshold, the first key is as far as a key can be
    for i, j in ((5, 2), (30, 0), (41, 20), (43, 42), (44, 1)):  # the paper's formula, for keys that are not later
        p, q = int(places[0, i]), int(places[0, j])
        assert x[i, j] == pytest.approx(np.log(0.1 * (p - q) + 1) / np.log(0.1 * max(64, p) + 1), rel=1e-5)


@pytest.mark.quick
def test_fire_is_its_network():
    bias = opened(FIRE())
    p = bias.params
    c, threshold, hidden, hidden_bias = (p[name][..., 0] for name in ("log_c", "log_L", "hidden", "hidden_bias"))
    x = np.log1p(np.exp(c) * 697) / np.log1p(np.exp(c) * max(np.exp(threshold), 700))
    want = np.maximum(x * hidden + hidden_bias, 0) @ p["out"]
    np.testing.assert_allclose(run(bias.fn, bias.params, at(700), at(3))[0, :, 0, 0], want, rtol=1e-4)
    start = parameters(FIRE())
    np.testing.assert_allclose([start["log_c"], start["log_L"]], np.log([0.1, 512]), rtol=1e-6)
    # The kinks of the hidden units are spread over what the network reads, not all at its edge.
    kinks = -start["hidden_bias"] / start["hidden"]
    assert ((kinks > 0.05) & (kinks < 0.95)).sum() > 3


@pytest.mark.quick
@pytest.mark.parametrize("position", BIASES, ids=named)
def test_a_bias_is_linear_if_it_says_so(position):
    """Kernels have the parameters of such a bias in the unit of their scores."""
    bias, places = opened(position), at(0, 1, 7, 9, 600)
    halved = jax.tree.map(lambda x: np.float32(0.5) * x, bias.params)
    whole, half = (run(bias.fn, params, places, places) for params in (bias.params, halved))
    assert bias.fn.linear == np.allclose(half, 0.5 * whole, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", BIASES, ids=named)
def test_biases_and_their_gradients_are_finite_everywhere(position, causal):
    """At distance 0, at position 0, for later keys, far out; with parameters far out as well."""
    places = at(0, 1, 2, 7, 8, 9, 600, 100_000)
    bias = opened(position, causal)
    for scale in (-20, 20, 1):
        params = jax.tree.map(lambda x, scale=scale: np.float32(scale) * x, bias.params)
        value, grads = run_back(bias.fn, params, places, random(1, HEADS, 8, 8))
        assert value.shape == (1, HEADS, 8, 8) and value.dtype == jnp.float32
        assert finite(value) and finite(grads)
    learns = [(np.asarray(x) != 0).any() for x in jax.tree.leaves(grads)]
    assert not any(learns) if isinstance(position, ALiBi) else all(learns)


@pytest.mark.quick
def test_fire_gradients_with_a_threshold_of_nothing():
    params = opened(FIRE()).params | {"log_L": np.full(HEADS, -200, np.float32)}
    assert finite(run_back(FIREBias(), params, at(0, 1), np.ones((1, HEADS, 2, 2), np.float32)))


@pytest.mark.quick
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position", BIASES, ids=named)
def test_a_tile_of_a_bias_is_a_part_of_the_whole(position, causal):
    rows = np.asarray([[*range(12)], [*range(5), *range(7)]], np.int32)  # the second holds two documents
    whole = biases(position, rows, rows, causal)
    tile = biases(position, rows[:, 3:9], rows[:, 6:], causal)
    assert whole.shape == (2, HEADS, 12, 12)
    np.testing.assert_allclose(tile, whole[:, :, 3:9, 6:], rtol=1e-6)
    np.testing.assert_allclose(biases(position, rows[:1], rows[:1], causal), whole[:1], rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("position", BIASES, ids=named)
def test_equal_biases_are_traced_once(position):
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def trace(fn, params):
        traced.append(fn)
        return 0

    for _ in range(2):  # two modules, as two layers make them
        bias = opened.__wrapped__(position.clone())
        trace(bias.fn, bias.params)
    assert len(traced) == 1
    assert T5Bias(32, 128, True) == T5Bias(32, 128, True) != T5Bias(32, 128, False)


@pytest.mark.quick
@pytest.mark.parametrize("causal", [True, False])
def test_a_kernels_way_through_the_buckets_is_the_table(causal):
    """`score` adds up steps between buckets; and it says truly from which distance on nothing changes."""
    fn, table = T5Bias(8, 40, causal), {"table": jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)))}
    i, j = np.full((1, 1), 100), np.arange(200)[None]
    looked_up = fn(table, i, j)[0, :, 0]
    steps = fn.score({"table": table["table"][..., None]}, i[0], j[0])
    np.testing.assert_allclose(steps, looked_up, atol=1e-6)
    for far in (looked_up[:, : 100 - fn.settles + 1], looked_up[:, 100 + fn.settles :]):
        assert (far == far[:, :1]).all()
