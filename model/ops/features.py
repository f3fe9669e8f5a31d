"""Feature maps: a score of two vectors as the product of what each is mapped to, so that sums over keys can be kept.

Letters beside the project's own: K channels of a query or a key, F features.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def elu(x: Array) -> Array:
    """Positive everywhere (https://arxiv.org/abs/2006.16236)."""
    return jax.nn.elu(x) + 1


def identity(x: Array) -> Array:
    return x


def squared(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def taylor(x: Array) -> Array:
    """Of exp(q k / sqrt(K)) up to its second order, `1 + s + s^2 / 2` (Based, https://arxiv.org/abs/2402.18668).

    `s^2` is a sum over pairs of channels, each of which stands for two but those of a channel with itself.
    """
    K = x.shape[-1]
    x = x * K**-0.25
    i, j = np.triu_indices(K, 1)
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, x**2 * 0.5**0.5, x[..., i] * x[..., j]], axis=-1)


class Feature(NamedTuple):
    map: Callable[[Array], Array]
    normalised: bool  # whether scores are divided by their sum, as none is negative

    def size(self, K: int) -> int:
        """F for K channels."""
        return jax.eval_shape(self.map, jax.ShapeDtypeStruct((K,), jnp.float32)).shape[-1]


FEATURES = {
    "elu": Feature(elu, True),
    "identity": Feature(identity, False),
    "relu": Feature(jax.nn.relu, True),
    "squared": Feature(squared, True),
    "taylor": Feature(taylor, True),
}


def directions(seed: int, F: int, K: int) -> np.ndarray:
    """Normal vectors of K channels, `[F, K]`, those of each K orthogonal (FAVOR+, https://arxiv.org/abs/2009.14794).

    A function of the seed alone.
    """
    rng, blocks = np.random.default_rng(seed), -(-F // K)
    q, r = np.linalg.qr(rng.normal(size=(blocks, K, K)))
    turned = q * np.sign(np.einsum("nkk->nk", r))[:, None]  # the factors alone are not spread evenly
    lengths = np.linalg.norm(rng.normal(size=(F, K)), axis=-1)
    return np.swapaxes(turned, 1, 2).reshape(-1, K)[:F] * lengths[:, None]


def log_positive(x: Array, directions: np.ndarray) -> Array:
    """The logarithm of FAVOR+'s positive features, `[..., F]`.

    The mean over directions of the product of two vectors' features is `exp(q k / sqrt(K))`: softmax's kernel.
    """
    K = x.shape[-1]
    x = x * K**-0.25
    along = jnp.einsum("...k,fk->...f", x, jnp.asarray(directions, x.dtype), precision="highest")
    return along - jnp.sum(x**2, axis=-1, keepdims=True) / 2
