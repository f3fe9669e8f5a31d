"""Hyena by its paper's definition; convolutions of documents, whatever lies before them; and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers.hyena import Hyena
from model.ops.conv import window_conv
from model.ops.document_conv import document_conv
from tests import zoo


def filters(p, mixer, direction, n, L):
    """The n-th filter of one direction, lag by lag."""
    D, rows = mixer.width, []
    slow, fast = (np.log(100) / part for part in (1.5, 0.3))
    for lag in range(L):
        t = lag / mixer.longest
        waves = [2 * np.pi * t * f for f in np.linspace(1e-4, mixer.bands - 1, mixer.bands)]
        h = np.asarray([t, *np.cos(waves), *(-np.sin(waves))])
        for i in range(mixer.filter_layers):
            matrix = p["filter_in"] if i == 0 else p["filter_hidden"][i - 1]
            h = np.sin(p["frequency"] * (h @ matrix + p["filter_bias"][i]))
        window = np.exp(-t * np.linspace(slow, fast, D)) + mixer.floor
        rows.append(p["filter_out"][direction, n] @ h * window)
    return np.asarray(rows)


def definition(p, x, mixer):
    """One row in float64: z becomes x_n (h_n * z), for every n."""
    L, W = len(x), mixer.conv
    maps = np.einsum("ld,dnk->nlk", x, p["in"]["kernel"])
    read = np.zeros_like(maps)
    for n, t in np.ndindex(maps.shape[:2]):
        read[n, t] = p["conv_bias"][n]
        for back in range(min(W, t + 1)):
            read[n, t] += p["conv"][W - 1 - back, n] * maps[n, t - back]
    z = read[0]
    for n in range(mixer.order):
        y = p["skip"][n] * z
        for direction in range(1 if mixer.causal else 2):
            h = filters(p, mixer, direction, n, L)
            for t, s in np.ndindex(L, L):
                lag = t - s if direction == 0 else s - t
                if lag >= 0:
                    y[t] = y[t] + h[lag] * z[s]
        z = read[n + 1] * y
    return z @ p["out"]["kernel"]


SMALL = dict(order=3, conv=4, filter_layers=1, bands=2, longest=8, floor=0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("settings, L", [({}, 70), (SMALL, 20)], ids=["default", "small"])
def test_hyena_is_its_papers_definition(settings, L, causal):
    """By transforms, and of a short row directly."""
    mixer, x = Hyena(width=zoo.WIDTH, causal=causal, **settings), zoo.inputs(1, L)
    variables = zoo.params(mixer)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    y, _ = zoo.apply(mixer)(variables, x, Context())
    assert zoo.far(y[0], definition(p, np.asarray(x[0], np.float64), mixer)) < 1e-5


L = 300
SEGMENTS = np.stack(
    [
        np.repeat([0, 1, 0, 1, 2, 3, 0], [5, 60, 20, 70, 1, 130, 14]),  # one across many cuts, with padding in it
        np.repeat([1, 2, 3, 4], [128, 64, 64, 44]),  # documents that end where blocks do
    ]
)


@pytest.mark.parametrize("P", [0, 50])
def test_halves_are_the_sum_over_lags(P):
    """Values and gradients; the first document goes on from past inputs, and does not see those before it."""
    rng = np.random.default_rng(0)
    u, weight = rng.normal(size=(2, 2, L, 3)).astype(np.float32)
    past, taps = rng.normal(size=(2, P, 3)).astype(np.float32), rng.normal(size=(3, L + P)).astype(np.float32)
    ctx = zoo.context(SEGMENTS)
    before = np.asarray([[20], [0]]) if P else 0
    reach, real = np.where(SEGMENTS == 1, before, 0) + ctx.positions, SEGMENTS > 0

    def kernel(taps, n):
        return taps[:, :n].T

    @jax.jit
    def slopes(u, past, taps):
        def objective(run, options, u, past, taps):
            y = run(u, past, kernel, (taps,), reach=reach, real=real, **options)
            return jnp.sum(y * weight * real[..., None])

        ways = (document_conv, {}), (window_conv, dict(W=L + P))
        return [jax.value_and_grad(objective, argnums=(2, 3, 4))(*way, u, past, taps) for way in ways]

    for one, other in zip(*map(jax.tree.leaves, slopes(u, past, taps)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max(initial=1))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_long_row_of_documents_is_each_alone(causal):
    mixer, x = Hyena(width=zoo.WIDTH, causal=causal), zoo.inputs(2, L)
    variables = zoo.params(mixer)
    y, _ = zoo.apply(mixer)(variables, x, zoo.context(SEGMENTS))
    here = SEGMENTS[0] == 1
    alone, _ = zoo.apply(mixer)(variables, x[:1, here], Context())
    np.testing.assert_allclose(y[0, here], alone[0], rtol=1e-6, atol=5e-5)  # numbers up to 270, of which 3e-5 is a bit


def test_a_prompt_and_what_follows_it():
    """A long piece behind a short one, and then token by token."""
    mixer, x = Hyena(width=zoo.WIDTH), zoo.inputs(1, 90)
    variables, run = zoo.params(mixer), zoo.apply(mixer)
    whole, _ = run(variables, x, Context())
    state, made = mixer.init_state(1, 90), []
    for start, end in ((0, 5), (5, 88), (88, 89), (89, 90)):
        y, state = run(variables, x[:, start:end], Context(positions=jnp.arange(start, end)[None]), state)
        made.append(y)
    np.testing.assert_allclose(np.concatenate(made, axis=1), whole, atol=5e-5)


@pytest.mark.scale
def test_documents_take_memory_that_grows_with_the_length():
    mixer = Hyena(width=zoo.WIDTH)
    variables = zoo.params(mixer)

    def memory(n):
        def objective(variables, x, ctx):
            return jnp.sum(mixer.apply(variables, x, ctx)[0] ** 2)

        step = jax.jit(jax.grad(objective, argnums=(0, 1)))
        ctx = zoo.context(np.repeat([[1, 2]], n // 2, axis=1))
        return step.lower(variables, zoo.inputs(1, n), ctx).compile().memory_analysis().temp_size_in_bytes

    assert np.log2(memory(4096) / memory(2048)) < 1.25


def test_a_state_holds_the_inputs_of_every_convolution():
    mixer = Hyena(width=8, order=3)
    assert mixer.state_bytes(11) - mixer.state_bytes(1) == 4 * 3 * 10 * 8


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(order=0), "order is 0; allowed: .*; closest: 1"),
        (dict(floor=-0.5), "floor is -0.5; allowed: a number of at least 0; closest: 0"),
        (
            dict(implementation="halfs"),
            "implementation is 'halfs'; allowed: transform, halves, reference",
        ),
    ],
)
def test_mistakes_are_told_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        Hyena(width=zoo.WIDTH, **settings)


@pytest.mark.quick
def test_what_a_transform_cannot_do_is_refused():
    mixer = Hyena(width=zoo.WIDTH, implementation="transform")
    with pytest.raises(UserError, match="cannot carry a state or tell documents apart; set implementation=None"):
        jax.eval_shape(mixer.init, jax.random.key(0), zoo.inputs(1, 4), zoo.context(np.asarray([[1, 1, 2, 2]])))
