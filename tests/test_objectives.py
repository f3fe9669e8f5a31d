"""Objectives: what each shows a model and asks of it, and whom it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data import build as build_task
from model.errors import UserError
from model.ops.cross_entropy import cross_entropy, scores
from tests.objectives import DEBUG, NEEDS, B, L, load, write_text
from tests.processes import fork
from train import config as configs
from train.denoising import Infilling, SpanCorruption
from train.objective import Objective
from train.objectives import OBJECTIVES, Masked, PrefixLM, TaskTargets
from train.run import prepare

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Rows `[B, L + 1]` of running text as the task text makes them."""
    place = np.broadcast_to(np.arange(tokens.shape[1] - 1, dtype=np.int32), tokens[:, 1:].shape)
    weights = np.ones(place.shape, np.float32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "attr_position": place}


@pytest.fixture(scope="module")
def task(text):
    return build_task("text", {"path": str(text), "length": L})


@pytest.fixture(scope="module")
def batch():
    """Every token of a row is another."""
    rng = np.random.default_rng(0)
    return batch_of(np.stack([rng.permutation(256)[: L + 1] for _ in range(B)]).astype(np.int32))


# What is shown and asked


@pytest.mark.quick
def test_the_tasks_own_targets_are_the_batch_itself(task, batch):
    objective = TaskTargets(task)
    assert objective.view(batch, jax.random.key(0)) is batch and objective.asked == task.asked


@pytest.mark.quick
def test_masked_asks_at_the_chosen_tokens_alone(task, batch):
    objective = Masked(task, rate=0.25, mask=1.0, random=0.0)
    assert objective.asked.vocab_size == task.vocab_size + 1
    seen = objective.view(batch, jax.random.key(0))
    assert seen["at"].shape == seen["targets"].shape == seen["weights"].shape == (B, 4)
    for row, inputs, at, targets, place in zip(
        batch["inputs"], *(np.asarray(seen[k]) for k in ("inputs", "at", "targets", "attr_position")), strict=True
    ):
        assert sorted(np.flatnonzero(inputs == task.vocab_size)) == sorted(at)
        assert (row[at] == targets).all() and (place == at).all()
    assert (seen["weights"] == 1).all()


@pytest.mark.quick
def test_masks_are_new_at_each_step_and_the_same_in_every_test(task, batch):
    objective = Masked(task)
    first, second = (objective.view(batch, jax.random.key(step))["inputs"] for step in range(2))
    assert (np.asarray(first) != np.asarray(second)).any()
    tested = objective.view(batch, None)
    backwards = objective.view({name: array[::-1] for name, array in batch.items()}, None)
    for name in ("inputs", "at", "targets", "weights"):
        assert (tested[name] == backwards[name][::-1]).all(), "in whatever batch a row stands"


@pytest.mark.scale
@pytest.mark.quick
def test_rows_past_the_end_of_a_split_count_for_nothing(task, batch):
    weights = batch["weights"].copy()
    weights[5:] = 0
    for objective in (Masked(task), PrefixLM(task, prefix=3), SpanCorruption(task), Infilling(task)):
        seen = np.asarray(objective.view({**batch, "weights": weights}, None)["weights"])
        assert seen[:5].any(axis=1).all() and not seen[5:].any()


@pytest.mark.quick
def test_prefix_lm_does_not_ask_for_the_prefix(task, batch):
    weights = np.asarray(PrefixLM(task, prefix=5).view(batch, None)["weights"])
    assert (weights == [[0] * 4 + [1] * 12] * B).all(), "position 4 asks for token 5, the first after the prefix"
    packed = {**batch, "segments": np.array([[1] * 9 + [2] * 5 + [0] * 2] * B, np.int32)}
    weights = np.asarray(PrefixLM(task, prefix=3).view(packed, None)["weights"])[0]
    assert weights[:14].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1], "in every document"


@pytest.mark.quick
def test_span_corruption_shows_a_source_and_asks_for_its_target(task, batch):
    """Ids after the text's: the end, then the sentinels, of which the first is the highest."""
    objective = SpanCorruption(task, density=0.25, mean_span=2.0, sentinels=7)
    V, end, first = task.vocab_size, task.vocab_size, task.vocab_size + 7
    assert (objective.asked.vocab_size, objective.asked.source) == (V + 8, 16 - 4 + 2 + 1)
    seen = {name: np.asarray(array) for name, array in objective.view(batch, jax.random.key(0)).items()}
    assert set(seen) == {"inputs", "targets", "weights", "source"}
    assert seen["source"].shape == (B, 15) and seen["targets"].shape == seen["weights"].shape == (B, 4 + 2 + 1)
    assert objective.lengths == (L, 15, 7)
    assert (seen["inputs"][:, 1:] == seen["targets"][:, :-1]).all() and (seen["inputs"][:, 0] == end).all()
    for row, source, target in zip(batch["inputs"], seen["source"].tolist(), seen["targets"].tolist(), strict=True):
        assert source[-1] == target[-1] == end
        assert [x for x in source if x > V] == [x for x in target if x > V] == [first, first - 1]
        here, there = source.index(first), source.index(first - 1)
        split = target.index(first - 1)
        text = source[:here] + target[1:split] + source[here + 1 : there] + target[split + 1 : -1]
        assert text + source[there + 1 : -1] == row.tolist()


@pytest.mark.quick
def test_infilling_asks_for_the_whole_text(task, batch):
    objective = Infilling(task, rate=0.5)
    end, mask = task.vocab_size, task.vocab_size + 1
    assert (objective.asked.vocab_size, objective.asked.source) == (mask + 1, L)
    seen = {name: np.asarray(array) for name, array in objective.view(batch, jax.random.key(0)).items()}
    assert (seen["targets"] == np.pad(batch["inputs"], ((0, 0), (0, 1)), constant_values=end)).all()
    assert (seen["inputs"] == np.pad(batch["inputs"], ((0, 0), (1, 0)), constant_values=end)).all()
    for row, source, real in zip(batch["inputs"], seen["source"], seen["source_segments"], strict=True):
        shown = source[(real > 0) & (source != mask)]
        assert len(shown) == L - 8 and np.isin(shown, row).all() and (source[real > 0] == mask).any()
        assert (np.diff(real) <= 0).all(), "padding is behind the row"


def reads(model, params, inputs, **arguments):
    """`[Q, L]`: how much the answers of one row, each by itself, depend on each token's embedding."""

    def answer(table, q):
        logits, _ = model.apply({"params": {**params, "embed": {"embedding": table}}}, inputs[None], **arguments)
        return jnp.sin(logits[0, q]).sum()  # of all logits, whose sum may be constant

    table = params["embed"]["embedding"]
    Q = arguments["at"].shape[1] if "at" in arguments else len(inputs)
    grads = jax.jit(jax.vmap(jax.grad(answer), (None, 0)))(table, jnp.arange(Q))
    return np.abs(np.asarray(grads)).sum(-1)


def built(text, kind, *overrides):
    run = prepare(load(text, kind, ("model.tied", "False"), *NEEDS[kind], *overrides))
    return run, jax.device_get(run.init().params)


def test_what_masked_asks_for_is_nowhere_in_what_it_shows(text, batch):
    run, params = built(text, "masked", ("objective.masked.mask", "1.0"), ("objective.masked.random", "0.0"))
    seen = run.objective.view(batch, jax.random.key(3))
    row = np.asarray(seen["inputs"])[0]
    found = reads(run.model, params, row, at=seen["at"][:1])
    assert (found[:, seen["targets"][0]] == 0).all(), "the true tokens"
    shown = row[row != run.task.vocab_size]
    assert (found[:, shown] > 0).all() and (found[:, run.task.vocab_size] > 0).all(), "all that is shown"


def test_what_prefix_lm_asks_for_is_not_seen(text, batch):
    run, params = built(text, "prefix_lm")
    row = batch["inputs"][0]
    found = reads(run.model, params, row)[:, row]  # [query, key]
    asked = np.asarray(run.objective.view(batch, None)["weights"])[0] > 0
    ahead = np.triu(np.ones((L, L), bool), 1)
    assert (found[asked][ahead[asked]] == 0).all()
    assert (found[:4, :5] > 0).all() and not asked[:4].any(), "inside the prefix the next token is seen, and not asked"


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["span_corruption", "infilling"])
def test_what_a_decoder_is_asked_for_is_not_seen(kind, text, batch):
    """It reads its source and what it has written; nothing hidden is in the source."""
    run, params = built(text, kind)
    seen = {name: array[:1] for name, array in run.objective.view(batch, jax.random.key(3)).items()}
    more = {name: array for name, array in seen.items() if name.startswith("source")}
    inputs, source = np.asarray(seen["inputs"])[0], np.asarray(seen["source"])[0]
    source = source[np.asarray(more.get("source_segments", more["source"] >= 0))[0] > 0]
    found = reads(run.model, params, inputs, **more)
    fresh = np.array([token not in source for token in inputs])  # those that the decoder alone is given
    ahead = np.triu(np.ones((len(inputs), len(inputs)), bool), 1)
    assert (found[:, inputs][ahead & fresh] == 0).all() and (found[:, inputs][~ahead & fresh] > 0).all()
    assert (found[:, source] > 0).all(), "all of the source is read"
    hidden = np.setdiff1d(batch["inputs"][0], source)
    assert len(hidden) == {"span_corruption": 2, "infilling": 5}[kind]


@pytest.mark.quick
def test_label_smoothing_spreads_a_share_of_the_target_in_training_alone(task, batch):
    logits, targets = jax.random.normal(jax.random.key(0), (B, L, 256)), batch["targets"]
    smooth = optax.smooth_labels(jax.nn.one_hot(targets, 256), 0.1)
    want = optax.softmax_cross_entropy(logits, smooth)
    np.testing.assert_allclose(cross_entropy(logits, targets, 0.1), want, rtol=1e-5)

    class Says:
        def apply(self, variables, inputs, targets, **arguments):
            return (scores(logits, targets), None), {}

    trained, tested = (TaskTargets(task, 0.1)(Says(), {}, batch, rng) for rng in (jax.random.key(0), None))
    plain = TaskTargets(task)(Says(), {}, batch, jax.random.key(0))
    np.testing.assert_allclose(trained["loss"][0], want.sum(), rtol=1e-5)
    assert tested["loss"][0] == plain["loss"][0] != trained["loss"][0]


@pytest.mark.quick
def test_a_prompt_hides_what_its_writer_is_to_fill_in(task):
    shown = [[97, 98], [], [99]]
    assert Infilling(task).source(shown) == [97, 98, 257, 257, 99]
    assert SpanCorruption(task, sentinels=5).source(shown) == [97, 98, 261, 260, 99, 256]
    with pytest.raises(UserError, match=r"2 spans are hidden; objective\.span_corruption\.sentinels allows 1"):
        SpanCorruption(task, density=0.1, sentinels=1).source(shown)


# Who is refused


REFUSED = {
    "the next token, seen": ("task", [("model.causal", "False")], "sees it; allowed: model.causal=True"),
    "a prefix and the next token": ("task", [("model.attention.prefix", "4")], "sees it; allowed: .* no prefix"),
    "an answer of several words, seen": (
        "task",
        [("data.task", "passkey"), ("model.causal", "False")],
        "task 'passkey' asks for the next token, and this model sees it; allowed: model.causal=True",
    ),
    "masks on one side": ("masked", [], "a causal model sees one; closest: model.causal=False"),
    "a task without text": (
        "masked",
        [("data.task", "mqar"), ("model.causal", "False")],
        "needs running text, and task 'mqar' has none; allowed: data.task=text, or a class for rows of tokens; ",
    ),
    "shares above one": (
        "masked",
        [("model.causal", "False"), ("objective.masked.random", "0.5")],
        "allowed: up to 1 together; closest: random 0.2",
    ),
    "a rate of nothing": ("masked", [("objective.masked.rate", "0")], "masked.rate is 0.0; allowed: a number above 0"),
    "no prefix": (
        "prefix_lm",
        [("objective.prefix_lm.prefix", "4")],
        "prefix is 0, and .* no such prefix: .* is 4; .*closest: model.attention.prefix=4",
    ),
    "a longer prefix": (
        "prefix_lm",
        [("objective.prefix_lm.prefix", "4"), ("model.attention.prefix", "5")],
        "model.attention.prefix is 5, and a model so made sees its answers: .* closest: model.attention.prefix=4",
    ),
    "a longer prefix in a layer of one's own": (
        "prefix_lm",
        [
            ("objective.prefix_lm.prefix", "4"),
            ("model.mixers", "attention,far"),
            ("model.far.mixer", "attention"),
            ("model.attention.prefix", "4"),
            ("model.far.prefix", "6"),
        ],
        "model.far.prefix is 6, and a model so made sees its answers",
    ),
    "a prefix that no layer has": (
        "prefix_lm",
        [("objective.prefix_lm.prefix", "4"), ("model.mixers", "mamba"), ("model.position", "none")],
        r"mixers \('mamba',\) have none; closest: model.mixers=attention and model.attention.prefix=4",
    ),
    "a prefix and bidirectional": (
        "prefix_lm",
        [*NEEDS["prefix_lm"], ("model.causal", "False")],
        "sees it; closest: model.causal=True",
    ),
    "a prefix longer than rows": (
        "prefix_lm",
        [("objective.prefix_lm.prefix", "17"), ("model.attention.prefix", "17")],
        "prefix is 17, and rows of task 'text' have 16 tokens; closest: 16",
    ),
    "one sequence": (
        "span_corruption",
        [],
        "cannot be served by model.kind 'stack'; allowed: encoder_decoder; closest: model.kind=encoder_decoder",
    ),
    "text that is to be two sequences": ("task", [("model.kind", "encoder_decoder")], "this task asks at every token"),
    "masks for a decoder": ("masked", [("model.kind", "encoder_decoder")], "this task asks at every token"),
    "a decoder with a prefix": (
        "infilling",
        [*NEEDS["infilling"], ("model.attention.prefix", "4"), ("model.mixers", "attention")],
        "a prefix lets it see the next; allowed: prefix 0",
    ),
    "more spans than sentinels": (
        "span_corruption",
        [*NEEDS["span_corruption"], ("objective.span_corruption.sentinels", "1"), ("data.text.length", "64")],
        "sentinels is 1, and rows of 64 tokens have 3 spans; allowed: at least as many; closest: 3",
    ),
    "rows of one token": (
        "span_corruption",
        [*NEEDS["span_corruption"], ("data.text.length", "1")],
        "at least 2 tokens; data.text.length is 1",
    ),
    "an unknown objective": ("maskd", [], "objective.kind is 'maskd'; allowed: task, .*closest: masked"),
    "another's setting": (
        "prefix_lm",
        [("objective.masked.rate", "0.1")],
        "unknown config key 'objective.masked.rate'",
    ),
    "smoothing": ("task", [("objective.label_smoothing", "1.0")], "label_smoothing is 1.0; allowed: .* below 1"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_one_line(case, text):
    kind, overrides, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as told:
        prepare(load(text, kind, *overrides) if "data.task" not in dict(overrides) else without_text(kind, overrides))
    assert "\n" not in str(told.value)


def without_text(kind, overrides):
    return configs.load(DEBUG, [("objective.kind", kind), *overrides])


def test_a_refusal_on_the_command_line(text, tmp_path):
    flags = ["--config.data.task=text", f"--config.data.text.path={text}", f"--config.data.text.length={L}"]
    flags += ["--config.objective.kind=masked", f"--config={DEBUG}", f"--workdir={tmp_path / 'run'}"]
    command = fork("train", *flags)
    assert command.wait() == 2 and command.stderr.startswith("error: objective 'masked' asks"), command.stderr
    assert command.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


# Configs


@pytest.mark.quick
def test_a_choice_brings_its_section_and_takes_it_along(text, tmp_path):
    config = load(text, "masked", ("objective.masked.rate", "0.3"), *NEEDS["masked"])
    flat = configs.flatten(config)
    assert flat["objective.kind"] == "masked" and flat["objective.masked.rate"] == 0.3
    file = tmp_path / "config.json"
    file.write_text(config.to_json())
    assert configs.load(str(file)).to_dict() == config.to_dict()
    other = configs.flatten(configs.load(str(file), [("objective.kind", "task")]))
    assert [key for key in other if key.startswith("objective.")] == ["objective.kind", "objective.label_smoothing"]


@pytest.mark.quick
def test_every_objective_is_listed_with_its_settings():
    for name, cls in OBJECTIVES.items():
        assert issubclass(cls, Objective) and cls.name == name and len(cls.__doc__.splitlines()[0]) < 110
    of_text = {name for name, cls in OBJECTIVES.items() if cls.needs_text} - {"next_token"}  # which a text asks itself
    assert of_text < set(NEEDS), "those of text are tried here"
    command = fork("experiments.list", "masked")
    assert command.wait() == 0
    assert "objective masked (objective.masked)" in command.stdout
    assert "rate    0.15; a number above 0" in command.stdout
