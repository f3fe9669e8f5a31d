"""Angles times whole numbers, less whole turns, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.ops.turns import constant_turns, float_turns, times

pytestmark = pytest.mark.quick
N = np.asarray([0, 1, -1, 7, 1023, 32_768, 99_999, -100_000, 1_000_003], np.int32)
ANGLES = np.concatenate([np.random.default_rng(0).uniform(-7, 7, 200), 10.0 ** np.arange(-9, 3), [0, np.pi, -np.pi]])


def off(found: jax.Array, x: np.ndarray) -> float:
    assert np.abs(found).max() < 10  # whole turns are gone, but for those of the rest
    want = np.outer(N, np.asarray(x, np.float64))
    return np.abs(np.angle(np.exp(1j * (np.asarray(found, np.float64) - want)))).max()


@pytest.mark.parametrize("jit", [True, False])
def test_of_angles_in_float32_and_known_better(jit):
    compiled = jax.jit if jit else lambda fn: fn
    x = ANGLES.astype(np.float32)
    assert off(compiled(lambda n, x: times(n, float_turns(x)))(jnp.asarray(N)[:, None], jnp.asarray(x)), x) < 2e-6
    assert off(compiled(lambda n: times(n, constant_turns(ANGLES, np.float32)))(jnp.asarray(N)[:, None]), ANGLES) < 1e-6


def test_in_float64():
    with jax.enable_x64(True):
        found = times(jnp.asarray(N)[:, None], float_turns(jnp.asarray(ANGLES)))
        assert found.dtype == jnp.float64 and off(found, ANGLES) < 1e-7
