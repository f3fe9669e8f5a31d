"""Layers that differ: names of the user's own in `model.mixers`, each a mixer with its own settings and position."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import build
from model.asked import Asked
from model.errors import UserError
from train import config as configs

DEBUG = "configs/debug.py"
NAMES = [("model.mixers", "near,far"), ("model.near.mixer", "attention"), ("model.far.mixer", "attention")]
DIFFER = [
    *NAMES,
    ("model.position", "none"),
    ("model.near.window", "2"),
    ("model.near.position", "rope"),
    ("model.far.position", "rope"),
    ("model.far.rope.theta", "1e6"),
    ("model.far.n_kv_heads", "2"),
]
NEAR = [*(each for each in DIFFER if ".far." not in each[0]), ("model.mixers", "near"), ("model.layers", "1")]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (1, 12)), jnp.int32)

pytestmark = pytest.mark.quick


def load(*overrides):
    return configs.load(DEBUG, [("model.width", "16"), *overrides])


def model_of(*overrides):
    return build.build(load(*overrides).model.to_dict(), Asked(20))


def mixers_of(model):
    return [block(parent=None).parts()["mixer"] for block in model.bare().stack(parent=None).blocks]


def test_each_layer_has_its_own_settings_and_position():
    near, far = mixers_of(model_of(*DIFFER))
    assert (near.window, far.window, near.heads[1], far.heads[1]) == (2, None, 4, 2)
    assert [mixer.position(parent=None).theta for mixer in (near, far)] == [10_000.0, 1e6]


def test_an_own_name_without_settings_is_the_mixer_it_names():
    """Parameters, logits and all; without a position of its own it has the model's."""
    plain, named = model_of(("model.mixers", "attention,attention")), model_of(*NAMES)
    variables = [jax.jit(model.init)(jax.random.key(0), TOKENS) for model in (plain, named)]
    jax.tree.map(np.testing.assert_array_equal, *variables)
    logits = [jax.jit(model.apply)(variables[0], TOKENS)[0] for model in (plain, named)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.few(1)
@pytest.mark.parametrize("layers, reach", [(NEAR, 2), (DIFFER, 12)], ids=["near", "near, far"])
def test_a_window_is_of_the_layers_that_name_it(layers, reach):
    """As far as the last logits see: two tokens through the first layer, all through the one above it."""
    model = model_of(*layers)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    rows = jnp.where(jnp.eye(12, dtype=bool), (TOKENS + 1) % 20, TOKENS)  # another token at each place in turn
    logits, _ = jax.jit(model.apply)(variables, jnp.concatenate([TOKENS, rows]))
    seen = jnp.abs(logits[1:, -1] - logits[0, -1]).max(-1) > 0
    assert seen.tolist() == [False] * (12 - reach) + [True] * reach


def test_a_run_of_such_a_config_replays(tmp_path):
    config = load(*DIFFER)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    again = configs.load(str(tmp_path / "config.json"))
    assert configs.digest(again) == configs.digest(config)
    assert configs.flatten(config)["model.far.rope.theta"] == 1e6


def test_a_section_that_is_not_chosen_in_the_end_is_left_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(load(*DIFFER).to_dict()))
    file = str(tmp_path / "config.json")
    assert "near" not in configs.load(file, [("model.mixers", "far")]).model
    assert "rope" not in configs.load(file, [("model.near.position", "alibi")]).model.near


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("model.near.mixer", "atention"), r"model.near.mixer is 'atention'; allowed: .*closest: attention"),
        (("model.mixers", "near,fra"), r"model.mixers is \('near', 'fra'\); allowed: .*closest: \('near', 'far'\)"),
        (
            ("model.near.windo", "2"),
            "unknown config key 'model.near.windo'; model.near has .*closest: model.near.window",
        ),
        (("model.near.position", "learned"), "model.near.position is 'learned'; allowed: none, rope"),
    ],
    ids=lambda case: "=".join(case) if isinstance(case, tuple) else "",
)
def test_mistakes_are_told_as_those_of_any_setting(wrong, words):
    with pytest.raises(UserError, match=words):
        load(*DIFFER, wrong)


def test_a_name_must_be_free_and_a_position_needs_scores():
    with pytest.raises(UserError, match=r"model.rope is another key of the model section, no mixer"):
        load(("model.mixers", "rope"), ("model.rope.mixer", "attention"))
    with pytest.raises(UserError, match=r"model.slow.position is 'rope', and mamba has no scores for it to act on"):
        model_of(("model.mixers", "slow,attention"), ("model.slow.mixer", "mamba"), ("model.slow.position", "rope"))
