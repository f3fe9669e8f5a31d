"""Sequence to sequence: the step's formula, padding, a carried state, a copy learned by looking, runs from configs."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import data
from data import pipeline
from eval.attention import attention
from eval.continuation import continuation
from eval.generate import decode, pad, prefill
from eval.restore import restore
from eval.sample import Sampling
from model.errors import UserError
from model.mixers.recurrent import GRU
from model.seq2seq import Decoder, Seq2Seq, Source, attending
from model.source_target import boundary, divide
from train import config as configs
from train.log import read_metrics
from train.loop import train
from train.objectives import TaskTargets
from train.run import at_length, prepare
from train.scores import validate
from train.step import init_state, train_step

V, D, S, T = 10, 16, 6, 4
MODEL = Seq2Seq(V, D, T)
ROWS = np.random.default_rng(0).integers(0, V, (3, S + T)).astype(np.int32)
apply = jax.jit(MODEL.apply, static_argnames=("train", "mutable"))


@pytest.fixture(scope="module")
def variables():
    return nn.unbox(jax.jit(MODEL.init)(jax.random.key(0), ROWS))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.quick
def test_a_step_by_hand():
    """e_j = v . tanh(W s + U h_j); the context is the mean of h under their softmax, and joins the GRU's input."""
    rng = np.random.default_rng(0)
    W_a, v_a, C, U, bias = (rng.normal(size=shape) for shape in ((2, 2), (2,), (4, 3, 2), (2, 3, 2), (3, 2)))
    h, keys, s, x = (rng.normal(size=shape) for shape in ((3, 4), (3, 2), (2,), (3, 2)))
    e = np.array([v_a @ np.tanh(s @ W_a + key) for key in keys[:2]])  # the third is padding
    alpha = np.exp(e) / np.exp(e).sum()
    context = alpha @ h[:2]
    said, past = x + np.einsum("c,cge->ge", context, C), np.einsum("d,dge->ge", s, U) + bias
    r, z = sigmoid(said[0] + past[0]), sigmoid(said[1] + past[1])
    want = (1 - z) * s + z * np.tanh(said[2] + r * past[2])

    p = Decoder(*(jnp.asarray(a, jnp.float32) for a in (W_a, v_a, C, U, bias)))
    h, keys, s, x = (jnp.asarray(a, jnp.float32)[None] for a in (h, keys, s, x))
    new, seen = attending(GRU, p, {"h": s}, x, Source(h, keys, jnp.asarray([[1, 1, 0]])))
    np.testing.assert_allclose(seen[0], context, atol=1e-5)
    np.testing.assert_allclose(new["h"][0], want, atol=1e-5)


def test_the_encoder_is_bidirectional(variables):
    """Every annotation depends on every token of the source, by the half that reads from its side."""

    def annotations(rows):
        return apply(variables, rows, None, MODEL.init_state(1, 0))[1]["source"].annotations

    rows = ROWS[:1, : S + 1]
    whole = annotations(rows)
    assert whole.shape == (1, S, 2 * D)
    for column in range(S):
        other = rows.copy()
        other[0, column] = (other[0, column] + 1) % V
        changed = np.abs(annotations(other) - whole).reshape(S, 2, D).max(-1) > 1e-7
        np.testing.assert_array_equal(changed[:, 0], np.arange(S) >= column)
        np.testing.assert_array_equal(changed[:, 1], np.arange(S) <= column)


def test_where_rows_are_divided():
    segments = jnp.asarray([[1] * 6, [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6])
    source, begin = boundary(segments, 2)
    np.testing.assert_array_equal(begin, [4, 2, 3, 0])
    np.testing.assert_array_equal(source, [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.quick
def test_rows_too_short():
    for target, near in ((6, 5), (0, 1)):
        with pytest.raises(UserError, match=f"rows of 6 tokens cannot end in a target of {target}; .* closest: {near}"):
            divide(jnp.ones((1, 6), jnp.int32), None, None, target)


def test_causality(variables):
    """The logits of a token of the target know all of the source, and of the target what has been read."""
    rows = ROWS[:1]
    whole = apply(variables, rows)[0]
    for column in range(S + T):
        other = rows.copy()
        other[0, column] = (other[0, column] + 1) % V
        changed = np.abs(apply(variables, other)[0] - whole).max(-1)[0] > 1e-6
        np.testing.assert_array_equal(changed, np.arange(T) >= column - S)


@pytest.mark.parametrize("place", ["before", "inside", "behind the source", "behind the target"])
def test_padding_changes_nothing(variables, place):
    at = {"before": 0, "inside": 3, "behind the source": S, "behind the target": S + T}[place]
    rows = np.insert(ROWS, [at] * 3, 7, axis=1)
    segments = np.insert(np.ones_like(ROWS), [at] * 3, 0, axis=1)
    whole, _ = apply(variables, ROWS)
    padded, _ = apply(variables, rows, segments)
    np.testing.assert_allclose(padded, whole, atol=1e-5)
    assert np.abs(apply(variables, rows)[0] - whole).max() > 1e-2


def test_asked_at_positions_of_the_row(variables):
    whole, _ = apply(variables, ROWS)
    at = jnp.tile(jnp.asarray([S + 2, S, S - 1]), (3, 1))
    some, _ = apply(variables, ROWS, at=at)
    np.testing.assert_allclose(some[:, :2], whole[:, [2, 0]], atol=1e-6)
    assert np.isnan(some[:, 2]).all()


@pytest.mark.parametrize("lengths", [[3], [1, 1, 1], [2, 1]])
def test_a_target_in_pieces_is_the_target_whole(variables, lengths):
    """Also behind sources of different lengths."""
    rows, segments = ROWS.copy(), np.ones_like(ROWS)
    rows[1] = np.roll(rows[1], -2)
    segments[1, -2:] = 0
    whole, none = apply(variables, rows, segments)
    assert none is None
    prompts = [row[: n - T + 1].tolist() for row, n in zip(rows, segments.sum(1), strict=True)]
    first, state = apply(variables, *pad(prompts), MODEL.init_state(3, S + T))
    made, done = [first], 1
    rest = np.stack([row[n - T :][:T] for row, n in zip(rows, segments.sum(1), strict=True)])
    for n in lengths:
        logits, state = apply(variables, rest[:, done : done + n], None, state)
        made.append(logits)
        done += n
    np.testing.assert_allclose(np.concatenate(made, axis=1), whole, atol=1e-5)


def test_padding_between_calls_leaves_the_state(variables):
    _, state = apply(variables, ROWS[:, : S + 1], None, MODEL.init_state(3, 0))
    _, after = apply(variables, ROWS[:, :2], np.zeros((3, 2), np.int32), state)
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_bfloat16_is_near(variables):
    whole, _ = apply(variables, ROWS)
    rough, _ = jax.jit(Seq2Seq(V, D, T, dtype=jnp.bfloat16).apply)(variables, ROWS)
    assert rough.dtype == jnp.float32
    assert np.linalg.norm(rough - whole) < 0.03 * np.linalg.norm(whole)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_the_state_holds_the_source_and_does_not_grow(variables, dtype):
    model = Seq2Seq(V, D, T, dtype=dtype)
    step = jax.eval_shape(model.apply, variables, ROWS[:1, : S + 1], None, model.init_state(1, 0))[1]
    for _ in range(2):
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step)) == model.state_bytes(S + T)
        assert step["past"]["h"].dtype == jnp.float32
        step = jax.eval_shape(model.apply, variables, ROWS[:1, :1], None, step)[1]


def test_training_never_holds_the_hidden_layer_of_all_scores(variables):
    """Its memory is that of states and contexts, not of T S D."""
    n = 256
    model, rows = Seq2Seq(V, D, n), jax.ShapeDtypeStruct((1, 2 * n), jnp.int32)
    grad = jax.jit(jax.grad(lambda p, rows: jnp.sum(model.apply(p, rows)[0] ** 2)))
    assert grad.lower(variables, rows).compile().memory_analysis().temp_size_in_bytes < 4 * n * n * D / 2


N = 10  # tokens to copy


def copying(seed: int, B: int = 32):
    """Rows that say a source again after a 0, asked for each of its tokens."""
    source = np.random.default_rng(seed).integers(1, V, (B, N)).astype(np.int32)
    inputs = np.concatenate([source, np.zeros((B, 1), np.int32), source[:, :-1]], axis=1)
    at = np.tile(N + np.arange(N, dtype=np.int32), (B, 1))
    return dict(inputs=inputs, at=at, targets=source, weights=np.ones((B, N), np.float32))


@pytest.mark.scale
def test_it_learns_to_copy_by_looking_at_each_token_in_turn():
    model, rate = Seq2Seq(V, 32, N), optax.constant_schedule(5e-3)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    state = nn.unbox(jax.jit(lambda: init_state(model, tx, copying(0), np.uint32(0)))())
    objective = TaskTargets(task_of("selective_copying"))
    step, losses = jax.jit(train_step(model, objective, tx, rate), donate_argnums=0), []
    for i in range(300):
        state, sums = step(state, copying(i))
        losses.append(float(sums["loss"][0] / sums["loss"][1]))
    assert losses[0] > 2 and losses[-1] < 0.2

    unseen, params = copying(999), state.params
    _, kept = jax.jit(lambda p, x: model.apply({"params": p}, x, mutable=["maps"]))(params, unseen["inputs"])
    weights = np.asarray(kept["maps"]["weights"][0])[:, 0]  # [B, N, N]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    # A GRU's annotation of a token holds its neighbours too, so one beside it serves as well.
    index = np.arange(N)
    near = np.abs(index[:, None] - index) <= 1
    assert near.mean() < 0.3 and (weights * near).sum(-1).mean() > 0.75
    assert np.corrcoef((weights @ index).ravel(), np.tile(index, len(weights)))[0, 1] > 0.95

    greedy, key = Sampling(temperature=0), jax.random.key(0)
    first, carried = prefill(model, greedy, 0, params, unseen["inputs"][:, : N + 1], {}, key)
    _, _, rest = decode(model, greedy, N - 1, params, carried, first, key, 1, N - 1)
    copied = np.concatenate([first[None], rest]).T
    assert np.mean(copied == unseen["targets"]) > 0.9


def test_dropout_is_for_training(variables):
    model = Seq2Seq(V, D, T, dropout=0.5)
    calm, loud = (
        model.apply(variables, ROWS, train=train, rngs={"dropout": jax.random.key(1)})[0] for train in (False, True)
    )
    np.testing.assert_allclose(calm, apply(variables, ROWS)[0], atol=1e-6)
    assert np.abs(loud - calm).max() > 1e-2


# --- cells, with attention and with one vector, sources given by name ---

FORMS = [(cell, attention) for cell in ("gru", "lstm") for attention in (True, False)]
SOURCE, TARGET = ROWS[:, :S], ROWS[:, S:]
READ = (np.arange(S) < np.array([[6], [4], [1]])).astype(np.int32)


@cache
def form(cell: str, attention: bool):
    model = Seq2Seq(V, D, source=S, cell=cell, attention=attention)
    made = nn.unbox(jax.jit(model.init)(jax.random.key(0), TARGET, source=SOURCE))
    return model, made, jax.jit(model.apply, static_argnames=("mutable",))


@pytest.mark.few(1)
@pytest.mark.parametrize(("cell", "attention"), FORMS)
def test_a_source_by_name_is_the_source_in_the_row(cell, attention):
    _, variables, run = form(cell, attention)
    both = Seq2Seq(V, D, T, cell=cell, attention=attention)
    np.testing.assert_allclose(run(variables, TARGET, source=SOURCE)[0], both.apply(variables, ROWS)[0], atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize(("cell", "attention"), FORMS)
def test_pieces_and_padding_in_every_form(cell, attention):
    model, variables, run = form(cell, attention)
    whole, _ = run(variables, TARGET, source=SOURCE, source_segments=READ)
    alone, _ = run(variables, TARGET[1:2], source=SOURCE[1:2, :4])
    np.testing.assert_allclose(whole[1:2], alone, atol=1e-5)
    first, state = run(variables, TARGET[:, :1], None, model.init_state(3, 0), None, SOURCE, READ)
    second, state = run(variables, TARGET[:, 1:3], state=state)
    third, state = run(variables, TARGET[:, 3:], state=state)
    np.testing.assert_allclose(np.concatenate([first, second, third], axis=1), whole, atol=1e-5)
    row = jax.eval_shape(run, variables, TARGET[:1, :1], None, {}, None, SOURCE[:1], READ[:1])[1]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row)) == model.state_bytes(T)


@pytest.mark.few(1)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_one_vector_is_all_that_is_known_of_a_source(cell):
    """As large whatever the source's length, made of both ends of the encoder, and without parameters to look with."""
    _, variables, run = form(cell, False)
    assert not {"W_a", "v_a", "U_a"} & set(variables["params"])
    _, state = run(variables, TARGET[:, :1], None, {}, None, SOURCE)
    assert state["source"].annotations.shape == (3, 1, 2 * D) and len(jax.tree.leaves(state["source"])) == 1
    assert set(state["past"]) == ({"h"} if cell == "gru" else {"h", "c"})
    for column in (0, S - 1):
        other = SOURCE.copy()
        other[:, column] = (other[:, column] + 1) % V
        changed = np.abs(run(variables, TARGET[:, :1], None, {}, None, other)[1]["source"].annotations[:, 0] -
                         state["source"].annotations[:, 0]).reshape(3, 2, D).max(-1)  # fmt: skip
        assert (changed > 1e-7).all()
    _, kept = run(variables, TARGET, source=SOURCE, mutable=("maps",))
    assert not kept


def test_the_forget_gate_is_open_at_the_start():
    for attends in (True, False):
        np.testing.assert_array_equal(form("lstm", attends)[1]["params"]["bias"][1], 1)
        np.testing.assert_array_equal(form("gru", attends)[1]["params"]["bias"], 0)


def test_it_needs_a_source():
    model, variables, _ = form("gru", True)
    with pytest.raises(UserError, match="nothing to look at; pass source="):
        model.apply(variables, TARGET)


# --- from a config ---

TASKS = {
    "selective_copying": dict(length=10, n_tokens=3, vocab_size=V),
    "induction": dict(length=10, vocab_size=V),
    "mqar": dict(length=12, n_pairs=2, vocab_size=V),
    "mqar of 1 to 3 pairs": dict(length=12, n_pairs=3, min_pairs=1, vocab_size=V),
}


def task_of(name: str) -> data.Task:
    return data.build(name.split()[0], TASKS[name])


@pytest.mark.parametrize("name", TASKS)
def test_every_place_asked_is_in_the_tail_and_some_at_its_beginning(name):
    task = task_of(name)
    batch = pipeline.batch_at(task, 0, "train", 512, 0)
    assert batch["at"][batch["weights"] > 0].min() == task.length - task.tail


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_is_blind_to_what_it_is_scored_by_and_to_later_tokens(variables, name):
    """Over all answers that could have been right, from the one asked on, the chances that it gives sum to one."""
    task = task_of(name)
    model, batch = Seq2Seq(V, D, task.tail), pipeline.batch_at(task, 0, "train", 1, 0)

    def chance(token, q, inputs):
        """Of `token` at place q, if it were the target there and at all places that follow."""
        place = jnp.arange(batch["at"].shape[1])[None]
        targets, weights = jnp.where(place < q, batch["targets"], token), (place == q).astype(jnp.float32)
        asked = dict(batch, inputs=inputs, targets=targets, weights=weights)
        sums = TaskTargets(task)(model, variables["params"], asked, None)
        return jnp.exp(-sums["loss"][0])

    chances = partial(jax.jit(jax.vmap(chance, (0, None, None))), jnp.arange(V))
    for q in np.flatnonzero(batch["weights"][0]):
        found = chances(q, batch["inputs"])
        np.testing.assert_allclose(found.sum(), 1, atol=1e-5)
        other, behind = (batch["inputs"] + 1) % V, np.arange(task.length) > batch["at"][0, q]
        np.testing.assert_array_equal(chances(q, np.where(behind, other, batch["inputs"])), found)
        assert np.abs(chances(q, np.where(behind, batch["inputs"], other)) - found).max() > 1e-3


COPYING = "configs/selective_copying.py:arch=seq2seq,size=smoke"
SHORT = dict(length=8, n_tokens=2, vocab_size=6)
OVERRIDES = {"steps": 60, "batch_size": 32, "eval_batches": 1, "log_every": 1, "model.width": 32}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a small run, and its result row."""
    folder = tmp_path_factory.mktemp("seq2seq")
    overrides = OVERRIDES | {f"data.selective_copying.{key}": value for key, value in SHORT.items()}
    config = configs.load(COPYING, [(key, str(value)) for key, value in overrides.items()])
    return str(folder), train(config, str(folder))


@pytest.mark.scale
def test_a_run_from_a_config_learns(trained):
    folder, row = trained
    losses = [line["loss"] for line in read_metrics(f"{folder}/metrics.jsonl") if "loss" in line]
    assert len(losses) == 60 and losses[0] > 1.2 and np.mean(losses[-5:]) < 0.5 * losses[0]
    assert row["metrics"]["test/accuracy"] > 2 * row["baselines"]["chance"]
    restored = restore(folder, "latest")
    assert row["params"] == sum(x.size for x in jax.tree.leaves(restored.params))
    assert row["kind"] == "seq2seq" and row["mixers"] == []
    source = np.zeros((1, 8 - 2 + 1), np.int32)
    state = jax.eval_shape(restored.run.model.apply, {"params": restored.params}, source, None, {})[1]
    assert row["state_bytes"] == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.scale
def test_what_a_run_can_be_asked(trained, capsys):
    restored = restore(trained[0], "latest")
    options = dict(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    continuation(restored, prompt="0 3 0 0 2 0 5", tokens=3, **options)
    assert len(capsys.readouterr().out.split()) == 7 + 3
    with pytest.raises(UserError, match=r"1 prompt tokens .* at least 2 of the prompt .* closest: 2 and 3"):
        continuation(restored, prompt="5", tokens=3, **options)
    with pytest.raises(UserError, match="mixers, none in a seq2seq, have no attention maps; allowed: a run with"):
        attention(restored, split="test", examples=1, prompt="")


def test_a_longer_row_is_cut_where_its_own_tail_begins():
    """Recall asks from behind the pairs on, however long the row: all of its places are answered, also when some of
    an example's are unused."""
    short = [("data.mqar.min_pairs", "2"), ("model.width", "8"), ("eval_batches", "1")]
    run = prepare(configs.load("configs/debug.py:arch=seq2seq", short))
    longer = at_length(run, 64)
    assert (run.model.target, longer.model.target) == (32 - 4, 64 - 4)
    state = run.init()
    for asked in (run, longer):
        assert 0 < validate(asked, state, "test")["test/loss"] < 10


@pytest.mark.quick
def test_refusals(book):
    text = f"configs/text.py:path={book},arch=seq2seq"
    for spec, overrides, words in (
        (text, {}, "asks at every token; allowed: .* such as selective_copying; closest: arch=gru"),
        ("configs/listops.py:arch=seq2seq", {}, "asks for one of 10 classes; .* closest: arch=gru"),
        (COPYING, {"model.mixers": "gru"}, r"takes no mixers .* \('gru',\) and 'none'; closest: arch=seq2seq"),
        (COPYING, {"model.position": "rope"}, r"given \(\) and 'rope'; closest: arch=seq2seq"),
        (COPYING, {"model.kind": "seqseq"}, "model.kind is 'seqseq'; allowed: .* closest: seq2seq"),
        (COPYING, {"model.kind": "stack"}, "model.mixers is empty"),
        (COPYING, {"model.seq2seq.cell": "lstn"}, "model.seq2seq.cell is 'lstn'; allowed: gru, lstm; closest: lstm"),
        (COPYING, {"model.seq2seq.look": "1"}, "model.seq2seq has cell, attention; closest: model.seq2seq"),
        (COPYING, {"model.width": "1"}, "model.width 1 must be at least 2"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(configs.load(spec, overrides.items()))
