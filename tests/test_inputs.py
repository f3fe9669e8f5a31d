"""What rows are made of: real vectors, patches of an image, an image and a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import build
from model.asked import Asked, Image, Vectors
from model.errors import UserError
from model.inputs import patches
from tests.test_model import init, model_config, run

pytestmark = [pytest.mark.usefixtures("quick_draws"), pytest.mark.usefixtures("quickly_compiled")]
RNG = np.random.default_rng(0)
PICTURES = RNG.normal(size=(2, 8, 12, 3)).astype(np.float32)
PICTURE = Image(8, 12, 3)


def model(asked: Asked, **changes):
    return build.build(model_config(**dict(causal=False, patch=4) | changes), asked)


@pytest.mark.quick
def test_an_image_of_224_in_patches_of_16_is_196_tokens_of_768():
    image = RNG.normal(size=(1, 224, 224, 3)).astype(np.float32)
    found = np.asarray(patches(image, 16))
    assert found.shape == (1, 196, 768)
    for place in (0, 13, 14, 195):
        row, column = divmod(place, 14)
        square = image[0, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        np.testing.assert_array_equal(found[0, place], square.ravel())


@pytest.mark.quick
def test_vit_base_has_its_parameters():
    """86,567,656 with 1,000 classes (https://arxiv.org/abs/2010.11929), less the biases of attention."""
    config = dict(width=768, layers=12, norm="layernorm", mlp="gelu", mlp_width=3072, pool="cls", patch=16)
    config = model_config(**config, causal=False, position="learned")
    config["learned"]["max_len"], config["attention"]["n_heads"] = 197, 12
    made = build.build(config, Asked(0, n_classes=1000, inputs=Image(224, 224, 3)))
    shapes = jax.eval_shape(made.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    count = sum(np.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert count == 86_567_656 - 12 * 4 * 768


@pytest.mark.quick
def test_vectors_go_through_a_linear_map():
    made = model(Asked(0, n_classes=3, inputs=Vectors(5)), mlp="none", layers=1)
    x = RNG.normal(size=(2, 7, 5)).astype(np.float32)
    variables = init(made, x)
    embed = variables["params"]["embed"]
    assert embed["kernel"].shape == (5, 16) and embed["bias"].shape == (16,)
    logits, _ = run(made, variables, x)
    assert logits.shape == (2, 3)
    doubled = {"params": variables["params"] | {"embed": {"kernel": embed["kernel"] / 2, "bias": embed["bias"]}}}
    np.testing.assert_allclose(run(made, doubled, 2 * x)[0], logits, atol=1e-5)
    padded = np.pad(x, [(0, 0), (0, 3), (0, 0)], constant_values=9)
    segments = np.pad(np.ones((2, 7), np.int32), [(0, 0), (0, 3)])
    np.testing.assert_allclose(run(made, variables, padded, segments=segments)[0], logits, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("position", ["learned", "sincos2d", "axial"])
def test_with_positions_a_model_tells_where_a_patch_is_and_without_it_does_not(position):
    swapped = np.concatenate([PICTURES[:, 4:], PICTURES[:, :4]], axis=1)  # the two lines of patches
    for pool in ("mean", "cls"):
        for place, tells in ((position, True), ("none", False)):
            made = model(Asked(0, n_classes=3, inputs=PICTURE), position=place, pool=pool)
            variables = init(made, PICTURES)
            moved = np.abs(run(made, variables, PICTURES)[0] - run(made, variables, swapped)[0]).max()
            assert (moved > 1e-4) == tells, (place, pool, moved)


IMAGE_AND_TEXT = Asked(20, image=PICTURE)
TOKENS = jnp.asarray(RNG.integers(0, 20, (2, 5)), jnp.int32)


@pytest.mark.few(1)
@pytest.mark.parametrize("position", ["rope", "axial", "sincos2d", "learned"])
def test_an_image_and_a_text_in_one_row(position):
    """Logits are of the text alone, it sees the image, and in pieces it goes on where it stopped."""
    made = model(IMAGE_AND_TEXT, causal=True, position=position)
    variables = init(made, TOKENS, image=PICTURES)
    whole, _ = run(made, variables, TOKENS, image=PICTURES)
    assert whole.shape == (2, 5, 20) and "embedding" in variables["params"]["embed"]
    at = jnp.asarray([[4, 0], [1, 2]])
    some, _ = run(made, variables, TOKENS, image=PICTURES, at=at)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, at[..., None], axis=1), atol=1e-6)
    other, _ = run(made, variables, TOKENS, image=PICTURES[::-1])
    assert (np.abs(other - whole).max((1, 2)) > 1e-4).all(), "every token sees the image"
    first, state = run(made, variables, TOKENS[:, :2], image=PICTURES, state=made.init_state(2, 6 + 5))
    rest, _ = run(made, variables, TOKENS[:, 2:], state=state)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), whole, atol=2e-5)
    padded = jnp.concatenate([jnp.full((2, 2), 9), TOKENS], axis=1)  # padding between image and text
    segments = jnp.asarray([[0, 0, 1, 1, 1, 1, 1]] * 2)
    np.testing.assert_allclose(
        run(made, variables, padded, image=PICTURES, segments=segments)[0][:, 2:], whole, atol=2e-5
    )
    assert made.state_bytes(5) == made.bare().state_bytes(6 + 5)


@pytest.mark.quick
@pytest.mark.parametrize(
    "asked, changes, words",
    [
        (
            Asked(0, 3, inputs=Image(32, 32, 3)),
            dict(patch=6),
            "model.patch 6 does not divide the image's height 32; .*: 4",
        ),
        (Asked(0, 3, inputs=Image(32, 24, 3)), dict(patch=16), "model.patch 16 does not .* image's width 24; .*: 12"),
        (Asked(9, image=Image(32, 32, 3)), dict(patch=5), "model.patch 5 does not divide the image's height 32; .*: 4"),
        (Asked(9, inputs=Vectors(2)), {}, "model.tied is True, .*its inputs are real numbers; closest: False"),
        (Asked(0, 3, inputs=Vectors(2)), dict(position="sincos2d"), "'sincos2d' needs the columns of a grid"),
        (
            Asked(0, 3, inputs=PICTURE),
            dict(position="axial", patch=4, columns=5),
            "axial.columns is 5, .* has 3 patches in a line",
        ),
        (Asked(0, 3, inputs=PICTURE), dict(kind="seq2seq", mixers=()), "'seq2seq' reads token ids"),
    ],
)
def test_what_cannot_be_is_one_line(asked, changes, words):
    columns = changes.pop("columns", None)
    config = model_config(**dict(causal=False) | changes)
    if columns:
        config["axial"]["columns"] = columns
    with pytest.raises(UserError, match=words) as raised:
        made = build.build(config, asked)
        jax.eval_shape(made.init, jax.random.key(0), PICTURES if asked.inputs == PICTURE else jnp.zeros((1, 4, 2)))
    assert "\n" not in str(raised.value)
