"""What stands around the mixers: biases and norms, and what parameters start from."""

import jax
import numpy as np
import pytest

from model import build, entries
from model.asked import Asked
from model.mixers import MIXERS
from model.mixers.mega import Mega
from model.mixers.state_space import StateSpace
from tests import zoo
from tests.test_model import TOKENS, init, model_config, run

pytestmark = [pytest.mark.usefixtures("quick_draws"), pytest.mark.usefixtures("quickly_compiled")]


@pytest.mark.quick
@pytest.mark.parametrize("mlp, asked, has", [("gelu", None, True), ("gelu", False, False), ("swiglu", True, True)])
def test_biases_of_the_mlp(mlp, asked, has):
    """Where they are asked for, else where the MLP has them by itself."""
    model = build.build(model_config(mlp=mlp, mlp_bias=asked), Asked(20))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    assert {"bias" in one for one in params["stack"]["layers"]["block_0"]["mlp"].values()} == {has}


@pytest.mark.quick
def test_hidden_width_is_a_multiple_that_the_config_names():
    model = build.build(model_config(width=4096, layers=32, mlp_multiple=256), Asked(20))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    up = params["stack"]["layers"]["block_0"]["mlp"]["up"]["kernel"].value
    assert up.shape == (32, 4096, 11_008)  # LLaMA's


@pytest.mark.quick
@pytest.mark.parametrize("order", ["before", "after"])
def test_norm_of_embeddings(order):
    """Next to nothing is added by the layers, so that logits are those of the embeddings, normed."""
    config = model_config(
        embed_norm=order, position="learned", tied=False, unembed_bias=True, branch_scale=1e-9, final_norm=False
    )
    model = build.build(config, Asked(20))
    params = init(model, TOKENS)["params"]
    noise = np.random.default_rng(1)
    params |= {"embed_norm": {"scale": noise.normal(size=16)}, "unembed_bias": noise.normal(size=20)}
    logits, _ = run(model, {"params": params}, TOKENS)

    def normed(x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * params["embed_norm"]["scale"]

    x, places = params["embed"]["embedding"][TOKENS], params["position"]["table"][:12]
    x = normed(x) + places if order == "before" else normed(x + places)
    np.testing.assert_allclose(logits, x @ params["unembed"]["kernel"] + params["unembed_bias"], atol=1e-5)


ENDED = [mixer for mixer in zoo.ALONE if MIXERS[mixer].last]  # by a linear map


@pytest.mark.few(3)
@pytest.mark.parametrize("mixer", ENDED)
def test_last_kernels_scaled_with_depth(mixer):
    """GPT-2's start: all that differs are the maps that end a branch, by the root of how many branches there are."""
    mlp, down = ("channel_mix", "v") if mixer == "rwkv" else ("swiglu", "down")
    config = model_config(mixers=(mixer,), mlp=mlp, layers=3, causal=mixer in zoo.WRITERS)
    models = (build.build(config | dict(depth_init=on), Asked(20)) for on in (False, True))
    plain, scaled = (dict(jax.tree_util.tree_leaves_with_path(init(model, TOKENS))) for model in models)
    ends, found = {f"['mixer']['{MIXERS[mixer].last}']", f"['mlp']['{down}']"}, set()
    for path, leaf in plain.items():
        end = next((end for end in ends if end in jax.tree_util.keystr(path)), None)
        found.add(end)
        np.testing.assert_allclose(scaled[path], leaf * (6**-0.5 if end else 1), rtol=1e-6)
    # An RNN whose state has the model's width ends in the recurrence.
    assert found - {None} == {end for end in ends if "mlp" in end or mixer not in ("gru", "lstm", "rnn")}


@pytest.mark.quick
@pytest.mark.few(10)
# State spaces gate what comes out of it, and Mega does more.
@pytest.mark.parametrize("mixer", [m for m in ENDED if not issubclass(MIXERS[m], StateSpace | Mega)])
def test_what_ends_a_mixer_is_linear(mixer):
    module = zoo.make((mixer, {"hidden": 12} if mixer in ("gru", "lstm", "rnn") else {}, "none"))
    params, x = zoo.params(module)["params"], zoo.inputs(1, 4)
    more = params | {module.last: jax.tree.map(lambda leaf: 2 * leaf, params[module.last])}
    y, doubled = (zoo.apply(module)({"params": one}, x, zoo.context(L=4))[0] for one in (params, more))
    np.testing.assert_allclose(doubled, 2 * y, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_depth_is_counted_in_branches():
    """Of all layers, whose MLPs may differ: here 2 x 2 + 1."""
    own = dict(bare=dict(mixer="attention", position=None, mlp="none"), full=dict(mixer="attention", position=None))
    config = model_config() | dict(mixers=("full", "bare"), layers=3, depth_init=True) | own
    model = build.build(config | entries.sections(config["mixers"], "none", config), Asked(20))
    assert [one(parent=None).init_scale for one in model.bare().stack(parent=None).blocks] == [5**-0.5] * 2
