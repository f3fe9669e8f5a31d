"""What the settings of the softmax mixers mean, told by plain attention on the tokens that are seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers.attention import Attention
from model.mixers.cross_attention import CrossAttention
from model.mixers.mla import MLA
from model.positions import POSITIONS
from tests import zoo
from tests.draws import HASH


def attention(position="rope", **settings):
    return Attention(width=zoo.WIDTH, position=POSITIONS[position], **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("position", ["rope", "alibi"])
@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_a_window_is_plain_attention_to_its_tokens(position, sink_tokens):
    """With sinks: to the first tokens and the window's, counted anew from 0, which is StreamingLLM's cache."""
    mixer, plain = attention(position, window=3, sink_tokens=sink_tokens), attention(position)
    variables, x = zoo.params(plain), zoo.inputs(1, 10)
    y, _ = zoo.apply(mixer)(variables, x, Context())
    run = zoo.apply(plain)
    for t in range(10):
        kept = [j for j in range(t + 1) if j < sink_tokens or t - j < 3]
        alone, _ = run(variables, x[:, np.asarray(kept)], Context())
        np.testing.assert_allclose(y[:, t], alone[:, -1], atol=2e-5, err_msg=f"token {t}")


def test_a_stream_goes_on_for_ever_in_constant_memory():
    mixer = attention(window=4, sink_tokens=2)
    assert mixer.state_bytes(100) == mixer.state_bytes(10**9)
    variables, x = zoo.params(mixer), zoo.inputs(1, 21)
    state, run = mixer.init_state(1, 10**9), zoo.apply(mixer)
    _, state = run(variables, x[:, :20], zoo.context(L=20), state)
    far = 4 * 10**8  # a multiple of the window, so that tokens keep their slots
    later = dict(state, positions=jnp.where(state["positions"] < 2, state["positions"], state["positions"] + far))
    now, _ = run(variables, x[:, 20:], Context(positions=jnp.asarray([[20]])), state)
    then, _ = run(variables, x[:, 20:], Context(positions=jnp.asarray([[20 + far]])), later)
    np.testing.assert_allclose(then, now, atol=1e-6)


def test_a_document_that_opens_far_into_a_stream():
    """The last tokens of a long document and the first of the next, in one call."""
    mixer = attention(window=4, sink_tokens=2)
    variables, x = zoo.params(mixer), zoo.inputs(1, 24)
    segments = np.asarray([[1] * 18 + [2] * 6])
    ctx = zoo.context(segments)
    whole, _ = zoo.apply(mixer)(variables, x, ctx)
    state, run = mixer.init_state(1, 24), zoo.apply(mixer)
    for start, end in ((0, 16), (16, 24)):
        part = Context(positions=ctx.positions[:, start:end], segments=ctx.segments[:, start:end])
        y, state = run(variables, x[:, start:end], part, state)
        np.testing.assert_allclose(y, whole[:, start:end], atol=2e-5)


def test_a_prefix_is_bidirectional():
    mixer = attention("none", prefix=3)
    variables, x = zoo.params(mixer), zoo.inputs(1, 8)
    outputs = jax.jit(jax.jacobian(lambda x: mixer.apply(variables, x, Context())[0].sum(-1)[0]))
    sees = np.abs(np.asarray(outputs(x))).sum((1, 3)) > 1e-6  # [8, 1, 8, D] before
    want = np.tril(np.ones((8, 8), bool))
    want[:, :3] = True
    np.testing.assert_array_equal(sees, want)


@pytest.mark.parametrize(
    "mixer", [attention(), attention(window=3), MLA(width=zoo.WIDTH)], ids=["full", "ring", "latent"]
)
def test_caches_hold_what_they_say_and_no_more(mixer):
    sizes = [mixer.state_bytes(n) for n in (3, 100)]
    assert sizes[1] == sizes[0] if getattr(mixer, "window", None) else sizes[1] > 20 * sizes[0]


def test_a_latent_cache_is_small():
    wide = dict(width=512, n_heads=8)
    latent, whole = MLA(**wide, kv_rank=64, shared_dim=32), Attention(**wide)
    assert latent.state_bytes(1000) < 0.11 * whole.state_bytes(1000)


@pytest.mark.parametrize("mixer", [attention(), MLA(width=zoo.WIDTH)], ids=["full", "latent"])
def test_a_cache_written_past_its_end(mixer):
    variables, x = zoo.params(mixer), zoo.inputs(1, 6)
    run = zoo.apply(mixer)
    with pytest.raises(UserError, match="6 tokens do not fit in a key-value cache of 4"):
        run(variables, x, zoo.context(L=6), mixer.init_state(1, 4))
    _, state = run(variables, x[:, :3], Context(positions=jnp.arange(3)[None]), mixer.init_state(1, 4))
    y, _ = run(variables, x[:, 3:], Context(positions=jnp.arange(3, 6)[None]), state)
    assert np.isnan(y).all()


# Cross-attention


def cross(memory, memory_segments=None, segments=None, **settings):
    mixer = CrossAttention(width=zoo.WIDTH, **settings)
    x = zoo.inputs(2, 5)
    ctx = Context(segments=segments, memory=memory, memory_segments=memory_segments)
    return jax.jit(lambda key: mixer.apply(mixer.init(key, x, ctx), x, ctx)[0])(jax.random.key(0, impl=HASH))


def test_padding_of_the_memory_changes_nothing():
    memory, noise = zoo.inputs(2, 7, seed=1), zoo.inputs(2, 3, seed=2)
    padded = jnp.concatenate([memory, noise], axis=1)
    segments = jnp.asarray([[1] * 7 + [0] * 3] * 2)
    np.testing.assert_allclose(cross(padded, segments, n_kv_heads=2), cross(memory, n_kv_heads=2), atol=1e-6)
    assert np.abs(cross(padded) - cross(memory)).max() > 1e-3


def test_packed_rows_read_the_memory_of_their_own_document():
    memory = zoo.inputs(2, 7, seed=1)
    segments, theirs = jnp.asarray([[1, 1, 2, 2, 2]] * 2), jnp.asarray([[1] * 4 + [2] * 3] * 2)
    packed = cross(memory, theirs, segments)
    np.testing.assert_allclose(packed[:, :2], cross(memory[:, :4])[:, :2], atol=1e-6)
    np.testing.assert_allclose(packed[:, 2:], cross(memory[:, 4:])[:, 2:], atol=1e-6)


def test_heads_of_cross_attention_have_a_dim_and_scores_a_scale():
    """3 heads of 6 in a width of 16; twice the queries at half the scale are the same scores."""
    ctx, x = Context(memory=zoo.inputs(2, 7, seed=1)), zoo.inputs(2, 5)
    settings = dict(width=zoo.WIDTH, n_heads=3, head_dim=6, bias="qkv")
    plain, halved = CrossAttention(**settings), CrossAttention(**settings, scale=0.5 * 6**-0.5)
    params = jax.jit(plain.init)(jax.random.key(0, impl=HASH), x, ctx)["params"]
    assert params["k"]["bias"].value.shape == (3, 6) and "bias" not in params["out"]
    twice = params | {"q": jax.tree.map(lambda leaf: 2 * leaf, params["q"])}
    y, _ = zoo.apply(plain)({"params": params}, x, ctx)
    np.testing.assert_allclose(zoo.apply(halved)({"params": twice}, x, ctx)[0], y, atol=1e-6)
    assert np.abs(zoo.apply(halved)({"params": params}, x, ctx)[0] - y).max() > 1e-3


def test_cross_attention_needs_a_memory():
    with pytest.raises(UserError, match="'cross_attention' reads a memory"):
        cross(None)


# Bad input


BAD = {
    "a window of 0": (dict(window=0), "window is 0; allowed: a whole number from 1 .*, or None; closest: 1"),
    "more key-value heads than heads": (dict(n_kv_heads=8), "n_kv_heads 8 is more than n_heads 4; closest: 4"),
    "key-value heads that do not divide": (dict(n_kv_heads=3), "n_kv_heads 3 does not divide"),
    "an unknown score": (dict(score="additve"), "closest: additive"),
    "too many sinks": (dict(window=4, sink_tokens=2**31 - 1), "from 0 to 67108864; closest: 67108864"),
    "sinks without a window": (dict(sink_tokens=4), "needs a window"),
    "a negative soft cap": (dict(soft_cap=-1.0), "soft_cap is -1.0; allowed: a number of at least 0; closest: 0"),
    "a rotation and additive scores": (dict(score="additive"), "position 'rope' turns"),
}


@pytest.mark.quick
@pytest.mark.parametrize("settings, message", BAD.values(), ids=BAD.keys())
def test_mistakes_are_told_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        zoo.params(attention(**settings))


@pytest.mark.quick
def test_pairs_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="position 'fire' is not relative"):
        zoo.params(attention("fire", window=4, sink_tokens=1))
    with pytest.raises(UserError, match="position 'xpos' is for causal models"):
        zoo.params(attention("xpos", causal=False))
    with pytest.raises(UserError, match="position 'xpos' is for causal models"):
        zoo.params(attention("xpos", prefix=2))
