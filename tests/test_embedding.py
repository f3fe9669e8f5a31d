"""Tokens to vectors and back: a gradient with the same bits every time, and logits that are not rounded."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from model.layers import Embed, Unembed, dense
from model.ops.cross_entropy import Readout, vocabulary_logits
from model.ops.embedding import at_places, rows, scattered_sums, sorted_sums

RNG = np.random.default_rng(0)
V, D = 11, 5
TOKENS = jnp.asarray(RNG.integers(0, V - 1, (8, 6)), jnp.int32)  # the last one never comes
WEIGHT = jnp.asarray(RNG.normal(size=(8, 6, D)), jnp.float32)

pytestmark = pytest.mark.quick


def test_sorted_sums_are_sums():
    got = jax.jit(sorted_sums, static_argnums=2)(TOKENS, WEIGHT, V)
    want = np.zeros((V, D))
    np.add.at(want, np.asarray(TOKENS), np.asarray(WEIGHT, np.float64))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(scattered_sums(TOKENS, WEIGHT, V), want, atol=1e-5)


def test_devices_sort_their_own_tokens():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def total(tokens, g):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules((("batch", "data"),)):
            return sorted_sums(tokens, g, V)

    placed = jax.device_put((TOKENS, WEIGHT), NamedSharding(mesh, P("data")))
    program = jax.jit(total).lower(*placed).compile()
    np.testing.assert_allclose(program(*placed), scattered_sums(TOKENS, WEIGHT, V), atol=1e-5)
    assert "all-gather" not in program.as_text()


def meant_for(platform: str, devices: int = 1):
    """Programs are made for such a chip; those of one run anywhere, if they hold no kernels."""
    device = AbstractDevice(device_kind=platform, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((devices,), ("data",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def of_table(table):
    return jnp.sum(rows(table, TOKENS) * WEIGHT)


def of_places(x):
    """Places 0 to 9 of eleven, some of which are asked for several times."""
    return jnp.sum(at_places(x, TOKENS) * WEIGHT)


@pytest.mark.parametrize("platform, adds", [("cpu", True), ("gpu", False), ("tpu", True)])
@pytest.mark.parametrize("total, shape", [(of_table, (V, D)), (of_places, (8, V, D))])
def test_a_gpu_gets_no_scatter_add(platform, adds, total, shape):
    """Its threads would add up in any order."""
    with meant_for(platform):
        program = jax.make_jaxpr(jax.grad(total))(jnp.ones(shape))
    assert ("scatter-add" in str(program)) == adds


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_place_s_gradient_is_what_all_say_who_ask_there(platform):
    want = np.zeros((8, V, D))
    for b in range(8):
        np.add.at(want[b], np.asarray(TOKENS[b]), np.asarray(WEIGHT[b], np.float64))
    with meant_for(platform):
        program = jax.make_jaxpr(jax.grad(of_places))(jnp.ones((8, V, D)))
    (got,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, jnp.ones((8, V, D)))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(at_places(WEIGHT, TOKENS % 6)[3, 2], WEIGHT[3, TOKENS[3, 2] % 6])


def test_devices_pick_places_of_their_own_rows():
    def pull(x):
        with meant_for("gpu", devices=4), nn.logical_axis_rules((("batch", "data"),)):
            return jax.grad(of_places)(x)

    text = jax.jit(pull).trace(jnp.ones((8, V, D))).lower(lowering_platforms=("cuda",)).as_text()
    assert "all_gather" not in text and "tensor<2x6xi32>" in text, "two rows of six a device"


def test_a_rare_token_s_gradient_is_not_rounded_by_a_common_one():
    """In bfloat16 a sum of 300 ones ends at 256."""
    embed = Embed(V, D, dtype=jnp.bfloat16)
    tokens = jnp.zeros((1, 300), jnp.int32)
    variables = nn.unbox(embed.init(jax.random.key(0), tokens))
    grads = jax.grad(lambda v: jnp.sum(embed.apply(v, tokens).astype(jnp.float32)))(variables)
    np.testing.assert_array_equal(grads["params"]["embedding"][0], 300.0)


def far(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


def test_narrow_products_have_wide_gradients():
    """What is multiplied is rounded; what is added up, over tokens and over devices, is not."""
    layer = dense(7, ("embed", "mlp"), jnp.bfloat16, "layer", bias=True)
    x = jnp.asarray(RNG.normal(size=(64, D)), jnp.bfloat16)
    weight = jnp.asarray(RNG.normal(size=(64, 7)), jnp.bfloat16)
    variables = {"params": {"kernel": jnp.ones((D, 7)), "bias": jnp.ones(7)}}
    grads = jax.grad(lambda v: jnp.sum((layer.apply(v, x) * weight).astype(jnp.float32)))(variables)["params"]
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    assert far(grads["kernel"], x.T @ weight) < 1e-6
    assert far(grads["bias"], weight.sum(0)) < 1e-6


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_not_rounded(tied):
    """bfloat16 vectors give float32 logits: the products of what was rounded, added up wide."""
    x = jnp.asarray(RNG.normal(size=(4, 64)), jnp.bfloat16)
    if tied:
        module = Embed(V, 64, dtype=jnp.bfloat16)
        variables = nn.unbox(module.init(jax.random.key(0), TOKENS))
        kernel = variables["params"]["embedding"].T
    else:
        module, kernel = Unembed(V, 64, dtype=jnp.bfloat16), jnp.asarray(RNG.normal(size=(64, V)), jnp.float32)
        variables = {"params": {"kernel": kernel}}
    logits = vocabulary_logits(x, nn.apply(lambda bound: bound.table, module)(variables), None, Readout())
    assert logits.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(kernel.astype(jnp.bfloat16), np.float64)
    assert far(logits, exact) < 1e-6
