"""Random features against softmax: estimates without bias, errors that fall with features and rise with norms."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.measurements import features

RESULTS = Path(__file__).parent.parent / "experiments" / "results"
RANDOM = [kind for kind in features.KINDS if kind != "all keys alike"]


@pytest.mark.parametrize("kind", RANDOM)
def test_estimates_are_without_bias(kind):
    """The mean over many draws, in few channels, is the kernel by its definition."""
    rng = np.random.default_rng(0)
    q, k = (0.5 * rng.normal(size=(6, 4)) for _ in range(2))
    truth = np.asarray([[np.exp(sum(a * b for a, b in zip(x, y, strict=True)) / 4**0.5) for y in k] for x in q])
    kernel, draw = features.KINDS[kind]
    found = np.mean([kernel(q, k, 1024, draw, seed) for seed in range(50)], axis=0)
    np.testing.assert_allclose(found, truth, rtol=0.05)
    assert kernel(q, k, 16, draw, 1).shape == (6, 6)


def test_attention_is_that_of_a_softmax():
    rng = np.random.default_rng(0)
    scores, v = rng.normal(size=(5, 7)), rng.normal(size=(7, 3))
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(features.attended(np.exp(scores), v), shares @ v)
    np.testing.assert_allclose(features.attended(np.ones((5, 7)), v), np.tile(v.mean(0), (5, 1)))
    assert features.relative(2 * v, v) == pytest.approx(1)


@pytest.mark.parametrize("kind", RANDOM)
def test_errors_fall_with_features_and_rise_with_norms(kind):
    def error(F, scale):
        return np.mean([features.errors(kind, F, scale, seed) for seed in range(3)], axis=0)

    assert (error(256, 0.25) < 0.7 * error(16, 0.25)).all()
    assert (error(64, 0.25) < 0.5 * error(64, 0.75)).all()


def test_rows_make_tables(monkeypatch):
    monkeypatch.setattr(features, "COUNTS", (16, 64))
    monkeypatch.setattr(features, "SCALES", (0.25,))
    monkeypatch.setattr(features, "TOKENS", 32)
    rows = list(features.measure(seeds=2))
    assert len(rows) == 2 * len(features.KINDS)
    assert "of the kernel" in features.sentence(rows[0])
    text = features.table([row | dict(device="cpu", jax="0", revision="abc", date="today") for row in rows])
    assert text.count("| 0.25 | 64 |") == 2 and "revision abc" in text
    assert list(features.measure(seeds=2)) == rows, "the same seeds, the same errors"


@pytest.mark.quick
def test_figures_have_two_digits():
    def said(mean, spread):
        return features.figure(dict(e=mean, e_spread=spread), "e")

    assert said(0.0123, 0.0042) == "0.012 ± 0.004" and said(1234.5, 300) == "1,234 ± 300"
    assert said(0.25, 0.00042) == "0.2500 ± 0.0004" and said(1.8, 0.03) == "1.80 ± 0.03"
    assert said(27.2, 31.0) == "27 ± 31" and said(1.06, None) == "1.1" and said(0.0, 0.0) == "0 ± 0"


def test_committed_rows_show_what_the_readme_says():
    rows = [json.loads(line) for line in (RESULTS / "bench_features.jsonl").read_text().splitlines()]
    found = {(row["scale"], row["features"], *row["kind"].split(", ")): row["output_error"] for row in rows}
    alike = {scale: found[scale, 16, "all keys alike"] for scale in features.SCALES}
    for F in (64, 256, 1024):
        for kind in ("positive", "trigonometric"):
            assert found[0.25, F, kind, "orthogonal"] < found[0.25, F, kind, "independent"]
        assert found[0.25, F, "trigonometric", "orthogonal"] < found[0.25, F, "positive", "orthogonal"]
    for (scale, F, kind, *how), error in found.items():
        if how and scale >= 0.75:
            assert error > alike[scale] and (1 < error < 3 if kind == "positive" else error > 9)
        if how and scale == 0.5:
            assert (error < alike[scale]) == (F == 1024)
