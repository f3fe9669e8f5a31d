"""Training: sharding and groups as laws over the zoo, the step, the optimizer, and what happens to a broken loss."""

import contextlib
import itertools
import json
import re
import threading

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import data
from configs import archs
from data import pipeline
from model.errors import UserError
from model.groups import group_rules
from model.mixers import MIXERS
from model.ops.cross_entropy import scores
from tests import alone, zoo
from train import config as configs
from train import optim, sharding
from train.checkpoint import Checkpoints
from train.log import read_metrics
from train.loop import train
from train.objectives import TaskTargets
from train.run import prepare
from train.step import RunState, train_step

DEBUG = "configs/debug.py"
TINY = [("model.width", "16"), ("batch_size", "16"), ("data.mqar.length", "16")]


def load(*overrides: tuple[str, str], spec: str = DEBUG):
    return configs.load(spec, [*TINY, *overrides])


def one_step(config, n: int = 1):
    """Metrics and parameters after n steps on the mesh that the config names."""
    run = prepare(config)
    state = run.init()
    for step in range(n):
        batch = pipeline.Batch(run.task, 0, "train", config.batch_size, step)
        state, sums = run.train_step(state, sharding.put_batch(batch, run.batch_sharding))
    return jax.device_get(sums), jax.device_get(state.params)


MESH = [("mesh.data", "1"), ("mesh.fsdp", "2"), ("mesh.tensor", "2"), ("mesh.sequence", "2")]


# A model of a few kinds of layers compiles faster than several models, and than one of many.
WRITERS = [name for name in zoo.FIRST_OF_KIN if name in zoo.WRITERS]
STACKS = [WRITERS[i::10] for i in range(10)]
TWO_WAYS = [name for name in zoo.FIRST_OF_KIN if not MIXERS[name].forward_only]
# All that run no other way, and of the others, which are one way and its mirror image, every third.
BOTH_WAYS = [name for i, name in enumerate(TWO_WAYS) if name not in WRITERS or i % 3 == 0]
ROWS = [("mesh.data", "2"), ("mesh.fsdp", "2"), ("mesh.tensor", "2")]  # without the length
SHARED = [(mixers, True, MESH) for mixers in STACKS] + [(BOTH_WAYS[i::4], False, ROWS) for i in range(4)]


def stacked(mixers: list[str]) -> list[tuple[str, str]]:
    """A layer of each, without positions, and nothing between them."""
    bare = [("model.position", "none"), ("model.mlp", "none")]
    return [("model.mixers", ",".join(mixers)), ("model.layers", str(len(mixers))), *bare]


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize(
    "mixers, causal, mesh", SHARED, ids=["+".join(m) + ("" if c else "-bidirectional") for m, c, _ in SHARED]
)
def test_sharding_changes_nothing_but_rounding(mixers, causal, mesh):
    """Two hundred-thousandths, or what the last bits of the parameters change, which is more where layers cancel."""
    run = prepare(load(*stacked(mixers), ("model.causal", str(causal)), *mesh))
    first, step = alone.start(run)  # which knows of no mesh
    wanted, sums = step(first)
    rounded = [step(alone.nudged(first, seed))[1] for seed in range(4)]
    state, metrics = alone.one_step(run, first)
    for key in ("loss", "grad_norm"):
        bits = max(abs(each[key][0] - sums[key][0]) for each in rounded)
        np.testing.assert_allclose(metrics[key][0], sums[key][0], rtol=2e-5, atol=bits, err_msg=key)
    # Adam's first step is the sign of the gradient: where that is rounding, so is the step.
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted.params), strict=True):
        assert np.isclose(a, b, atol=2e-5).mean() > 0.99


def test_parameters_really_are_sharded():
    run = prepare(load(("model.width", "32"), *MESH))
    params = run.init().params
    kernel = params["stack"]["layers"]["block_0"]["mixer"]["q"]["kernel"]  # [layers, D, H, K]
    assert kernel.addressable_shards[0].data.shape == (2, 16, 2, 8)


@pytest.mark.parametrize(
    "mixers", [["attention"], pytest.param(WRITERS, marks=pytest.mark.scale)], ids=["attention", "all"]
)
def test_parameters_are_drawn_as_without_a_mesh(mixers):
    """By the generator of real runs."""
    run = prepare(load(*stacked(mixers), *MESH))
    tokens = pipeline.batch_at(run.task, 0, "train", 1, 0)["inputs"]
    drawn = jax.jit(lambda key: nn.unbox(run.model.init(key, tokens))["params"])(jax.random.key(run.config.seed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), run.init().params, drawn)


@pytest.mark.quick
@pytest.mark.parametrize("reads", [("model.causal", "False"), ("model.attention.prefix", "4")], ids="=".join)
def test_a_model_that_sees_its_answers_is_refused(reads, tmp_path):
    (tmp_path / "book.txt").write_text("word " * 2000)
    text = [("data.task", "text"), ("data.text.path", str(tmp_path / "book.txt")), ("data.text.length", "16")]
    prepare(configs.load(DEBUG, text))
    with pytest.raises(UserError, match="task 'text' asks for the next token, and this model sees it; allowed"):
        prepare(configs.load(DEBUG, [*text, reads]))
    prepare(load(reads))  # a task that asks elsewhere may be read bidirectionally


@pytest.mark.quick
def test_what_the_mesh_cannot_share_out_is_refused():
    with pytest.raises(UserError, match=r"batch_size 6 .* mesh.fsdp x mesh.expert = 8; closest that does: 8"):
        prepare(load(("batch_size", "6")))
    with pytest.raises(UserError, match=r"length 18 does not divide over mesh.sequence = 8"):
        prepare(load(("data.mqar.length", "18"), ("mesh.data", "1"), ("mesh.sequence", "8")))
    with pytest.raises(UserError, match="at most one may be -1"):
        prepare(load(("mesh.tensor", "-1")))


READERS = [(name, "none") for name in zoo.ALONE if name not in zoo.WRITERS]


@pytest.mark.few(12)
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("mixer, position", zoo.PAIRS + READERS)
def test_every_parameter_is_in_exactly_one_group(mixer, position):
    place = [(f"model.{position}.{key}", str(value)) for key, value in zoo.PLACES.get(position, {}).items()]
    causal = ("model.causal", str(mixer in zoo.WRITERS))
    run = prepare(load(("model.mixers", mixer), ("model.position", position), causal, *place))
    rules = group_rules(run.config.model)
    found = optim.groups(run.abstract.params, rules)  # raises where two rules claim one parameter
    assert set(jax.tree.leaves(found)) <= set(optim.GROUPS)
    flat = {optim.path_name(path): group for path, group in jax.tree_util.tree_leaves_with_path(found)}
    for name, group in MIXERS[mixer].groups.items():
        assert {g for path, g in flat.items() if path.endswith(f"mixer/{name}")} <= {group}


@pytest.mark.few(16)
@pytest.mark.parametrize("mixer", zoo.ALONE)
def test_groups_name_parameters_that_there_are(mixer):
    """With the mixer's defaults or in one of its variants."""
    there = set()
    for settings in [{}, *zoo.VARIANTS.get(mixer, [])]:
        case = (mixer, settings, "none")
        made = nn.unbox(jax.eval_shape(zoo.make(case).init, jax.random.key(0), zoo.inputs(1, 4), zoo.context(L=4)))
        there |= {optim.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)}
    for name in MIXERS[mixer].groups:
        assert f"params/{name}" in there, f"{mixer} names a parameter {name} that it does not have"


@pytest.mark.quick
def test_groups_decide_decay_and_rate():
    rules = [("a", "no_decay"), ("s", "ssm")]
    config = dict(load().optim) | dict(weight_decay=0.5, ssm_lr=0.1, clip=0.0, schedule="constant", warmup=0, lr=1.0)
    params = {"a": jnp.ones(3), "s": jnp.ones(3), "w": jnp.ones(3)}
    tx = optim.optimizer(config, 10, rules)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    # Adam's first update is 1; decay adds 0.5 where allowed; ssm moves a tenth.
    np.testing.assert_allclose([updates[k][0] for k in "asw"], [-1.0, -0.1, -1.5], rtol=1e-5)
    # A config may say otherwise: the last pattern that names a parameter does.
    config["groups"] = (("[as]", "decay"), ("a|w", "ssm"))
    tx = optim.optimizer(config, 10, rules)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    np.testing.assert_allclose([updates[k][0] for k in "asw"], [-0.1, -1.5, -0.1], rtol=1e-5)
    for pattern, message in (
        ("b", "'b', which matches the whole path of no parameter"),
        ("(", "no regular expression"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            optim.optimizer(config | dict(groups=((pattern, "ssm"),), frozen=("s",)), 10, rules).init(params)


@pytest.mark.quick
def test_schedules():
    config = dict(load().optim) | dict(lr=2.0, warmup=4, final_lr=0.1)
    cosine = optim.schedule(config | dict(schedule="cosine"), 20)
    np.testing.assert_allclose([cosine(0), cosine(3), cosine(4), cosine(12), cosine(20)], [0.5, 2.0, 2.0, 1.1, 0.2])
    rsqrt = optim.schedule(config | dict(schedule="rsqrt"), 20)
    np.testing.assert_allclose([rsqrt(0), rsqrt(4), rsqrt(16)], [0.5, 2.0, 1.0], rtol=1e-6)
    assert optim.schedule(config | dict(schedule="constant"), 20)(15) == 2.0


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
def test_accumulation_equals_the_whole_batch():
    whole, _ = one_step(load())
    parts, _ = one_step(load(("optim.accumulate", "2")))
    np.testing.assert_allclose(parts["loss"][0], whole["loss"][0], rtol=1e-6)
    np.testing.assert_allclose(parts["grad_norm"][0], whole["grad_norm"][0], rtol=1e-5)


@pytest.mark.quick
def test_golden_step():
    """Three steps of the tiny config, as first measured: a change here is a change of every result."""
    losses = []
    for n in (1, 3):
        sums, _ = one_step(load(), n)
        losses.append(float(sums["loss"][0] / sums["loss"][1]))
    np.testing.assert_allclose(losses, GOLDEN, rtol=2e-5)


def test_one_step_compiles_once():
    run = prepare(load())
    tx = optim.optimizer(run.config.optim, 10, group_rules(run.config.model))
    step = train_step(run.model, run.objective, tx, optax.constant_schedule(0.0))
    counted = jax.jit(chex.assert_max_traces(step, n=1))
    state = run.init()
    for i in range(3):
        batch = sharding.put_batch(pipeline.Batch(run.task, 0, "train", 16, i), run.batch_sharding)
        state, _ = counted(state, batch)
    chex.assert_tree_all_finite(state.params)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(run.init), run.abstract)


def break_at(monkeypatch, bad: set[int]):
    """Batches of these data steps get an infinite weight, so that their loss is not finite."""
    original = pipeline.batch_at

    def broken(task, seed, split, batch_size, step, *args, **kwargs):
        batch = original(task, seed, split, batch_size, step, *args, **kwargs)
        if split == "train" and step in bad and batch_size > 1:
            batch["weights"] = batch["weights"] * np.float32(np.inf)
        return batch

    monkeypatch.setattr(pipeline, "batch_at", broken)


SHORT = [
    ("steps", "12"),
    ("checkpoint_every", "4"),
    ("eval_every", "0"),
    ("log_every", "1"),
    ("eval_batches", "1"),
]


def stop_after(dispatches: int | None):
    """In the place of `graceful_stop`: a stop is requested after so many dispatches, or never."""
    asked = itertools.count(1)
    return lambda: contextlib.nullcontext(lambda: next(asked) == dispatches)


class Lookup:
    """Tokens choose their logits from a table: the least that a step can train."""

    def apply(self, variables, inputs, mutable, targets, **kwargs):
        return (scores(variables["params"]["w"][inputs], targets), None), {}


def keeps(count):
    """An optimizer that changes nothing but one number of its own, to the one given."""

    def update(grads, state, params):
        return jax.tree.map(jnp.zeros_like, grads), jnp.float32(count)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


@pytest.mark.quick
@pytest.mark.parametrize(
    "tx", [optax.sgd(np.inf), optax.sgd(3e38), keeps(jnp.inf), keeps(jnp.nan)], ids=["update", "sum", "inf", "nan"]
)
def test_an_update_that_leaves_no_finite_state_is_not_applied(tx):
    """The loss and the gradient are finite throughout."""
    params = {"w": jnp.full((4, 3), 3.2e38)}
    zero = jnp.int32(0)
    state = RunState(jnp.uint32(0), zero, params, tx.init(params), zero, zero, zero)
    batch = {"inputs": jnp.arange(4)[None], "targets": jnp.ones((1, 4), int), "weights": jnp.ones((1, 4))}
    step = train_step(Lookup(), TaskTargets(data.build("mqar", {})), tx, optax.constant_schedule(1.0))
    after, sums = jax.jit(step)(state, batch)
    assert np.isfinite(sums["loss"][0]) and np.isfinite(sums["grad_norm"][0])
    assert (float(sums["finite"][0]), int(after.nonfinite), int(after.step)) == (0, 1, 1)
    chex.assert_trees_all_equal((after.params, after.opt_state), (state.params, state.opt_state))


@pytest.mark.quick
def test_the_rate_that_is_told_is_the_one_that_is_used():
    """After a step that was not applied too, which the schedule has not seen."""
    rate = optax.linear_schedule(0.0, 1.0, 4)
    tx = optax.scale_by_learning_rate(rate)
    params, zero = {"w": jnp.zeros((4, 3))}, jnp.int32(0)
    state = RunState(jnp.uint32(0), zero, params, tx.init(params), zero, zero, zero)
    step = jax.jit(train_step(Lookup(), TaskTargets(data.build("mqar", {})), tx, rate))
    for weight in (1.0, np.nan, 1.0):
        batch = {"inputs": jnp.arange(4)[None], "targets": jnp.ones((1, 4), int), "weights": jnp.full((1, 4), weight)}
        before, (state, sums) = state, step(state, batch)
    moved = optax.global_norm(jax.tree.map(jnp.subtract, state.params, before.params))
    assert (int(state.step), int(state.nonfinite), float(sums["lr"][0])) == (3, 1, 0.25)
    np.testing.assert_allclose(moved, 0.25 * sums["grad_norm"][0], rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_loss_that_is_not_finite(policy, tmp_path, monkeypatch):
    break_at(monkeypatch, {6})
    result = train(load(*SHORT, ("nonfinite", policy)), str(tmp_path))
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert result["nonfinite"] == 1
    if policy == "stop":
        assert result["status"] == "nonfinite" and "test/accuracy" not in result["metrics"]
    else:
        assert result["status"] == "finished" and result["steps"] == 12
        assert steps == list(range(1, 13))
        finite = [np.isfinite(line["loss"]) for line in lines]
        assert finite.count(False) == (1 if policy == "skip" else 0)
        assert np.isfinite(result["metrics"]["test/loss"])
    assert all(0 <= line["data_wait"] <= 1 for line in [*lines, result])


def test_a_rollback_goes_on_with_the_batch_after_the_one_that_broke(tmp_path, monkeypatch):
    break_at(monkeypatch, {6, 9})
    config = load(*SHORT, ("nonfinite", "rollback"))
    result = train(config, str(tmp_path))
    assert result["nonfinite"] == 2 and result["goodput"]["repeated_steps"] >= 6  # back to step 4, twice
    with Checkpoints(tmp_path / "checkpoints", 1) as checkpoints:
        step, state = checkpoints.restore(prepare(config).abstract)
    # Step 7 broke on batch 6, and was step 7 again when batch 7 was read at step 5 and batch 9 came.
    assert (step, int(state.data_offset), int(state.nonfinite), int(state.rollbacks)) == (12, 3 + 3, 2, 2)


def test_rollbacks_end(tmp_path, monkeypatch):
    break_at(monkeypatch, set(range(6, 1000)))
    result = train(load(*SHORT, ("nonfinite", "rollback"), ("max_rollbacks", "2")), str(tmp_path))
    assert result["status"] == "nonfinite" and (result["nonfinite"], result["steps"]) == (3, 5)
    assert not any(thread.name == "ahead" for thread in threading.enumerate()), "nobody makes batches any more"


def test_early_stop_and_finished_runs(tmp_path, capsys):
    config = load(*SHORT, ("eval_every", "4"), ("target", "0.0001"), ("steps_per_dispatch", "2"))
    result = train(config, str(tmp_path))
    assert result["status"] == "target" and result["steps"] == 4
    assert capsys.readouterr().out.startswith("2 layers, looped over\n2 steps in a dispatch\n")
    assert train(config, str(tmp_path)) == result
    said = capsys.readouterr().out
    assert "finished already" in said and "layers" not in said


@pytest.mark.scale
def test_resuming_with_another_config(tmp_path, capsys):
    train(load(*SHORT), str(tmp_path))
    with pytest.raises(UserError, match=r"optim\.lr: 0\.001 -> 0\.5\)"):
        train(load(*SHORT, ("optim.lr", "0.5")), str(tmp_path))
    assert "optim.lr" not in capsys.readouterr().out
    more = train(load(*SHORT, ("steps", "16")), str(tmp_path))  # declared safe
    assert more["steps"] == 16 and "steps: 12 -> 16" in capsys.readouterr().out
    assert configs.load(str(tmp_path / "config.json")).to_dict() == load(*SHORT, ("steps", "16")).to_dict()


def test_resuming_on_other_data(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("a line of text\n" * 400)
    text = [("data.task", "text"), ("data.text.path", str(book)), ("data.text.length", "16")]
    config = configs.load(DEBUG, [*SHORT, *text, ("model.width", "16")])
    train(config, str(tmp_path / "run"))
    book.write_text("another line\n" * 400)
    with pytest.raises(UserError, match="the data of task text has changed"):
        train(config, str(tmp_path / "run"))


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("mixers", STACKS[::2], ids="+".join)
def test_a_classifier_trains_on_padded_documents(mixers):
    choice = stacked(mixers)
    short = [
        ("data.listops." + k, v) for k, v in dict(length="32", max_depth="4", min_length="5", max_length="32").items()
    ]
    run = prepare(configs.load("configs/listops.py", [*choice, *short, ("model.width", "16"), ("batch_size", "16")]))
    state, losses = run.init(), []
    batch = pipeline.Batch(run.task, 0, "train", 16, 0)
    for _ in range(8):
        state, sums = run.train_step(state, sharding.put_batch(batch, run.batch_sharding))
        losses.append(float(sums["loss"][0]) / 16)
    assert losses[-1] < losses[0] < 3.5


# As bare layers: Fourier transforms have no parameters, sLSTM no map at its end, an RNN no gates, Mega more, and the
# Synthesizer numbers for every place. Where models are matched, their MLPs, depth or width make up for it.
UNLIKE = {"fnet", "slstm", "rnn", "mega", "mega_chunk", "synthesizer"}


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
def test_named_architectures_build_at_comparable_size():
    sizes = {}
    for arch in archs.ARCHS.keys() - UNLIKE:
        run = prepare(configs.load(f"configs/synthetic.py:task=induction,arch={arch}"))
        sides = 2 if run.config.model.kind == "encoder_decoder" else 1
        sizes[arch] = run.params / sides / run.config.model.layers  # of which some have more, for a turn of each mixer
    assert max(sizes.values()) < 3 * min(sizes.values()), sizes


@pytest.mark.parametrize("mixers", ["fnet", "fnet,attention"])
def test_a_run_of_what_has_no_state_ends_with_its_result(mixers, tmp_path):
    short = dict(length="16", max_depth="3", min_length="5", max_length="16").items()
    task = [(f"data.listops.{key}", value) for key, value in short]
    choice = [("model.mixers", mixers), ("model.position", "none"), ("model.causal", "False"), ("model.width", "16")]
    quick = [("batch_size", "16"), ("steps", "2"), ("eval_every", "0"), ("eval_batches", "1")]
    train(configs.load("configs/listops.py", [*choice, *task, *quick]), str(tmp_path))
    found = json.loads((tmp_path / "result.json").read_text())
    assert bool(found["state_bytes"]) == ("attention" in mixers)


@pytest.mark.quick
def test_config_json_is_the_config(tmp_path):
    config = load(("model.mixers", "mamba,attention"), ("model.position", "rope"))
    (tmp_path / "c.json").write_text(json.dumps(config.to_dict()))
    assert configs.load(str(tmp_path / "c.json")).to_dict() == config.to_dict()
    assert configs.digest(config) != configs.digest(load())
    assert set(config.model.keys()) >= {"mamba", "attention", "rope"} and "s4d" not in config.model


GOLDEN = [4.175056457519531, 4.167693138122559]
