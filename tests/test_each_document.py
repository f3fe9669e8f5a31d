"""Documents of a row one at a time: values and gradients are those of each document in a row of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.ops.each_document import each_document, numbers

SEGMENTS = np.asarray([[0, 3, 3, 0, 3, 1, 1, 0, 3, 3, 3, 0], [2] * 12, [0] * 12])
NUMBERS = np.asarray([[-1, 0, 0, -1, 0, 1, 1, -1, 2, 2, 2, -1], [0] * 12, [-1] * 12])


def spread(weights, x, n):
    """Every token gets a mean over its document, less itself, times a weight of its own place from the end."""
    L = x.shape[1]
    n = jnp.full(x.shape[0], L) if n is None else n
    total = jnp.sum(x**2, axis=1, keepdims=True) / n[:, None, None]
    from_end = jnp.clip(n[:, None] - 1 - jnp.arange(L), 0, L - 1)
    return weights[from_end][..., None] * jnp.sin(total - x)


def arrays():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=12)), jnp.asarray(rng.normal(size=(3, 12, 4))), rng.normal(size=(3, 12, 4))


def test_documents_are_numbered_as_they_come():
    np.testing.assert_array_equal(numbers(jnp.asarray(SEGMENTS)), NUMBERS)


@pytest.mark.parametrize("right_padded", [False, True])
def test_each_document_alone(right_padded):
    (weights, x, cotangent), segments, number = arrays(), SEGMENTS, NUMBERS
    if right_padded:
        segments = np.asarray([[1] * 12, [1] * 5 + [0] * 7, [0] * 12])
        number = segments - 1
    loud = jnp.where((segments > 0)[..., None], x, jnp.nan)

    def objective(weights, x):
        y = each_document(spread, weights, x, jnp.asarray(segments), right_padded)
        return jnp.sum(y * cotangent), y

    (d_weights, d_x), y = jax.jit(jax.grad(objective, (0, 1), has_aux=True))(weights, loud)
    want_y, want_weights, want_x = np.zeros_like(y), np.zeros_like(d_weights), np.zeros_like(d_x)
    for row, d in {(row, number[row, t]) for row, t in np.argwhere(number >= 0)}:
        (at,) = np.nonzero(number[row] == d)

        def one(weights, part, here=(row, at)):
            y = each_document(spread, weights, part, None)
            return jnp.sum(y * cotangent[here][None]), y

        grads, alone = jax.jit(jax.grad(one, (0, 1), has_aux=True))(weights, x[row, at][None])
        want_y[row, at], want_x[row, at] = alone[0], grads[1][0]
        want_weights += grads[0]
    for got, want in zip((y, d_weights, d_x), (want_y, want_weights, want_x), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
