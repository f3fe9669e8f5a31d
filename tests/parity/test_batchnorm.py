"""Batch normalisation against torch.nn.BatchNorm1d: in training, with what runs on, and in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model.batchnorm import BatchNorm
from model.contract import Context

B, L, D = 4, 9, 6
THEIRS = dict(scale="weight", bias="bias", running_mean="running_mean", running_var="running_var")


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_batchnorm(padded):
    """Theirs is given the real tokens alone. Values, gradients and running statistics, five steps and a test."""
    rng = np.random.default_rng(0)
    segments = rng.integers(0, 3, (B, L)) if padded else np.ones((B, L), np.int64)
    real, ctx = segments > 0, Context(segments=jnp.asarray(segments, jnp.int32) if padded else None, train=True)
    theirs, ours = torch.nn.BatchNorm1d(D), BatchNorm()  # both with the usual momentum and epsilon
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.tensor(rng.normal(size=D)))
    params = {name: jnp.asarray(theirs.state_dict()[their].numpy()) for name, their in THEIRS.items()}

    def loss(params, x, weights):
        y, sown = ours.apply({"params": params}, x, ctx, mutable=["running"])
        return jnp.sum(y[real] * weights), (y[real], sown["running"])

    for step in range(5):
        x = rng.normal(step, 1 + step, (B, L, D)).astype(np.float32)
        weights = rng.normal(size=(real.sum(), D)).astype(np.float32)
        (by_params, by_x), (y, now) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x, weights)
        tokens = torch.tensor(x[real], requires_grad=True)
        want = theirs(tokens)
        theirs.zero_grad()
        (want * torch.tensor(weights)).sum().backward()
        np.testing.assert_allclose(y, want.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(by_x[real], tokens.grad, rtol=1e-3, atol=1e-5)
        for name, their in (("scale", theirs.weight), ("bias", theirs.bias)):
            np.testing.assert_allclose(by_params[name], their.grad, rtol=1e-4, atol=1e-4)
        for name, value in now.items():
            np.testing.assert_allclose(value, getattr(theirs, name), rtol=1e-5, atol=1e-6)
        params |= now
    y = ours.apply({"params": params}, x, ctx.replace(train=False))
    np.testing.assert_allclose(y[real], theirs.eval()(torch.tensor(x[real])).detach(), rtol=1e-4, atol=1e-5)
