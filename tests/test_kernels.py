"""What kernels multiply, told by the program that was traced."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from train import kernels


def kernel(x, w, made):
    """Two products, of which a half of the places has the second, and one more in a loop of three."""
    made[...] = x[...] @ w[...]

    @pl.when(pl.program_id(1) > 0)
    def _():
        made[...] += x[...] @ w[...]

    made[...] = lax.fori_loop(0, 3, lambda _, x: x @ w[...], made[...])


@pytest.mark.quick
def test_a_kernel_counts_for_every_place_of_its_grid():
    tile = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    whole = pl.pallas_call(kernel, out_shape=tile, grid=(5, 2), name="tiles")

    @jax.jit
    def layers(x, w):
        return lax.scan(lambda x, _: (whole(x, w), None), x, None, length=7)[0]

    found = kernels.told(jax.make_jaxpr(layers)(tile, tile).jaxpr)
    assert found == {("tiles", ((16, 16),)): 5 * 2 * (1 + 0.5 + 3) * 2 * 16**3}
