"""Bits along a long document: what is streamed is what one pass over it says, and each byte's context is what it is."""

import functools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from eval import context
from eval.accuracy import measure
from eval.restore import Restored, restore
from eval.suites import SUITES
from model.errors import UserError
from train import config as configs
from train import streaming
from train.loop import train
from train.run import prepare

L = 16  # of a row
SMALL = {"data.text.length": L, "model.width": 16, "batch_size": 8, "optim.lr": 0.02}
pytestmark = [pytest.mark.usefixtures("quickly_compiled"), pytest.mark.xdist_group("streaming")]


def load(book, arch="attention", **overrides):
    texts = [(key, str(value)) for key, value in (SMALL | {"model.layers": 1} | overrides).items()]
    return configs.load(f"configs/text.py:path={book},arch={arch}", texts)


def drawn(run):
    """Parameters made by hand, which spares a compilation, and loud: what is said depends on all that was read."""
    rng = np.random.default_rng(0)

    def filled(path, leaf):
        name = path[-1].key
        shift = {"dt_bias": -3, "scale": 1}.get(name, 0)
        return (shift + (0.5 if name == "kernel" else 0.3) * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(filled, run.abstract.params)


@functools.partial(jax.jit, static_argnames="model")
def logits_of(model, params, rows):
    return model.apply({"params": params}, rows)[0]


def nats(model, params, *rows: np.ndarray) -> list[np.ndarray]:
    """-log p of every token after the first, by one pass over all rows.

    They are made as long as the longest: what a causal model does not see yet may stand there.
    """
    filled = np.zeros((len(rows), max(map(len, rows)) - 1), np.int32)
    for i, row in enumerate(rows):
        filled[i, : len(row) - 1] = row[:-1]
    logits = np.asarray(logits_of(model, jax.device_get(params), filled), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [-logp[i, np.arange(len(row) - 1), row[1:]] for i, row in enumerate(rows)]


def read(run, params, tokens, chunk=512, recompute=0) -> np.ndarray:
    return np.concatenate(list(streaming.losses(run, params, tokens, chunk, recompute)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("attention", {}),
        ("attention", {"model.attention.window": 100}),
        ("attention", {"model.attention.window": 5, "model.attention.sink_tokens": 2, "model.layers": 2}),
        ("hybrid", {"model.layers": 2}),
    ],
    ids=["whole cache", "window past the end", "sinks", "hybrid"],
)
def test_streamed_is_whole(book, arch, overrides):
    run = prepare(load(book, arch, **overrides))
    params, tokens = drawn(run), streaming.document(run, "test", 45)
    (want,) = nats(run.model, params, tokens)
    np.testing.assert_allclose(read(run, params, tokens, chunk=9), want, rtol=1e-4, atol=1e-5)


def test_a_window_with_sinks_reads_the_first_bytes_and_the_last_counted_from_0(book):
    """Of one layer, whose keys know their own token alone, a plain model that is given just those says the same."""
    S, W = 2, 5
    run = prepare(load(book, **{"model.attention.window": W, "model.attention.sink_tokens": S}))
    plain = prepare(load(book)).model
    params, tokens = drawn(run), streaming.document(run, "test", 40)
    found = read(run, params, tokens, chunk=8)
    kept = [[i for i in range(t + 1) if i < S or i > t - W] for t in range(40)]  # after token t was read
    want = nats(plain, params, *(np.append(tokens[seen], tokens[t + 1]) for t, seen in enumerate(kept)))
    np.testing.assert_allclose(found, [row[-1] for row in want], rtol=1e-4, atol=1e-5)
    without = nats(plain, params, *(tokens[max(t + 1 - W, 0) : t + 2] for t in range(40)))
    assert np.abs(found - [row[-1] for row in without])[S + W :].min() > 1e-3, "as without sinks"


def test_recomputed_is_each_byte_from_its_own_row(book, monkeypatch):
    monkeypatch.setattr(streaming, "ROW_TOKENS", 5 * 6)  # five rows a batch, the last one not full
    run = prepare(load(book, **{"model.layers": 2}))
    params, tokens = drawn(run), streaming.document(run, "test", 23)
    want = nats(run.model, params, *(tokens[max(t - 6, 0) : t + 1] for t in range(1, 24)))
    np.testing.assert_allclose(read(run, params, tokens, recompute=6), [row[-1] for row in want], rtol=1e-4, atol=1e-5)


def test_stretches_are_a_row_and_its_doublings():
    found = np.arange(20.0)
    assert streaming.along(found, 4) == [
        {"bytes": 4, "loss": 1.5, "targets": 4},
        {"bytes": 8, "loss": 5.5, "targets": 4},
        {"bytes": 16, "loss": 11.5, "targets": 8},
        {"bytes": 20, "loss": 17.5, "targets": 4},
    ]
    assert streaming.along(found, 20) == streaming.along(found, 50) == [{"bytes": 20, "loss": 9.5, "targets": 20}]


@pytest.fixture(scope="module")
def folder(book, tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed") / "run"
    asked = {"steps": 4, "eval_every": 2, "eval_batches": 0, "stream.length": 100, "stream.chunk": 25}
    train(load(book, **asked, test_lengths=f"{2 * L}"), str(folder))
    return folder


def test_a_run_says_bits_per_byte(folder):
    result = json.loads((folder / "result.json").read_text())
    scores = result["metrics"]
    for prefix in ("validation/", "test/", f"test/length_{2 * L}/"):
        assert scores[f"{prefix}bits_per_byte"] == pytest.approx(scores[f"{prefix}loss"] / math.log(2))
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all("validation/bits_per_byte" in line for line in logged if "validation/loss" in line)
    assert result["state_bytes"] == prepare(configs.load(str(folder / "config.json"))).model.state_bytes(100)


def test_bits_per_byte_by_position_in_the_row(folder):
    found = measure(restore(str(folder), "latest"), "test")
    lines = found["slices"]["position"]
    total = sum(line["bits_per_byte"] * line["count"] for line in lines if line["count"])
    assert total / found["targets"] == pytest.approx(found["metrics"]["bits_per_byte"], rel=1e-5)
    restored = restore(str(folder), "latest")
    task = restored.run.task
    rows = [task.document("test", task.size("test") * L)[i * L : (i + 1) * L + 1] for i in range(task.size("test"))]
    want = np.array(nats(restored.run.model, restored.params, *rows)) / math.log(2)
    for line, low in zip(lines, (1, 2, 4, 8, 16), strict=True):
        assert line["bits_per_byte"] == pytest.approx(want[:, low - 1 : 2 * low - 1].mean(), rel=1e-4)


def test_the_run_and_the_suite_stream_alike(folder, capsys):
    result = json.loads((folder / "result.json").read_text())
    scores, targets = result["metrics"], result["targets"]
    SUITES["stream"](restore(str(folder), "latest"), split="test")
    report = json.loads((folder / "eval" / "stream-test-4.json").read_text())
    assert [line["bytes"] for line in report["stream"]] == [16, 32, 64, 100] and report["bytes"] == 100
    assert [line["targets"] for line in report["stream"]] == [16, 16, 32, 36]
    for line in report["stream"]:
        assert scores[f"test/length_{line['bytes']}/stream_bits_per_byte"] == pytest.approx(line["bits_per_byte"])
        assert targets[f"test/length_{line['bytes']}/stream_bits_per_byte"] == line["targets"]
    assert targets["test/stream_bits_per_byte"] == 100
    assert scores["test/stream_bits_per_byte"] == pytest.approx(report["metrics"]["bits_per_byte"])
    restored = restore(str(folder), "latest")
    tokens = streaming.document(restored.run, "test", 100)
    (whole,) = nats(restored.run.model, restored.params, tokens)
    assert report["metrics"]["loss"] == pytest.approx(whole.mean(), rel=1e-4)
    assert report["stream"][1]["loss"] == pytest.approx(whole[16:32].mean(), rel=1e-4)
    shown = capsys.readouterr().out
    assert "50 of 100 bytes" in shown and f"{report['metrics']['bits_per_byte']:.4f}" in shown
    assert len(streaming.document(restored.run, "test", 0)) == restored.run.task.n_bytes("test") == 150


def test_bits_by_context_are_those_of_the_same_bytes_given_just_that(folder, capsys):
    restored = restore(str(folder), "latest")
    SUITES["context"](restored, split="test", targets=9)
    report = json.loads((folder / "eval" / "context-9-test-4.json").read_text())
    assert [line["context"] for line in report["context"]] == [16, 32] and report["targets"] == 9
    tokens = streaming.document(restored.run, "test", 0)
    ends = np.unique(np.linspace(32, len(tokens) - 1, 9).astype(int))
    assert ends[0] == 32 and ends[-1] == len(tokens) - 1
    for line in report["context"]:
        rows = [tokens[end - line["context"] : end + 1] for end in ends]
        want = np.mean([row[-1] for row in nats(restored.run.model, restored.params, *rows)])
        assert line["bits_per_byte"] == pytest.approx(want / math.log(2), rel=1e-4)
    assert f"{report['context'][0]['bits_per_byte']:.4f}" in capsys.readouterr().out
    with pytest.raises(UserError, match="the longest context is 4096, and the test split has 149 bytes to ask for"):
        context.measure(restore(str(folder), "latest", [("test_lengths", "4096")]), "test", 9)
    assert context.contexts(512, (4096,)) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert context.contexts(48, ()) == [48] and context.contexts(100, ()) == [64, 100]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"stream.length": 10_000}, "stream.length is 10000, and the test split has 149 bytes to ask for"),
        ({"stream.recompute": 8}, "stream.recompute is 8, and stream.length is 0"),
        ({"model.position": "learned", "model.learned.max_len": 32, "stream.length": 40}, "past the 32 positions"),
        ({"objective.kind": "masked", "model.causal": False, "stream.length": 40}, "no document to stream"),
        ({"data.task": "mqar", "stream.length": 40}, "task 'mqar' with objective 'task' has no document to stream"),
    ],
)
def test_a_document_that_cannot_be_read_is_told_before_training(book, tmp_path, overrides, told):
    given = {key: value for key, value in SMALL.items() if not (key.startswith("data") and "data.task" in overrides)}
    texts = [(key, str(value)) for key, value in (given | overrides).items()]
    with pytest.raises(UserError, match=told) as error:
        train(configs.load(f"configs/text.py:path={book}", texts), str(tmp_path / "run"))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("suite", ["stream", "context"])
def test_a_suite_of_documents_names_one_that_a_run_without_them_has(suite):
    config = configs.load("configs/debug.py")
    restored = Restored(Path("run"), config, prepare(config), step=0, params=None)
    given = {"targets": 9} if suite == "context" else {}
    with pytest.raises(UserError, match=r"task 'mqar' .* has no document to stream.*; closest: --suite=accuracy$"):
        SUITES[suite](restored, split="test", **given)
