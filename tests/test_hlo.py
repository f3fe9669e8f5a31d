"""Programs whose work is known: products and exchanges count as often as the loops around them go round."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.host_mesh import mesh_of
from train import hlo, roofline
from train.compile_only import partitioned

ROWS, WIDTH, LAYERS, ROUNDS = 4, 16, 5, 3
EXCHANGES = {
    "all-reduce": lambda y: lax.psum(y, "tensor"),
    "all-gather": lambda y: lax.all_gather(y, "tensor")[0],
    "reduce-scatter": lambda y: jnp.tile(lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True), (1, 4)),
    "all-to-all": lambda y: lax.all_to_all(y, "tensor", 0, 0, tiled=True),
    "collective-permute": lambda y: lax.ppermute(y, "tensor", [(i, (i + 1) % 4) for i in range(4)]),
}


def lowered(exchange):
    """Layers in a loop, each of which multiplies and exchanges in a loop of its own, over the four of `tensor`."""
    mesh = mesh_of(data=2, tensor=4)

    def layer(x, w):
        return lax.fori_loop(0, ROUNDS, lambda _, x: exchange(jnp.tanh(x @ w)), x), None

    run = jax.shard_map(
        lambda x, ws: lax.scan(layer, x, ws)[0],
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.bfloat16)
    return jax.jit(run).lower(x, jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16))


@pytest.mark.parametrize("kind", EXCHANGES)
def test_what_loops_hold_counts_as_often_as_they_go_round(kind):
    _, text = partitioned(lowered(EXCHANGES[kind]))
    found = hlo.work(text)
    times = LAYERS * ROUNDS
    assert found.flops == times * 2 * ROWS * WIDTH * WIDTH
    (each,) = found.collectives
    held = 2 * ROWS * WIDTH * (4 if kind == "all-gather" else 1)  # bytes, in bfloat16
    assert (each.kind, each.count, each.size) == (kind, times, times * held)
    assert roofline.axes_of(each.group, {"data": 2, "tensor": 4}) == ("tensor",)
    assert not found.open_loops
