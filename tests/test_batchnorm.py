"""Batch normalisation: its definition, the statistics that run on, where these go, and who may not have it."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data import pipeline
from eval.accuracy import measure as measured_again
from eval.export import expressed
from eval.restore import restore
from model import build
from model.asked import Asked
from model.batchnorm import BatchNorm
from model.contract import RUNNING, Context
from model.errors import UserError
from model.groups import group_rules
from model.paths import as_tree, by_path
from model.weights import FAMILIES
from tests.test_model import model_config
from tests.test_train import stop_after
from train import config as configs
from train import loop, optim, sharding
from train.checkpoint import load_params
from train.run import prepare
from train.start import begin, find
from train.step import train_step

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LISTOPS = {"data.listops.length": 32, "data.listops.max_depth": 4, "data.listops.min_length": 5}
LISTOPS |= {"data.listops.max_length": 32, "batch_size": 16, "eval_batches": 1, "eval_every": 0, "optim.warmup": 0}
TINY = LISTOPS | {"model.width": 16, "model.layers": 2, "model.norm": "batchnorm", "model.causal": False}
TINY |= {"model.mixers": "attention", "model.attention.n_heads": 2, "model.mlp": "none", "model.position": "none"}


def load(**changes):
    """Rows of ListOps, padded, and a tiny classifier; keys with __ for their dots."""
    asked = TINY | {key.replace("__", "."): value for key, value in changes.items()}
    return configs.load("configs/listops.py", [(key, str(value)) for key, value in asked.items()])


def stepped(run, n: int = 1, state=None):
    """The state after n steps more."""
    state = run.init() if state is None else state
    for step in range(int(state.step), int(state.step) + n):
        batch = pipeline.Batch(run.task, 0, "train", run.config.batch_size, step)
        state, sums = run.train_step(state, sharding.put_batch(batch, run.batch_sharding))
    return state, jax.device_get(sums)


def running(params) -> dict[str, np.ndarray]:
    return {path: x for path, x in by_path(jax.device_get(params)).items() if path.rpartition("/")[2] in RUNNING}


# The norm itself


def definition(x, real, scale, bias, eps):
    """In float64: what a batch becomes, its mean and its unbiased variance."""
    tokens = np.asarray(x, np.float64)[real]
    mean, var = tokens.mean(0), tokens.var(0)
    return (x - mean) / np.sqrt(var + eps) * scale + bias, mean, var * len(tokens) / (len(tokens) - 1)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_the_definition_step_after_step(padded):
    """And then what is tested is divided by what has run on. Padding may hold anything."""
    rng = np.random.default_rng(0)
    layer, shape = BatchNorm(epsilon=1e-3, momentum=0.8), (3, 7, 5)
    segments = rng.integers(0, 3, shape[:2]) if padded else np.ones(shape[:2], np.int32)
    ctx, real = Context(segments=jnp.asarray(segments) if padded else None), segments > 0
    params = layer.init(jax.random.key(0), jnp.zeros(shape), ctx)["params"]
    params |= {name: jnp.asarray(rng.normal(size=5), jnp.float32) for name in ("scale", "bias")}
    affine = (np.asarray(params["scale"], np.float64), np.asarray(params["bias"], np.float64))
    mean, var = np.zeros(5), np.ones(5)
    for _ in range(4):
        x = rng.normal(3, 2, shape)
        want, of_batch, unbiased = definition(x, real, *affine, 1e-3)
        x[~real] = np.nan
        given = jnp.asarray(x, jnp.float32)
        y, sown = layer.apply({"params": params}, given, ctx.replace(train=True), mutable=["running"])
        np.testing.assert_allclose(y[real], want[real], rtol=2e-5, atol=2e-5)
        mean, var = 0.8 * mean + 0.2 * of_batch, 0.8 * var + 0.2 * unbiased
        np.testing.assert_allclose(sown["running"]["running_mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(sown["running"]["running_var"], var, rtol=1e-5)
        params |= sown["running"]
    y = layer.apply({"params": params}, given, ctx)
    np.testing.assert_allclose(y[real], ((x - mean) / np.sqrt(var + 1e-3) * affine[0] + affine[1])[real], rtol=1e-4)


def test_gradients_are_of_the_statistics_too_and_padding_has_none():
    rng = np.random.default_rng(1)
    x, ctx = rng.normal(size=(2, 4, 3)), Context(segments=jnp.asarray([[1, 1, 2, 0], [0, 1, 1, 0]]), train=True)
    layer, weights, real = BatchNorm(), rng.normal(size=(2, 4, 3)), np.asarray(ctx.segments) > 0
    params = layer.init(jax.random.key(0), jnp.zeros((2, 4, 3)), ctx.replace(train=False))["params"]

    def loss(params, x):
        y = layer.apply({"params": params}, x, ctx)
        return jnp.sum(jnp.where(real[..., None], y * weights, 0))

    given = jnp.asarray(np.where(real[..., None], x, np.inf), jnp.float32)
    by_params, by_x = jax.grad(loss, argnums=(0, 1))(params, given)
    for place in np.ndindex(x.shape):
        nudge = np.zeros_like(x)
        nudge[place] = 1e-5
        sides = [definition(side, real, 1, 0, 1e-5)[0][real] for side in (x + nudge, x - nudge)]
        slope = np.sum((sides[0] - sides[1]) * weights[real]) / 2e-5
        np.testing.assert_allclose(by_x[place], slope, rtol=1e-3, atol=1e-5)
    assert all((by_params[name] == 0).all() for name in RUNNING)


def test_narrow_vectors_have_wide_statistics():
    """A mean of a thousand bfloat16 that are far from zero."""
    x = (100 + jax.random.normal(jax.random.key(0), (4, 256, 2))).astype(jnp.bfloat16)
    layer, ctx = BatchNorm(dtype=jnp.bfloat16), Context(train=True)
    params = layer.init(jax.random.key(0), x, Context())["params"]
    y, sown = layer.apply({"params": params}, x, ctx, mutable=["running"])
    assert y.dtype == jnp.bfloat16 and {leaf.dtype for leaf in jax.tree.leaves((params, sown))} == {
        jnp.dtype("float32")
    }
    exact = np.asarray(x, np.float64).reshape(-1, 2)
    np.testing.assert_allclose(sown["running"]["running_mean"], 0.1 * exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(sown["running"]["running_var"], 0.9 + 0.1 * exact.var(0, ddof=1), rtol=1e-5)


# In a model


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
def test_looped_unrolled_and_rematerialised_measure_the_same():
    settings = dict(norm="batchnorm", batchnorm=dict(momentum=0.9), causal=False, mlp="none", norm_order="sandwich")
    settings |= dict(mixers=("attention", "attention"), layers=5, embed_norm="after")
    tokens, segments = jnp.arange(24).reshape(2, 12) % 20, jnp.asarray([[1] * 12, [1] * 7 + [0] * 5])
    found = []
    for scan, kept in ((True, "all"), (False, "all"), (True, "nothing")):
        model = build.build(model_config(**settings, scan=scan, kept=kept), Asked(20, n_classes=3))
        params = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens))["params"]

        def loss(params, model=model):
            (logits, _), sown = model.apply(
                {"params": params}, tokens, segments=segments, train=True, mutable=["running"]
            )
            return logits[:, 0].sum(), sown["running"]

        found.append(jax.jit(jax.grad(loss, has_aux=True))(params))
        # Two layers in a loop and one besides have two norms each; the embeddings and the end have one.
        there = running(params)
        assert by_path(found[-1][1]).keys() == there.keys() and "norm/running_mean" in there
        assert len(there) == 2 * (3 * 2 + 2)
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), other, found[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["sandwich", "post"])
def test_no_norm_of_a_model_counts_padding(order):
    """Wherever it stands, behind the rows or between their tokens, whatever tokens it has and how many."""
    settings = dict(norm="batchnorm", batchnorm=dict(momentum=0.9), causal=False, norm_order=order, embed_norm="before")
    model = build.build(model_config(**settings, layers=1, mlp="none"), Asked(20, n_classes=3))
    tokens, segments = jnp.arange(24).reshape(2, 12) % 20, jnp.asarray([[1] * 5 + [0] + [1] * 6, [1] * 7 + [0] * 5])
    params = model.init(jax.random.key(0), tokens)["params"]

    @jax.jit
    def measured(tokens, segments):
        return model.apply({"params": params}, tokens, segments=segments, train=True, mutable=["running"])

    more = jnp.where(segments > 0, tokens, 19 - tokens)
    longer = [jnp.pad(array, ((0, 0), (0, 6))) for array in (more, segments)]
    (logits, _), sown = measured(tokens, segments)
    (others, _), again = measured(*longer)
    for a, b in zip(jax.tree.leaves((logits, sown)), jax.tree.leaves((others, again)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_measures_anew_what_no_gradient_trains():
    """The first norm reads the embeddings; Adam's step and the decay would be far larger than rounding."""
    run = prepare(load(optim__lr=0.1, optim__weight_decay=1.0))
    batch = pipeline.batch_at(run.task, 0, "train", 16, 0)
    before = jax.device_get(run.init().params)
    after, _ = stepped(run)
    real = before["embed"]["embedding"][batch["inputs"]][batch["segments"] > 0].astype(np.float64)
    first = jax.tree.map(lambda x: x[0], after.params["stack"]["layers"]["block_0"]["mixer_norm"])
    assert (batch["segments"] == 0).any()
    np.testing.assert_allclose(first["running_mean"], 0.1 * real.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(first["running_var"], 0.9 + 0.1 * real.var(0, ddof=1), rtol=1e-5)
    assert run.params == sum(x.size for path, x in by_path(before).items() if path not in running(before))


def test_what_is_frozen_stays_as_it_is():
    run = prepare(load(optim__frozen="stack/.*"))
    before, after = running(run.init().params), running(stepped(run)[0].params)
    assert {path for path in before if (before[path] != after[path]).any()} == {f"norm/{name}" for name in RUNNING}


def test_a_step_that_is_not_finite_measures_nothing():
    run = prepare(load())
    batch, state = pipeline.batch_at(run.task, 0, "train", 16, 0), jax.device_get(run.init())
    for rate, moved in ((0.1, True), (np.inf, False)):
        tx = optax.sgd(rate)
        step = jax.jit(train_step(run.model, run.objective, tx, optax.constant_schedule(0.0)))
        after, sums = step(state.replace(opt_state=tx.init(state.params)), batch)
        assert bool(sums["finite"][0]) == moved
        for path, old in running(state.params).items():
            assert (by_path(after.params)[path] != old).any() == moved, path


MESHES = {
    "data": dict(mesh__data=8),
    "all": dict(mesh__data=1, mesh__fsdp=2, mesh__tensor=2, mesh__sequence=2, model__causal=True),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_eight_devices_measure_what_one_does(mesh):
    """Statistics are of the whole batch, however its rows and tokens are shared out."""
    run = prepare(load(**MESHES[mesh]))
    c, state = run.config, jax.device_get(run.init())
    many, sums = stepped(run, 2)
    tx = optim.optimizer(c.optim, c.steps, group_rules(c.model))
    step = jax.jit(train_step(run.model, run.objective, tx, optim.schedule(c.optim, c.steps)))  # knows of no mesh
    for i in range(2):
        state, alone = step(state, pipeline.batch_at(run.task, 0, "train", 16, i))
    assert len(jax.tree.leaves(many.params)[0].sharding.device_set) == 8
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(sums[key][0], alone[key][0], rtol=1e-4)
    want = running(state.params)
    for path, value in running(many.params).items():
        np.testing.assert_allclose(value, want[path], rtol=1e-3, atol=1e-5, err_msg=path)


def test_a_row_is_tested_alone_and_trained_in_company():
    run = prepare(load())
    params = jax.device_get(stepped(run, 2)[0].params)
    batch = pipeline.batch_at(run.task, 0, "test", 16, 0)

    @partial(jax.jit, static_argnums=(0, 1))
    def logits(n: int, train: bool):
        given = {key: batch[key][:n] for key in ("inputs", "segments")}
        return run.model.apply({"params": params}, **given, train=train)[0][0]

    np.testing.assert_allclose(logits(1, False), logits(16, False), rtol=1e-4, atol=1e-5)
    assert not np.allclose(logits(1, True), logits(16, True), rtol=1e-2)
    assert not np.allclose(logits(16, True), logits(16, False), rtol=1e-2)


# In a run


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A run of six steps, its folder and its row."""
    folder = tmp_path_factory.mktemp("runs") / "calm"
    return folder, loop.train(load(steps=6, checkpoint_every=3, keep=2), str(folder))


def saved(folder, step: int):
    run = prepare(load(steps=6))
    return by_path(jax.device_get(load_params(folder / "checkpoints", run.abstract.params, step)))


@pytest.mark.scale
def test_a_run_that_stops_and_goes_on_has_the_same_statistics(calm, tmp_path, monkeypatch):
    folder, row = calm
    for at in (4, None):
        monkeypatch.setattr(loop, "graceful_stop", stop_after(at))
        again = loop.train(load(steps=6, checkpoint_every=3, keep=2), str(tmp_path))
    assert again["metrics"] == row["metrics"]
    there, here = saved(folder, 6), saved(tmp_path, 6)
    for path, value in there.items():
        np.testing.assert_array_equal(here[path], value, err_msg=path)
    assert all((value != saved(folder, 3)[path]).any() for path, value in running(there).items())


def test_a_checkpoint_is_tested_with_its_statistics(calm):
    folder, row = calm
    restored = restore(str(folder), "latest")
    found = measured_again(restored, "test")["metrics"]
    assert float(found["loss"]) == row["metrics"]["test/loss"]
    fresh = running(restored.run.init().params)
    without = dataclasses.replace(restored, params=as_tree(by_path(restored.params) | fresh))
    assert float(measured_again(without, "test")["metrics"]["loss"]) != row["metrics"]["test/loss"]


def test_another_run_starts_with_them(calm):
    folder, _ = calm
    run = prepare(load(init__path=folder, init__step=3, init__fresh="classes/.*"))
    begun, there = running(begin(run, find(run)).params), saved(folder, 3)
    assert begun and all((value == there[path]).all() for path, value in begun.items())
    run = prepare(load(init__path=folder, model__norm="layernorm"))
    with pytest.raises(UserError, match=r"running_mean is .* there and not a parameter here"):
        find(run)


# Refusals


CAUSAL = (
    "model.norm 'batchnorm' has statistics of later tokens too, and a causal model .* closest: model.norm=layernorm"
)


@pytest.mark.quick
@pytest.mark.parametrize(
    "config, asked, words",
    [
        (dict(optim__accumulate=2), None, "optim.accumulate is 2, and model.norm 'batchnorm' .*; allowed: 1"),
        (
            dict(model__batchnorm__momentum=1.0),
            None,
            "model.batchnorm.momentum is 1.0; allowed: a number of at least 0",
        ),
        (dict(model__norm="layernorm", model__batchnorm__momentum=0.5), None, "unknown config key"),
        (dict(model__norm="batchnrm"), None, "model.norm is 'batchnrm'; allowed: .*; closest: batchnorm"),
        (dict(causal=True), Asked(20), CAUSAL),
        (dict(kind="encoder_decoder", causal=False), Asked(20, source=8), CAUSAL),
        (dict(kind="seq2seq", mixers=(), causal=False), Asked(20, source=8), CAUSAL),
    ],
    ids=lambda value: "" if isinstance(value, (str, Asked)) or value is None else str(value),
)
def test_what_cannot_be_is_told_in_a_line(config, asked, words):
    with pytest.raises(UserError, match=words):
        if asked is None:
            prepare(load(**config))
        else:
            build.build(model_config(norm="batchnorm", batchnorm=dict(momentum=0.9)) | config, asked)


@pytest.mark.quick
def test_other_codebases_have_no_words_for_it():
    ours = model_config(position="rope", tied=False)
    expressed(FAMILIES["llama"], ours, Asked(20))
    with pytest.raises(UserError, match=r"a llama cannot have model\.norm 'batchnorm'; allowed: 'rmsnorm'"):
        expressed(FAMILIES["llama"], ours | dict(norm="batchnorm"), Asked(20))


@pytest.mark.quick
@pytest.mark.parametrize(
    "causal, asked",
    [
        (True, Asked(20, n_classes=3)),
        (True, Asked(20, n_classes=3, labels=True)),
        (False, Asked(20)),
    ],
    ids=["class", "labels", "masked"],
)
def test_who_may_have_it(causal, asked):
    model = build.build(model_config(norm="batchnorm", batchnorm=dict(momentum=0.9), causal=causal), asked)
    assert running(nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 8), int)))["params"])
