"""How well random features stand for softmax's kernel, and for what attention makes of it.

Positive features (FAVOR+, https://arxiv.org/abs/2009.14794) and trigonometric ones estimate the same
`exp(q k / sqrt(K))` without bias, along directions that are drawn orthogonal or independent of each other. What they
differ in is the spread of the estimate, and that grows with the norms of queries and keys.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.measurements.sheet import all_of, markdown_table
from model.ops.features import directions, log_positive

Row = dict[str, Any]

CHANNELS, TOKENS, SEEDS = 64, 128, 10
SCALES = (0.25, 0.5, 0.75, 1.0)  # of normal queries and keys: scores have the square of it for a standard deviation
COUNTS = (16, 64, 256, 1024)  # of features


def independent(seed: int, F: int, K: int) -> np.ndarray:
    """Normal vectors, `[F, K]`."""
    return np.random.default_rng(seed).normal(size=(F, K))


def positive(q: np.ndarray, k: np.ndarray, F: int, draw: Callable, seed: int) -> np.ndarray:
    """The kernel, `[queries, keys]`, by F positive features."""
    w = draw(seed, F, q.shape[-1])
    q, k = (np.exp(np.asarray(log_positive(jnp.asarray(x), w), np.float64)) for x in (q, k))
    return q @ k.T / F


def trigonometric(q: np.ndarray, k: np.ndarray, F: int, draw: Callable, seed: int) -> np.ndarray:
    """The kernel by the sines and cosines along half as many directions."""
    K = q.shape[-1]
    w = draw(seed, F // 2, K)

    def features(x: np.ndarray) -> np.ndarray:
        x = x * K**-0.25
        along, size = x @ w.T, np.exp(np.sum(x**2, axis=-1, keepdims=True) / 2)
        return size * np.concatenate([np.cos(along), np.sin(along)], axis=-1)

    return features(q) @ features(k).T / (F // 2)


def constant(q: np.ndarray, k: np.ndarray, F: int, draw: Callable, seed: int) -> np.ndarray:
    """What has no feature: all keys are alike, and attention is the mean of the values."""
    return np.ones((len(q), len(k)))


KINDS: dict[str, tuple[Callable, Callable]] = {
    "positive, orthogonal": (positive, directions),
    "positive, independent": (positive, independent),
    "trigonometric, orthogonal": (trigonometric, directions),
    "trigonometric, independent": (trigonometric, independent),
    "all keys alike": (constant, independent),
}


def errors(kind: str, F: int, scale: float, seed: int) -> tuple[float, float]:
    """Of the outputs of attention, and of the kernel: the norm of the difference by that of the truth."""
    kernel, draw = KINDS[kind]
    rng = np.random.default_rng([seed, 1])  # other numbers than the directions'
    q, k = (scale * rng.normal(size=(TOKENS, CHANNELS)) for _ in range(2))
    v = rng.normal(size=(TOKENS, CHANNELS))
    truth = np.exp(q @ k.T * CHANNELS**-0.5)
    found = kernel(q, k, F, draw, seed)
    return relative(attended(found, v), attended(truth, v)), relative(found, truth)


def attended(kernel: np.ndarray, v: np.ndarray) -> np.ndarray:
    return kernel @ v / kernel.sum(-1, keepdims=True)


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def measure(seeds: int = SEEDS) -> Iterator[Row]:
    """A row per scale, number of features and kind: mean and spread over seeds, which draw tokens and directions."""
    for scale, F, kind in product(SCALES, COUNTS, KINDS):
        outputs, kernels = zip(*(errors(kind, F, scale, seed) for seed in range(seeds)), strict=True)
        row = {"kind": kind, "features": F, "scale": scale, "channels": CHANNELS, "tokens": TOKENS, "seeds": seeds}
        for name, found in (("output_error", outputs), ("kernel_error", kernels)):
            row |= {name: float(np.mean(found)), f"{name}_spread": float(np.std(found, ddof=1)) if seeds > 1 else None}
        yield row


def sentence(row: Row) -> str:
    where = f"scale {row['scale']:g}, {row['features']:,} features, {row['kind']}"
    return f"{where}: {figure(row, 'output_error')} of the outputs, {figure(row, 'kernel_error')} of the kernel"


def figure(row: Row, key: str) -> str:
    """Two digits of the mean, and at least one of the spread."""
    mean, spread = row[key], row[f"{key}_spread"]
    places = [digits - math.floor(math.log10(x)) for x, digits in ((mean, 1), (spread, 0)) if x]
    decimals = min(max([0, *places]), 4)
    return f"{mean:,.{decimals}f}" + ("" if spread is None else f" ± {spread:,.{decimals}f}")


TABLES = {
    "output_error": "Relative error of attention's outputs",
    "kernel_error": "Relative error of the kernel matrix",
}


def table(rows: list[Row]) -> str:
    """Markdown: a table of each error."""
    parts = [f"**{title}**\n\n{part(rows, key)}" for key, title in TABLES.items()]
    return "\n".join([*parts, note(rows)]) + "\n"


def part(rows: list[Row], key: str) -> str:
    """A line per scale and number of features, a column per kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    places = list(dict.fromkeys((row["scale"], row["features"]) for row in rows))
    cells = {(row["scale"], row["features"], row["kind"]): row for row in rows}
    body = []
    for scale, F in places:
        found = [cells.get((scale, F, kind)) for kind in kinds]
        body.append([f"{scale:g}", f"{F:,}", *(figure(row, key) if row else "" for row in found)])
    header = ["scale", "features", *kinds]
    return markdown_table(header, body, [True] * len(header))


def note(rows: list[Row]) -> str:
    every = partial(all_of, rows)
    return (
        f"Attention without a mask over {every('tokens')} tokens with {every('channels')} channels. Queries and keys "
        "are normal, times the scale: scores have the square of it for a standard deviation. Errors are norms of "
        f"differences by norms of the truth, mean ± sample standard deviation over {every('seeds')} draws. A direction "
        "gives one positive feature, or a sine and a cosine. With all keys alike, attention is the mean of the values, "
        "and the kernel 1: what has a larger error is worse than no attention. "
        f"{every('device')}, jax {every('jax')}, revision {every('revision')}, {every('date')}."
    )
