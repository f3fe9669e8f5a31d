"""Products with a wide kernel: their gradients are those of the einsum, in whichever form they are summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.ops.product import LARGE, product


@pytest.mark.quick
@pytest.mark.parametrize("spec", ["abA,AB->abB", "abAB,ABC->abC", "abA,ABC->abBC", "abcA,cAB->abcB", "aA,AB->aB"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_gradients_are_the_einsums(spec, large):
    sizes = dict(zip("abcABC", (LARGE // 2**6 if large else 6, 8, 2, 16, 8, 4), strict=True))
    factors, _, of_y = spec.partition("->")
    of_x, of_kernel = factors.split(",")
    random = np.random.default_rng(0)
    x, kernel, g = (
        jnp.asarray(random.normal(size=[sizes[letter] for letter in of]), jnp.float32) for of in (of_x, of_kernel, of_y)
    )
    _, pull = jax.vjp(lambda x, kernel: product(spec, x, kernel), x, kernel)
    d_x, d_kernel = jax.jit(pull)(g)
    x, kernel, g = (np.asarray(array, np.float64) for array in (x, kernel, g))
    np.testing.assert_allclose(d_x, np.einsum(f"{of_y},{of_kernel}->{of_x}", g, kernel, optimize=True), atol=1e-4)
    expected = np.einsum(f"{of_x},{of_y}->{of_kernel}", x, g, optimize=True)
    np.testing.assert_allclose(d_kernel, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
