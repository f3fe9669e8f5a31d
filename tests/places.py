"""How the tests of position encodings call one."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from model.ops.scores import Bias
from model.positions import FIRE, T5, ALiBi, Kerple, Position, Rope
from model.positions.rotary import SCALINGS

HEADS = 3
# What a scaling cannot do without, for heads of 16.
NEEDED = {"longrope": dict(short_factor=(1.0, 1.1) * 4, long_factor=(1.5, 4.0) * 4)}
ROPES = [
    Rope(),
    Rope(layout="interleaved"),
    Rope(fraction=0.5),
    *(Rope(scaling=s, factor=4.0, original_length=64, **NEEDED.get(s, {})) for s in SCALINGS if s != "none"),
]
BIASES = [ALiBi(), T5(), T5(buckets=8, max_distance=20), Kerple(), Kerple(variant="power"), FIRE(threshold=8.0)]


def named(position: Position) -> str:
    """A position's label among the tests: its name, and the settings that are not the default."""
    own = {f: v for f, v in vars(position).items() if f in type(position).__dataclass_fields__}
    changed = [str(v) for f, v in own.items() if v != type(position).__dataclass_fields__[f].default]
    return "-".join([type(position).__name__, *(v for v in changed if v != "None")])


def at(*positions: int) -> np.ndarray:
    return np.asarray([positions], np.int32)


def random(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def rotate(method: str, position: Position, x: jax.Array, positions: jax.Array, span: int) -> jax.Array:
    return position.apply({}, x, positions, span, method=method)


def queries(position: Position, x: np.ndarray, positions: np.ndarray, span: int = 128) -> np.ndarray:
    return np.asarray(rotate("rotate_queries", position, x, positions, span))


def keys(position: Position, x: np.ndarray, positions: np.ndarray, span: int = 128) -> np.ndarray:
    return np.asarray(rotate("rotate_keys", position, x, positions, span))


@functools.partial(jax.jit, static_argnums=0)
def embed(position: Position, x: jax.Array, positions: jax.Array, variables: Any = None) -> jax.Array:
    return position.apply(variables or {}, x, positions, method="embed")


def score(position: Position, i: int, j: int, K: int = 16, span: int = 128) -> float:
    """Of one query at i and one key at j."""
    q, k = random(2, 1, 1, 1, K)
    return float(np.vdot(queries(position, q, at(i), span), keys(position, k, at(j), span)))


@functools.cache
def parameters(position: Position, n_heads: int = HEADS) -> dict[str, np.ndarray]:
    start = jax.jit(lambda: position.init(jax.random.key(0), n_heads, True, method="bias"))
    return jax.tree.map(np.asarray, nn.unbox(start()).get("params", {}))


@functools.cache
def opened(position: Position, causal: bool = True) -> Bias:
    """The bias with parameters away from their initial values."""
    moved = {k: x + np.float32(0.3) * random(*x.shape) for k, x in parameters(position).items()}
    return position.apply({"params": moved}, HEADS, causal, method="bias")


@functools.partial(jax.jit, static_argnums=0)
def compiled(fn: Callable, *arguments: Any) -> jax.Array:
    return fn(*arguments)


def run(fn: Callable, *arguments: Any) -> np.ndarray:
    return np.asarray(compiled(fn, *arguments))


@functools.partial(jax.jit, static_argnums=0)
def run_back(fn: Callable, params: Any, places: jax.Array, grad: jax.Array) -> tuple[jax.Array, Any]:
    """The bias, and the gradient of its parameters."""
    value, pull = jax.vjp(lambda p: fn(p, places, places), params)
    return value, pull(grad)[0]


def finite(tree: Any) -> bool:
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def biases(position: Position, q_positions, k_positions, causal: bool = True) -> np.ndarray:
    bias = opened(position, causal)
    return run(bias.fn, bias.params, q_positions, k_positions)
