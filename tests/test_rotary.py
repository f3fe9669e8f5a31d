"""Rotary positions, their published scalings, and xPos."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.positions import Rope, XPos
from model.positions.rotary import SCALINGS, angles, inverse_frequencies, yarn_range
from tests.places import ROPES, at, keys, named, queries, random, run, score


@pytest.mark.quick
@pytest.mark.parametrize("rope", ROPES, ids=named)
def test_rope_scores_depend_on_the_offset_alone(rope):
    assert score(rope, 2, 5) == pytest.approx(score(rope, 100, 103), rel=1e-4)
    assert abs(score(rope, 2, 5) - score(rope, 2, 6)) > 1e-3


@pytest.mark.quick
def test_rope_turns_each_pair_by_its_angle():
    x = np.asarray([1, 2, 3, 4], np.float32).reshape(1, 1, 1, 4)
    a, b = 5.0, 5.0 / 100  # position 5, frequencies 1 and 10000^(-1/2)
    want = [
        1 * np.cos(a) - 3 * np.sin(a),
        2 * np.cos(b) - 4 * np.sin(b),
        3 * np.cos(a) + 1 * np.sin(a),
        4 * np.cos(b) + 2 * np.sin(b),
    ]
    np.testing.assert_allclose(queries(Rope(), x, at(5)).ravel(), want, rtol=1e-5)
    np.testing.assert_allclose(keys(Rope(), x, at(5)).ravel(), want, rtol=1e-5)


@pytest.mark.quick
def test_layouts_are_the_same_up_to_a_permutation():
    x, positions = random(2, 5, 3, 8), at(0, 1, 7, 90, 1000)
    weave = np.arange(8).reshape(2, 4).T.ravel()  # 0 4 1 5 2 6 3 7
    for cls in (Rope, XPos):
        half, interleaved = (queries(cls(layout=layout), x, positions) for layout in ("half", "interleaved"))
        assert np.abs(half - interleaved).max() > 0.1
        woven = queries(cls(layout="interleaved"), x[..., weave], positions)
        np.testing.assert_allclose(woven, half[..., weave], rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_partial_rotary_leaves_the_rest_untouched():
    x, positions = random(2, 5, 3, 12), at(0, 1, 7, 90, 1000)
    y = queries(Rope(fraction=0.5), x, positions)
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    np.testing.assert_allclose(y[..., :6], queries(Rope(), x[..., :6], positions), rtol=1e-6)
    assert np.abs(y[:, 1:, :, :6] - x[:, 1:, :, :6]).max(axis=(0, 2)).min() > 1e-3


@pytest.mark.quick
def test_a_batch_may_share_its_positions_or_not():
    x = random(2, 3, 1, 8)
    each = np.asarray([[0, 1, 2], [5, 0, 1]], np.int32)
    both = [queries(Rope(), x[i : i + 1], each[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(queries(Rope(), x, each), np.concatenate(both), rtol=1e-6)
    np.testing.assert_allclose(queries(Rope(), x, each[:1])[1], queries(Rope(), x[1:], each[:1])[0], rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_angles_are_right_far_out_in_any_dtype(dtype):
    far = np.asarray([255, 257, 1023, 1024, 1025, 100_000, 100_001, 1_000_003])
    speeds = inverse_frequencies(64, 10_000.0)
    found, want = run(lambda p: angles(p, speeds, dtype), at(*far))[0], far[:, None] * speeds
    # As angles, less whole turns. A plain float32 product is off by 0.002 at 100,000 and by 0.02 at a million.
    off = np.abs(np.angle(np.exp(1j * (found.astype(np.float64) - want))))
    assert found.dtype == jnp.float32 and off.max() < 1e-6
    x = np.ones((1, len(far), 1, 64), dtype)
    first = queries(Rope(dtype=dtype), x, at(*far))[0, :, 0, :32]
    assert first.dtype == dtype
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(first, np.float64), np.cos(want) - np.sin(want), atol=tolerance)


@pytest.mark.quick
def test_angles_are_exact_in_float64():
    speeds = inverse_frequencies(8, 10_000.0)
    with jax.enable_x64(True):
        found = run(lambda p: angles(p, speeds, jnp.float64), at(3, 5000))[0]
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(np.sin(found), np.sin(np.asarray([[3], [5000]]) * speeds), atol=1e-11)


# Scalings


def frequencies(dim, theta, scaling, factor, original_length, span, **own) -> tuple[np.ndarray, float]:
    rope = Rope(theta=theta, scaling=scaling, factor=factor, original_length=original_length, **own)
    rope.check(dim)
    return rope.frequencies(dim, span)


def base_of(speeds: np.ndarray) -> float:
    """The theta that plain frequencies come from."""
    D = 2 * len(speeds)
    return float(speeds[1] ** (-D / 2))


@pytest.mark.quick
def test_ntk_check_values():
    for factor, base in ((4.0, 40_889.94), (16.0, 167_198.74)):
        speeds, temperature = frequencies(128, 10_000.0, "ntk", factor, 2048, 1)
        assert base_of(speeds) == pytest.approx(base, abs=0.01) and temperature == 1
        np.testing.assert_allclose(speeds, inverse_frequencies(128, base), rtol=1e-6)
        # The slowest pair is interpolated, the fastest kept.
        np.testing.assert_allclose(speeds[[0, -1]] / inverse_frequencies(128, 10_000.0)[[0, -1]], [1, 1 / factor])


@pytest.mark.quick
def test_dynamic_ntk_follows_the_span():
    plain = inverse_frequencies(64, 10_000.0)
    for span in (1, 100, 512):
        np.testing.assert_allclose(frequencies(64, 10_000.0, "dynamic_ntk", 4.0, 512, span)[0], plain, rtol=1e-12)
    for span in (513, 1024, 4096):
        base = 10_000.0 * (4.0 * span / 512 - 3.0) ** (64 / 62)
        speeds, _ = frequencies(64, 10_000.0, "dynamic_ntk", 4.0, 512, span)
        np.testing.assert_allclose(speeds, inverse_frequencies(64, base), rtol=1e-12)
    rope, x = Rope(scaling="dynamic_ntk", factor=4.0, original_length=64), random(1, 3, 1, 8)
    near, far = (queries(rope, x, at(3, 5, 7), span) for span in (64, 256))
    np.testing.assert_allclose(near, queries(Rope(), x, at(3, 5, 7)), rtol=1e-6)
    assert np.abs(near - far).max() > 1e-2


@pytest.mark.quick
def test_yarn_check_values():
    usual = 32.0, 1.0, True
    assert yarn_range(128, 10_000.0, 4096, *usual) == (20, 46)
    assert yarn_range(128, 10_000.0, 2048, *usual) == (16, 41)
    assert yarn_range(64, 10_000.0, 512, *usual) == (3, 16)
    assert yarn_range(8, 10_000.0, 64, *usual)[0] == 0 and yarn_range(8, 10.0, 10**6, *usual)[1] == 7  # clamped
    speeds, temperature = frequencies(128, 10_000.0, "yarn", 16.0, 4096, 1)
    assert temperature == pytest.approx(1.277259, abs=1e-6)
    assert frequencies(128, 10_000.0, "yarn", 4.0, 2048, 1)[1] == pytest.approx(1.138629, abs=1e-6)
    ratio = speeds / inverse_frequencies(128, 10_000.0)
    np.testing.assert_allclose(ratio[:21], 1)
    np.testing.assert_allclose(ratio[46:], 1 / 16)
    np.testing.assert_allclose(ratio[33], 0.5 + 0.5 / 16)  # halfway
    # Sines and cosines are multiplied by the temperature, so lengths are.
    x = random(1, 3, 2, 128)
    y = queries(Rope(scaling="yarn", factor=16.0, original_length=4096), x, at(0, 9, 5000))
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), 1.277259 * np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.quick
def test_llama3_by_wavelength():
    factor, length, plain = 8.0, 8192, inverse_frequencies(128, 500_000.0)
    speeds, temperature = frequencies(128, 500_000.0, "llama3", factor, length, 1)
    kinds = set()
    for w, found in zip(plain, speeds, strict=True):
        wavelength = 2 * np.pi / w
        if wavelength < length / 4:
            want, kind = w, "fast"
        elif wavelength > length / 1:
            want, kind = w / factor, "slow"
        else:
            smooth = (length / wavelength - 1) / (4 - 1)
            want, kind = (1 - smooth) * w / factor + smooth * w, "between"
        kinds.add(kind)
        assert found == pytest.approx(want, rel=1e-12)
    assert kinds == {"fast", "slow", "between"} and temperature == 1


@pytest.mark.quick
def test_longrope_slows_each_pair_by_the_set_of_its_span():
    factors = dict(short_factor=(1.0, 1.25, 2.0), long_factor=(1.5, 8.0, 40.0))
    for span, name in ((1, "short_factor"), (4096, "short_factor"), (4097, "long_factor"), (10**6, "long_factor")):
        speeds, temperature = frequencies(6, 10_000.0, "longrope", 32.0, 4096, span, **factors)
        np.testing.assert_allclose(speeds, inverse_frequencies(6, 10_000.0) / factors[name], rtol=1e-12)
        assert temperature == pytest.approx(1.190238, abs=1e-6)  # sqrt(1 + ln 32 / ln 4096), whatever the span


@pytest.mark.quick
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_factor_of_one_scales_nothing(scaling):
    ones = dict.fromkeys(("short_factor", "long_factor"), (1.0,) * 32) if scaling == "longrope" else {}
    speeds, temperature = frequencies(64, 10_000.0, scaling, 1.0, 512, 512, **ones)
    np.testing.assert_allclose(speeds, inverse_frequencies(64, 10_000.0), rtol=1e-12)
    assert temperature == 1 and speeds.dtype == np.float64


@pytest.mark.quick
def test_linear_scaling_divides_positions():
    x, positions = random(1, 4, 2, 8), np.asarray([0, 4, 40, 400])
    slow = queries(Rope(scaling="linear", factor=4.0), x, at(*positions))
    np.testing.assert_allclose(slow, queries(Rope(), x, at(*positions // 4)), rtol=1e-5, atol=1e-6)


# xPos


@pytest.mark.quick
def test_xpos_fades_with_distance():
    K, ones = 8, np.ones((1, 1, 1, 8), np.float32)
    zeta = (np.arange(0, K, 2) / K + 0.4) / 1.4
    for distance in (0, 1, 50, 700, 3000):
        found = np.vdot(queries(XPos(), ones, at(distance), 4096), keys(XPos(), ones, at(0), 4096))
        want = 2 * np.sum(zeta ** (distance / 512) * np.cos(distance * inverse_frequencies(K, 10_000.0)))
        assert found == pytest.approx(want, rel=2e-4, abs=1e-4)
    # Without the rotation: every pair only ever shrinks.
    sizes = [np.abs(queries(XPos(), ones, at(i), 4096)).max() for i in (0, 1000, 2000, 4000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.5 * sizes[0]


@pytest.mark.quick
def test_xpos_is_relative_whatever_the_span():
    near = score(XPos(), 5, 2, span=8)
    for i, span in ((5, 16_384), (103, 16_384), (16_383, 16_384), (32_000, XPos().limit())):
        assert score(XPos(), i, i - 3, span=span) == pytest.approx(near, rel=1e-3)
    assert abs(near - score(XPos(), 6, 2, span=8)) > 1e-3


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_xpos_is_finite_up_to_its_limit(dtype):
    xpos, span = XPos(dtype=dtype), XPos().limit()
    assert 30_000 < span < 35_000 and XPos(scale_base=2048).limit() > 100_000
    x = random(1, 4, 2, 64, dtype=dtype) * dtype(10)
    positions = at(0, span // 3, span // 2, span - 1)
    q, k = (turn(xpos, x, positions, span).astype(np.float32) for turn in (queries, keys))
    assert np.isfinite(np.einsum("blhk,bmhk->bhlm", q, k)).all()  # later keys' too
    for y in (q, k):
        assert np.abs(y).max() < 1e20 and np.abs(y).min() > 1e-25
    assert XPos.causal_only and not Rope.causal_only
    with pytest.raises(UserError, match=f"length {span + 1} is past the {span} .*closest: model.xpos.scale_base=513"):
        queries(xpos, x, positions, span + 1)
    queries(XPos(scale_base=513), x, positions, span + 1)
