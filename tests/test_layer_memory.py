"""What a stack keeps for its backward pass: no more in a loop than without one, and less where it is asked."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from model import build
from model.asked import Asked
from tests import meshes
from train import config as configs

LAYERS, B, L, D, F = 4, 2, 64, 32, 96


def gradient(scan: bool, kept: str):
    given = dict(width=D, mlp_width=F, layers=LAYERS, scan=scan, kept=kept, dtype="bfloat16", position="rope")
    model = build.build(configs.resolve({"model": given}).model.to_dict(), Asked(16))
    tokens = jnp.zeros((B, L), jnp.int32)
    variables = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), tokens)))
    return jax.grad(lambda v: model.apply(v, tokens, train=True)[0].sum()), variables


@cache
def memory(scan: bool, kept: str) -> int:
    function, variables = gradient(scan, kept)
    return jax.jit(function).lower(variables).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.scale
def test_a_loop_takes_no_more_than_its_layers_one_by_one():
    assert memory(True, "all") <= 1.05 * memory(False, "all")


@pytest.mark.scale
def test_what_is_not_kept_takes_no_memory():
    assert memory(True, "nothing") < 0.6 * memory(True, "matmuls") < 0.6 * 0.6 * memory(True, "all")


def stacked(kept: str) -> list[tuple[int, ...]]:
    """The shapes of the arrays of tokens that the loop on a GPU keeps, and of all kernels that it copies."""
    with meshes.in_force(meshes.mesh_of("gpu")):
        function, variables = gradient(True, kept)
        program = jax.make_jaxpr(function)(variables)
    loop = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    kept = [v.aval.shape[1:] for v in loop.outvars[loop.params["num_carry"] :]]
    return sorted(shape for shape in kept if len(shape) > 1)


@pytest.mark.parametrize("kept", ["all", "matmuls"])
def test_of_an_mlp_its_maps_are_kept_and_nothing_made_of_them(kept):
    """And no copies of kernels in the dtype of the products."""
    found = stacked(kept)
    assert found.count((B, L, F)) == 2
    assert all(shape[0] == B for shape in found)
