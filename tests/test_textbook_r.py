"""A textbook's whole worked example, in R: 5 tokens of 4 dims, one head and two, every number it prints.

R's random numbers are its own: a Mersenne Twister seeded by a congruential generator, normals by inversion.
"""

import numpy as np
import pytest
from jax import numpy as jnp
from scipy.special import ndtri

from model.contract import Context
from model.mixers.attention import Attention
from model.ops.attention import attention, attention_weights
from model.ops.mask import CAUSAL, FULL
from model.positions import POSITIONS

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("quickly_compiled")]
N, D = 5, 4

X = """1.434 1.452 .343 2.194 | .764 -1.418 1.582 .518 | 1.648 -.418 -.727 2.318 | -1.617 -1.255 .337 -.130 |
       -.827 .910 -1.390 .073"""
WEIGHTS = "0 1 0 0 0 | .052 .001 0 .002 .944 | 0 1 0 0 0 | .956 0 .014 0 .029 | .001 .054 .944 .001 0"
OUTPUT = """-2.871 -1.431 -1.750 -.112 | 1.710 .491 1.361 .276 | -2.871 -1.431 -1.750 -.112 |
            -2.388 3.451 1.082 2.614 | -.992 1.186 2.077 2.846"""
PAST = "1 0 0 0 0 | .978 .022 0 0 0 | 0 1 0 0 0 | .984 .001 .015 0 0 | .001 .054 .944 .001 0"
TWO_HEADS = """-1.406 -4.674 -.573 -1.912 | .054 -2.120 .296 -1.767 | -.154 -.697 -1.257 -.058 |
               1.024 1.931 -.848 .558 | -1.275 -1.998 -3.874 .231"""


def printed(text: str) -> np.ndarray:
    return np.array([[float(x) for x in row.split()] for row in text.split("|")])


class R:
    """`set.seed(seed)` and `matrix(rnorm(n m), n, m)`, filled by columns."""

    def __init__(self, seed: int):
        def following(times: int) -> list[int]:
            nonlocal seed
            found = []
            for _ in range(times):
                seed = (69069 * seed + 1) % 2**32
                found.append(seed)
            return found

        following(50)
        self.twister = np.random.MT19937()
        key = np.array(following(625)[1:], np.uint32)
        self.twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}

    def unif(self) -> float:
        return self.twister.random_raw() * 2.3283064365386963e-10

    def rnorm(self) -> float:
        high = np.floor(2**27 * self.unif())
        return ndtri((high + self.unif()) / 2**27)

    def matrix(self, n: int, m: int) -> np.ndarray:
        return np.array([self.rnorm() for _ in range(n * m)]).reshape(m, n).T


@pytest.fixture(scope="module")
def example():
    """The tokens with their positions, and the three maps of one head."""
    draws = R(2017)
    tokens = jnp.asarray(draws.matrix(N, D), jnp.float32)[None]
    x = POSITIONS["sinusoidal"](amplitude=1.0).apply({}, tokens, jnp.arange(N)[None], method="embed")
    return np.asarray(x[0]), [draws.matrix(D, D) for _ in range(3)]


def heads(*arrays):
    return [jnp.asarray(a, jnp.float32)[None, :, None] for a in arrays]


def test_tokens_with_positions(example):
    np.testing.assert_allclose(example[0], printed(X), atol=6e-4)


@pytest.mark.parametrize("implementation", ["reference", "xla", "tiled"])
def test_one_head(example, implementation):
    x, maps = example
    q, k, v = heads(*(x @ w for w in maps))
    y = attention(q, k, v, mask=FULL, implementation=implementation)[0, :, 0]
    np.testing.assert_allclose(y, printed(OUTPUT), atol=6e-4)


def test_weights_and_those_over_the_past(example):
    x, maps = example
    q, k, v = heads(*(x @ w for w in maps))
    whole = np.asarray(attention_weights(q, k, v, mask=FULL))[0, 0]
    np.testing.assert_allclose(whole, printed(WEIGHTS), atol=6e-4)
    causal = np.asarray(attention_weights(q, k, v, mask=CAUSAL))[0, 0]
    np.testing.assert_allclose(causal, printed(PAST), atol=6e-4)
    past = np.tril(whole)
    np.testing.assert_allclose(causal, past / past.sum(1, keepdims=True), atol=1e-5)


def test_two_heads_and_the_map_behind_them(example):
    draws = R(7)
    each = [[draws.matrix(D, 2) for _ in range(3)] for _ in range(2)]
    out = draws.matrix(D, D)
    kernels = {name: {"kernel": np.stack([h[i] for h in each], 1)} for i, name in enumerate("qkv")}
    params = kernels | {"out": {"kernel": out.reshape(2, 2, D)}}
    mixer = Attention(width=D, n_heads=2, causal=False)
    y, _ = mixer.apply({"params": params}, jnp.asarray(example[0], jnp.float32)[None], Context())
    np.testing.assert_allclose(y[0], printed(TWO_HEADS), atol=6e-4)
