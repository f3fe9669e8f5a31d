"""B2S6: its published formula as a loop, and what blocks and bias are for."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.documents import reverse
from model.errors import UserError
from model.mixers.b2s6 import B2S6, b2s6_recurrence
from tests import zoo

J, P, N = 2, 3, 4


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).normal
    maps = (J, P, N)
    return dict(
        w=draw(size=(J, P)),
        b=draw(size=(J, P)) - 2,
        A=-0.5 + 1j * np.arange(N),
        B_weight=draw(size=maps) + 1j * draw(size=maps),
        B_bias=draw(size=maps) + 1j * draw(size=maps),
        C=draw(size=(1, *maps)),
    )


def inputs(L: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2, L, J * P))


def loop(u, w, b, A, B_weight, B_bias, C):
    """Algorithm 2 of the paper, a block, a channel and a token at a time, with both modes of each pair."""
    rows, L, _ = u.shape
    A, C = np.concatenate([A, A.conj()]), np.concatenate([C[0], C[0]], axis=-1)
    B_weight, B_bias = (np.concatenate([B, B.conj()], axis=-1) for B in (B_weight, B_bias))
    y = np.zeros_like(u)
    for row in range(rows):
        for j in range(J):
            block = u[row, :, j * P : (j + 1) * P]
            for i in range(P):
                x = np.zeros(2 * N, complex)
                for k in range(L):
                    dt = np.log1p(np.exp(w[j] @ block[k] + b[j, i]))
                    B = block[k] @ B_weight[j] + B_bias[j, i]
                    x = np.exp(dt * A) * x + (np.exp(dt * A) - 1) / A * B * block[k, i]
                    y[row, k, j * P + i] = (block[k] @ C[j] @ x).real
    return y


@pytest.mark.quick
@pytest.mark.parametrize("form", ["sequential", "associative", "chunked"])
def test_the_scan_is_the_published_loop(form):
    with jax.enable_x64(True):
        u, values = inputs(150), weights()
        start = jnp.zeros((2, J * P, N), jnp.complex128)
        run = jax.jit(partial(b2s6_recurrence, ctx=Context(), implementation=form))
        y, _ = run(jnp.asarray(u), start, **jax.tree.map(jnp.asarray, values))
    np.testing.assert_allclose(y, loop(u, **values), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", ["sequential", "chunked"])
def test_both_ways_are_read_as_each_alone(form):
    """Of documents too, and with padding between them."""
    values = jax.tree.map(jnp.asarray, weights()) | dict(
        C=jnp.asarray(np.random.default_rng(2).normal(size=(2, J, P, N)))
    )
    u, start = jnp.asarray(inputs(40)), jnp.zeros((2, J * P, N), jnp.complex64)
    ctx = zoo.context([[1] * 15 + [0] * 5 + [2] * 20, [1] * 40])
    run = jax.jit(partial(b2s6_recurrence, implementation=form))
    y, h = run(u, start, ctx, **values)
    forward, end = run(u, start, ctx, **values | dict(C=values["C"][:1]))
    backward, _ = run(u[:, ::-1], start, reverse(ctx), **values | dict(C=values["C"][1:]))
    np.testing.assert_allclose(y, forward + backward[:, ::-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(h, end, rtol=1e-5)
    assert not np.allclose(forward, backward[:, ::-1], atol=0.1)


def last_output(u, **values):
    values = jax.tree.map(jnp.asarray, values)
    return b2s6_recurrence(u, jnp.zeros((2, J * P, N), jnp.complex64), Context(), "associative", **values)[0][:, -1]


@pytest.mark.quick
def test_blocks_do_not_see_each_other():
    by_input = jax.jit(jax.jacobian(lambda u: last_output(u, **weights()).sum(axis=0)))
    seen = np.abs(by_input(jnp.asarray(inputs(8), jnp.float32))).sum(axis=(1, 2))  # [output, input]
    assert (seen[:P, :P] > 0).all() and (seen[P:, P:] > 0).all()
    assert (seen[:P, P:] == 0).all() and (seen[P:, :P] == 0).all()


@pytest.mark.quick
def test_a_large_input_leaves_some_of_the_past():
    """Theorems 2 and 5: it makes a block forget that turns towards it, and one that turns away keeps."""
    values, u = weights(), np.array(inputs(8), np.float32)
    u[:, 4] = 40 * np.abs(u[:, 4])
    values["w"][0], values["w"][1] = 1, -1
    by_input = jax.jit(jax.jacobian(lambda u: last_output(u, **values).sum(axis=0)))
    by_first = np.abs(by_input(jnp.asarray(u))[:, :, 0]).sum(axis=(1, 2))
    assert by_first[:P].max() < 1e-9 < 1e-3 < by_first[P:].min()


@pytest.mark.quick
def test_the_bias_gives_every_channel_a_map_of_its_own():
    """Without it, channels of a block that are fed the same are the same, but for their steps."""
    u = np.repeat(np.array(inputs(8), np.float32)[..., :1], J * P, axis=-1)
    values = weights()
    values["b"][:] = -2
    own = np.asarray(last_output(u, **values))[:, :P]
    values["B_bias"][:] = 0
    shared = np.asarray(last_output(u, **values))[:, :P]
    np.testing.assert_allclose(shared, shared[:, :1].repeat(P, axis=1), rtol=1e-5)
    assert np.ptp(own, axis=1).min() > 1e-2


def test_it_never_holds_all_its_states_nor_all_that_its_tokens_chose():
    mixer, x = B2S6(width=64), jnp.zeros((1, 4096, 64))
    values = jax.eval_shape(lambda: nn.unbox(mixer.init(jax.random.key(0), x, Context())))
    step = jax.jit(jax.grad(lambda values, x: jnp.sum(mixer.apply(values, x, Context())[0] ** 2), (0, 1)))
    memory = step.lower(values, x).compile().memory_analysis().temp_size_in_bytes
    states = x.shape[1] * mixer.state_bytes(0)
    assert memory < 0.4 * states


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(blocks=3), "b2s6's blocks 3 does not divide its width, 16; closest that does: 2"),
        (dict(state=5), "B2S6.state is 5; allowed: a whole number from 2 .*even; closest: 6"),
        (dict(A_init="hippo"), "B2S6.A_init is 'hippo'"),
        (dict(dt_min=0.2), "dt_min 0.2 must be at most dt_max 0.1"),
        (dict(implementation="convolution"), "B2S6.implementation is 'convolution'; allowed: sequential, serial,"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(options, words):
    with pytest.raises(UserError, match=words) as error:
        jax.eval_shape(B2S6(width=16, **options).init, jax.random.key(0), zoo.inputs(1, 4), Context())
    assert "\n" not in str(error.value)


@pytest.mark.quick
def test_it_starts_with_steps_in_range_and_outputs_of_the_size_of_its_inputs():
    u = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256, 64)), jnp.float32)
    mixer = B2S6(width=64)
    p = nn.unbox(jax.jit(mixer.init)(jax.random.key(0), u, Context()))["params"]
    dt = jax.nn.softplus(p["b"])
    assert 0.001 <= dt.min() < 0.002 and 0.05 < dt.max() <= 0.1
    np.testing.assert_allclose(p["A_imag"], np.pi * np.arange(32), rtol=1e-6)
    A, B_weight, B_bias = (
        jax.lax.complex(*parts) for parts in ((-jnp.exp(p["A_real"]), p["A_imag"]), p["B_weight"], p["B_bias"])
    )
    values = dict(w=p["w"], b=p["b"], A=A, B_weight=B_weight, B_bias=B_bias, C=p["C"])
    y, _ = b2s6_recurrence(u, mixer.init_state(4, 0), Context(), None, **values)
    assert 0.5 < np.std(y[:, 128:]) < 2
