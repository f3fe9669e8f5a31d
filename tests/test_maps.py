"""Looking inside: numbers of maps that are known by heart, and the maps of models, looped, unrolled and mixed."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from configs import base
from data import build as build_task
from eval import attention as suite
from eval import maps, pictures
from eval.restore import restore
from eval.suites import SUITES
from model import build, entries
from model.asked import Asked
from model.contract import Context
from model.errors import UserError
from model.layers import norm
from model.mixers import MIXERS
from tests.processes import fork
from train import config as configs
from train.checkpoint import Checkpoints
from train.identity import sign_run
from train.run import prepare
from train.workdir import open_workdir

ROOT = Path(__file__).parent.parent
RNG = np.random.default_rng(0)
L, V = 12, 20


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled():
    """Nothing here runs long enough to be worth optimising."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def causal_maps(*shape: int) -> np.ndarray:
    """Random maps `[..., L, L]` of causal attention."""
    scores = np.where(np.tri(shape[-1]), 3 * RNG.standard_normal(shape), -np.inf)
    weights = np.exp(scores)
    return weights / weights.sum(-1, keepdims=True)


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)

UNIFORM = np.tri(L) / np.arange(1, L + 1)[:, None]
PREVIOUS = np.eye(L, k=-1)
PREVIOUS[0, 0] = 1


# --- numbers ---


@pytest.mark.quick
def test_entropy_lies_between_one_key_and_all_that_are_seen():
    n = np.arange(1, L + 1)
    np.testing.assert_allclose(maps.row_entropy(UNIFORM), np.log(n), atol=1e-12)
    np.testing.assert_array_equal(maps.row_entropy(np.eye(L)), np.zeros(L))
    found = maps.row_entropy(causal_maps(5, L, L))
    assert found.shape == (5, L) and np.all(found >= 0) and np.all(found <= np.log(n) + 1e-12)
    assert np.all(found[:, 1:] > 0)
    np.testing.assert_allclose(maps.row_entropy(0.3 * UNIFORM), np.log(n), atol=1e-12)  # a learned sink took the rest
    assert np.isnan(maps.row_entropy(np.zeros(4)))


@pytest.mark.quick
def test_the_first_and_the_previous_token():
    first = np.zeros((L, L))
    first[:, 0] = 1
    assert maps.first_token_share(first) == 1 and maps.previous_token_score(PREVIOUS) == 1
    assert maps.first_token_share(np.eye(L)) == maps.previous_token_score(np.eye(L)) == 0
    assert maps.first_token_share(PREVIOUS) == pytest.approx(1 / (L - 1)), "the second token's previous is the first"
    mean = (1 / np.arange(2, L + 1)).mean()
    np.testing.assert_allclose(maps.first_token_share(np.stack([UNIFORM, first])), [mean, 1])
    np.testing.assert_allclose(maps.previous_token_score(np.stack([UNIFORM, PREVIOUS])), [mean, 1])
    assert np.isnan(maps.first_token_share(np.ones((1, 1)))) and np.isnan(maps.previous_token_score(np.ones((1, 1))))


@pytest.mark.quick
def test_a_perfect_induction_head_scores_1_on_a_repeated_sequence():
    tokens = np.tile(RNG.permutation(V)[: L // 2], 2)
    perfect = np.eye(L)
    perfect[L // 2 :] = np.eye(L, k=1 - L // 2)[L // 2 :]
    assert maps.induction_score(perfect, tokens) == 1
    assert maps.induction_score(np.eye(L), tokens) == maps.induction_score(PREVIOUS, tokens) == 0
    assert np.isnan(maps.induction_score(perfect, np.arange(L)))
    # The third token was followed by the second, the fourth by the second and by itself.
    assert maps.induction_score(UNIFORM[:4, :4], np.array([5, 7, 5, 5])) == pytest.approx((1 / 3 + 2 / 4) / 2)
    # What follows later is no memory, even where attention may look ahead.
    assert maps.induction_score(np.full((3, 3), 1 / 3), np.array([5, 5, 7])) == pytest.approx(1 / 3)


@pytest.mark.quick
def test_effective_rank_counts_directions():
    assert maps.effective_rank(np.eye(7)) == pytest.approx(7)
    assert maps.effective_rank(np.outer(np.arange(1, 6), np.arange(1, 4))) == pytest.approx(1)
    assert maps.effective_rank(np.diag([2.0, 2, 0])) == pytest.approx(2)
    assert maps.effective_rank(np.diag([3.0, 1])) == pytest.approx(math.exp(0.5623351446), rel=1e-9)
    assert maps.effective_rank(1e-3 * np.eye(7)[:, :4]) == pytest.approx(4), "whatever the scale"


@pytest.mark.quick
def test_queries_without_a_choice_do_not_count_for_the_entropy():
    weights = causal_maps(3, L, L)
    mask = maps.seen(weights)
    np.testing.assert_array_equal(mask, np.tri(L))
    np.testing.assert_allclose(maps.equal_weights(mask), UNIFORM)
    tokens = RNG.integers(0, 4, L)
    found, equal = maps.scores(weights[0], mask, tokens), maps.scores(UNIFORM, mask, tokens)
    rows = maps.row_entropy(weights[0])[1:]
    assert found["entropy"] == {"mean": rows.mean(), "min": rows.min(), "max": rows.max()} and rows.min() > 0
    assert found["uniform"] == pytest.approx(equal["entropy"]["mean"]) == np.log(np.arange(2, L + 1)).mean()
    assert found["no_token"] == pytest.approx(0)
    assert maps.scores(0.3 * UNIFORM, mask, tokens)["no_token"] == pytest.approx(0.7)
    alone = maps.scores(np.eye(3), np.eye(3, dtype=bool), tokens[:3])
    assert math.isnan(alone["entropy"]["mean"]) and math.isnan(alone["uniform"])


@pytest.mark.quick
def test_documents_are_taken_together():
    one = {"heads": [{"entropy": {"mean": 1.0, "min": 0.5, "max": 2.0}, "induction": math.nan}], "rank": 3.0}
    two = {"heads": [{"entropy": {"mean": 2.0, "min": 0.7, "max": 2.5}, "induction": 0.2}], "rank": 4.0}
    both = {"heads": [{"entropy": {"mean": 1.5, "min": 0.5, "max": 2.5}, "induction": 0.2}], "rank": 3.5}
    assert suite.together([one, two]) == both
    assert math.isnan(suite.together([one])["heads"][0]["induction"])


# --- pictures ---


@pytest.mark.quick
def test_a_long_map_keeps_its_thin_lines_and_hides_what_is_not_seen():
    n = 1000
    weights, mask = np.eye(n, k=-1), np.tri(n, dtype=bool)
    cells = pictures.heatmap(Figure().add_subplot(), weights, mask).get_array()
    assert len(cells) <= pictures.CELLS and np.all(np.diagonal(cells) == 1)
    np.testing.assert_array_equal(cells.mask, ~np.tri(len(cells), dtype=bool))
    assert np.all(cells[np.tri(len(cells), k=-2, dtype=bool)] == 0)


@pytest.mark.quick
def test_labels_say_what_the_token_is(book):
    text = build_task("text", {"path": str(book), "length": 16})
    assert suite.labels(text, np.frombuffer("a $\n\tï".encode(), np.uint8)) == ["a", "␣", "$", "↵", "⇥", "c3", "af"]
    assert suite.labels(build_task("induction", {}), np.array([suite.CLS, 0, 12])) == ["cls", "0", "12"]


# --- the maps of a model ---


@functools.cache
def model_of(mixers: tuple[str, ...], layers: int, n_classes: int = 0, **changes):
    section = base.get_config().model.to_dict() | entries.sections(mixers, changes.get("position", "none"))
    section |= dict(mixers=mixers, width=16, mlp_width=16, layers=layers) | changes
    return build.build(section, Asked(V, n_classes))


@functools.cache
def params_of(mixers: tuple[str, ...], layers: int, n_classes: int = 0, **changes):
    """Made by hand, which spares a compilation, and loud enough for maps that are far from uniform."""
    model = model_of(mixers, layers, n_classes, **changes)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"])
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.8 * rng.standard_normal(x.shape), x.dtype), nn.unbox(shapes))


TOKENS = RNG.integers(0, V, (2, L)).astype(np.int32)
STACKS = [(("attention",), 3), (("s4d", "attention"), 5), (("attention", "s4d", "s4d"), 4)]


def softmax(mixer: str) -> bool:
    return MIXERS[mixer].softmax


@pytest.mark.few(1)
@pytest.mark.parametrize(("mixers", "layers"), STACKS)
def test_maps_are_the_same_looped_unrolled_and_rematerialised(mixers, layers):
    params = params_of(mixers, layers)
    looped, unrolled, again = (
        suite.inside(model_of(mixers, layers, scan=scan, kept=kept), params, TOKENS, None)
        for scan, kept in ((True, "all"), (False, "all"), (True, "nothing"))
    )
    assert ["weights" in layer for layer in looped] == [softmax(mixers[i % len(mixers)]) for i in range(layers)]
    for other in (unrolled, again):
        jax.tree.map(close, other, looped)
    for layer in looped:
        assert layer["output"].shape == (2, L, 16)
        if "weights" in layer:
            assert layer["weights"].shape == (2, 4, L, L)
            np.testing.assert_allclose(layer["weights"].sum(-1), 1, atol=1e-5)
            assert maps.row_entropy(np.asarray(layer["weights"])).mean() < 1.5, "too even to tell maps apart"
            assert np.all(np.triu(layer["weights"], 1) == 0)


def test_the_last_output_is_what_the_logits_are_read_from():
    model, params = model_of(("attention",), 3), params_of(("attention",), 3)
    last = norm("rmsnorm", jnp.float32, "norm").apply(
        {"params": params["norm"]}, suite.inside(model, params, TOKENS, None)[-1]["output"]
    )
    logits, _ = model.apply({"params": params}, TOKENS)
    close(last @ params["embed"]["embedding"].T, logits)


def test_parameters_come_without_maps():
    assert set(jax.eval_shape(model_of(("s4d", "attention"), 2).init, jax.random.key(0), TOKENS)) == {"params"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("mixers", "layers"), STACKS)
def test_layers_come_in_order(mixers, layers):
    """Layer n - 1 is the last of the model that ends there."""
    params = params_of(mixers, layers)
    whole = suite.inside(model_of(mixers, layers), params, TOKENS, None)
    for n in range(len(mixers), layers):
        repeats, left = divmod(n, len(mixers))
        looped, rest = (params["stack"].get(name, {}) for name in ("layers", "rest"))
        if left and repeats < layers // len(mixers):
            rest = jax.tree.map(lambda x, turn=repeats: x[turn], looped)
        stack = {"layers": jax.tree.map(lambda x, turns=repeats: x[:turns], looped)}
        if left:
            stack["rest"] = {f"block_{i}": rest[f"block_{i}"] for i in range(left)}
        short = suite.inside(model_of(mixers, n), params | {"stack": stack}, TOKENS, None)
        assert len(short) == n
        jax.tree.map(close, short[-1], whole[n - 1])


@pytest.mark.few(4)
@pytest.mark.parametrize("mixer", [name for name in MIXERS if softmax(name)])
def test_every_softmax_mixer_gives_its_maps(mixer):
    (layer,) = suite.inside(model_of((mixer,), 1), params_of((mixer,), 1), TOKENS, None)
    np.testing.assert_allclose(layer["weights"].sum(-1), 1, atol=1e-5)


def test_the_weights_are_those_that_attention_used():
    x = jnp.asarray(RNG.standard_normal((2, L, 16)), jnp.float32)
    mixer, ctx = MIXERS["attention"](width=16), Context(positions=jnp.arange(L)[None])
    params = nn.unbox(mixer.init(jax.random.key(0), x, ctx)["params"])
    (y, _), kept = mixer.apply({"params": params}, x, ctx, mutable=["maps"])
    values = jnp.einsum("bmd,dhk->bmhk", x, params["v"]["kernel"])
    mixed = jnp.einsum("bhlm,bmhk->blhk", kept["maps"]["weights"][0], values)
    np.testing.assert_allclose(jnp.einsum("blhk,hkd->bld", mixed, params["out"]["kernel"]), y, atol=1e-5)


def documents(model, params, tokens, segments=None) -> list[suite.Document]:
    return list(suite.documents_of(SimpleNamespace(run=SimpleNamespace(model=model), params=params), tokens, segments))


def test_padding_is_left_out_and_documents_stand_alone():
    model, params = model_of(("attention",), 2, position="rope"), params_of(("attention",), 2, position="rope")
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [0, 0] + [1] * 10], np.int32)
    found = documents(model, params, TOKENS, segments)
    alone = [TOKENS[:1, :5], TOKENS[:1, 5:9], TOKENS[1:, 2:]]
    assert len(found) == 3
    for got, tokens in zip(found, alone, strict=True):
        (want,) = documents(model, params, tokens)
        np.testing.assert_array_equal(got.tokens, tokens[0])
        jax.tree.map(close, got.layers, want.layers)


def test_a_classifiers_own_vector_stands_before_the_tokens():
    section = dict(n_classes=3, pool="cls", causal=False)
    model, params = model_of(("attention",), 1, **section), params_of(("attention",), 1, **section)
    found = documents(model, params, TOKENS[:1], np.array([[1] * 7 + [0] * 5], np.int32))[0]
    np.testing.assert_array_equal(found.tokens, [suite.CLS, *TOKENS[0, :7]])
    assert found.layers[0]["weights"].shape == (4, 8, 8) and found.layers[0]["output"].shape == (8, 16)
    np.testing.assert_allclose(found.layers[0]["weights"].sum(-1), 1, atol=1e-5)


# --- the suite ---

FEW = {"batch_size": 8, "model.width": 16, "data.mqar.length": 16}


def initialised(tmp_path_factory, arch: str, **overrides) -> Path:
    """A run's folder before its first step."""
    changes = [(key, str(value)) for key, value in (FEW | overrides).items()]
    run = prepare(configs.load(f"{ROOT}/configs/debug.py:arch={arch}", changes))
    with open_workdir(tmp_path_factory.mktemp("runs") / arch) as folder:
        sign_run(run, folder, run.task.fingerprint(run.config.data.seed), 0)
        with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(0, run.init())
    return folder


@pytest.fixture(scope="module")
def attention_run(tmp_path_factory) -> Path:
    return initialised(tmp_path_factory, "attention")


@pytest.fixture(scope="module")
def hybrid_run(tmp_path_factory) -> Path:
    return initialised(tmp_path_factory, "hybrid", **{"model.layers": 3})


@pytest.fixture(scope="module")
def mamba_run(tmp_path_factory) -> Path:
    return initialised(tmp_path_factory, "mamba", **{"model.layers": 1})


one_run = pytest.mark.xdist_group("maps")  # its tests go to one worker, which makes each run once
ASK = {"split": "test", "examples": 1, "prompt": ""}


def looked(run: Path, *overrides: tuple[str, str], **ask) -> tuple[Path, dict]:
    """The suite's JSON file, and what it holds."""
    before = set((run / "eval").glob("*.json"))
    SUITES["attention"](restore(str(run), "latest", overrides), **ASK | ask)
    (path,) = set((run / "eval").glob("*.json")) - before
    return path, json.loads(path.read_text())


def colours(path: Path) -> int:
    return len(np.unique((imread(path) * 255).astype(np.uint8).reshape(-1, 4), axis=0))


@pytest.mark.scale
@one_run
def test_the_suite_writes_numbers_within_their_bounds_and_pictures(attention_run, capsys):
    path, report = looked(attention_run, split="validation", examples=3)
    assert path.name == "attention-validation-3-0.json" and report["examples"] == 3 and report["task"] == "mqar"
    assert [(layer["layer"], layer["mixer"], len(layer["heads"])) for layer in report["layers"]] == [
        (0, "attention", 4),
        (1, "attention", 4),
    ]
    for layer in report["layers"]:
        assert 1 <= layer["rank"] <= layer["rank_limit"] == 16
        for head in (*layer["heads"], layer["equal_weights"]):
            entropy, log_n = head["entropy"], np.log(np.arange(2, 17))
            assert 0 <= entropy["min"] <= entropy["mean"] <= head["uniform"] + 1e-6 <= entropy["max"] + 2
            assert head["uniform"] == pytest.approx(log_n.mean()) and entropy["max"] <= log_n[-1] + 1e-6
            for score in ("first_token", "previous_token", "induction"):
                assert 0 <= head[score] <= 1
            assert head["no_token"] == pytest.approx(0, abs=1e-6)
    loaded = restore(str(attention_run), "latest")
    documents = suite.documents_of(loaded, *suite.first_examples(loaded, "validation", 3))
    each = [suite.measure(document) for document in documents]
    assert report["layers"][1]["rank"] == pytest.approx(np.mean([one[1]["rank"] for one in each]))
    assert len({one[1]["rank"] for one in each}) == 3
    for kind in ("maps", "summary"):
        assert colours(path.with_name(f"attention-validation-3-0-{kind}.png")) > 50, "blank"
    out = capsys.readouterr().out
    assert "3 examples" in out and str(path) in out
    lines = [line.split() for line in out.splitlines()]
    head, equal = report["layers"][1]["heads"][2], report["layers"][1]["equal_weights"]
    assert ["2", *(f"{x:.4f}" for x in (head["entropy"]["mean"], *(head[score] for score in maps.SCORES)))] in lines
    assert ["equal", f"{equal['uniform']:.4f}"] in [line[:2] for line in lines]


@pytest.mark.scale
@one_run
def test_a_prompt_is_looked_at_as_it_stands(attention_run):
    path, report = looked(attention_run, prompt="1 40 2 41 1")
    assert path.name.startswith("attention-prompt-") and report["prompt"] == "1 40 2 41 1"
    assert report["split"] == "prompt" and report["layers"][0]["rank_limit"] == 5
    assert 0 < report["layers"][0]["heads"][0]["induction"] < 1
    other, report = looked(attention_run, prompt="1 40 2")
    assert other != path and report["layers"][0]["heads"][0]["induction"] is None, "no token came back"


@one_run
def test_what_cannot_be_looked_at_is_refused(attention_run):
    refused = {
        "a row of mqar has 4,096 tokens; allowed: up to 2,048.*--config.data.mqar.length=2048": dict(length="4096"),
        "unknown split 'tests'.*closest: test": dict(split="tests"),
        "examples is 0; allowed: at least 1; closest: 1": dict(examples=0),
        "examples is 5; allowed: 1 to 4.*closest: 4": dict(examples=5, split="train", n_train="4"),
        "examples is 2, but a prompt is one": dict(examples=2, prompt="1 2"),
        "the prompt has 1 tokens; allowed: 2 to 2,048; closest: 2": dict(prompt="1"),
        "from 0 to 63": dict(prompt="1 64"),
    }
    for words, ask in refused.items():
        changes = [(f"data.mqar.{key}", ask.pop(key)) for key in ("length", "n_train") if key in ask]
        with pytest.raises(UserError, match=words):
            SUITES["attention"](restore(str(attention_run), "latest", changes), **ASK | ask)


@pytest.mark.scale
@pytest.mark.few(1)
@one_run
def test_layers_without_attention_have_a_rank_and_no_map(hybrid_run, capsys):
    path, report = looked(hybrid_run)
    assert [(layer["mixer"], len(layer["heads"])) for layer in report["layers"]] == [
        ("mamba", 0),
        ("attention", 4),
        ("mamba", 0),
    ]
    assert all(1 <= layer["rank"] <= 16 for layer in report["layers"])
    assert capsys.readouterr().out.count("no map") == 2
    assert colours(path.with_name(f"{path.stem}-maps.png")) > 50


@one_run
def test_mistakes_end_in_one_line_and_exit_code_2(attention_run, mamba_run):
    cases = {
        (
            f"--workdir={mamba_run}",
        ): "this model's mixers, mamba, have no attention maps; allowed: a run with attention",
        (f"--workdir={attention_run}", "--tokens=5"): "does not take --tokens; allowed: --split, --examples, --prompt",
    }
    for args, words in cases.items():
        command = fork("eval", "--suite=attention", *args)
        assert (command.wait(), command.stdout) == (2, ""), command.stderr
        err = command.stderr
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err
