"""What a stack keeps for its backward pass: no more in a loop than without one, and less where it is asked."""

import math
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


def gradient(scan: bool, kept: str, **given):
    given = dict(width=D, mlp_width=F, layers=LAYERS, scan=scan, kept=kept, dtype="bfloat16", position="rope") | given
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


def stacked(kept: str, **given) -> list[jax.core.ShapedArray]:
    """The arrays of tokens that the loop on a GPU keeps, and all kernels that it copies; their first axis is layers."""
    with meshes.in_force(meshes.mesh_of("gpu")):
        function, variables = gradient(True, kept, **given)
        program = jax.make_jaxpr(function)(variables)
    loop = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    return [v.aval for v in loop.outvars[loop.params["num_carry"] :] if v.aval.ndim > 2]


@pytest.mark.parametrize("kept", ["all", "matmuls"])
def test_of_an_mlp_its_maps_are_kept_and_nothing_made_of_them(kept):
    """And no copies of kernels in the dtype of the products."""
    found = [leaf.shape[1:] for leaf in stacked(kept)]
    assert found.count((B, L, F)) == 2
    assert all(shape[0] == B for shape in found)


@pytest.mark.parametrize(
    ("mixer", "kept", "bytes_each"),
    [
        ("mamba", "all", 2 + 2 + 2 + 4 + 2),
        ("mamba2", "all", 2 + 2 + 2 + 2),
        ("mamba", "matmuls", 2 + 2 + 4 + 2),
        ("mamba2", "matmuls", 2 + 2 + 2),
    ],
)
def test_of_mamba_no_more_is_kept_than_maps_and_kernels_made(mixer, kept, bytes_each):
    """Of an inner channel of a token: what `in` maps it to and the gate; what is convolved, unless it is made anew; dt
    where each has its own; and what the scan reads of its states."""
    one = B * L * 2 * D
    found = stacked(kept, mixers=(mixer,), mlp="none", position="none", mamba2=dict(state=16))
    of_channels = [leaf for leaf in found if leaf.shape[1:3] == (B, L) and math.prod(leaf.shape[1:]) >= one]
    assert sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in of_channels) == bytes_each * one
    assert not any({D, 2 * D} <= set(leaf.shape[1:]) for leaf in found if leaf.shape[1] != B), "no copies of kernels"
