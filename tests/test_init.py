"""Starting from weights: what is taken, what stays fresh or frozen, what does not fit, and where it came from."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from data import pipeline
from eval.export import exported
from eval.restore import restore
from model.errors import UserError
from model.paths import by_path
from tests.test_train import load
from train import config as configs
from train import sharding
from train.checkpoint import load_params
from train.feed import Feed
from train.log import read_metrics
from train.loop import train
from train.run import prepare
from train.start import begin, find

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SHORT = [("steps", "4"), ("checkpoint_every", "2"), ("eval_every", "2"), ("eval_batches", "1"), ("model.layers", "3")]
SHORT += [("model.position", "rope"), ("model.attention.n_heads", "2"), ("optim.warmup", "0")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "source"
    train(load(*SHORT), str(folder))
    return folder


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    """Its weights, as a Llama's."""
    out = tmp_path_factory.mktemp("weights") / "llama"
    exported(restore(str(source), "latest"), out=str(out), family="llama")
    return out


def started(*overrides):
    """The parameters before the first step."""
    run = prepare(load(*SHORT, *overrides))
    return by_path(jax.device_get(begin(run, find(run)).params))


def parameters(workdir, step: int):
    run = prepare(load(*SHORT))
    return by_path(jax.device_get(load_params(workdir / "checkpoints", run.abstract.params, step)))


def assert_same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


@pytest.mark.scale
def test_a_run_starts_from_anothers_parameters(source):
    for step in (2, 4):
        assert_same(started(("init.path", str(source)), ("init.step", str(step))), parameters(source, step))
    assert_same(started(("init.path", str(source))), parameters(source, 4))
    mesh = [("mesh.data", "2"), ("mesh.fsdp", "2"), ("mesh.tensor", "2")]
    assert_same(started(("init.path", str(source)), *mesh), parameters(source, 4))


@pytest.mark.scale
def test_a_run_starts_from_a_folder_of_safetensors(source, folder):
    assert_same(started(("init.path", str(folder))), parameters(source, 4))
    mesh = [("mesh.data", "2"), ("mesh.fsdp", "2"), ("mesh.tensor", "2")]
    assert_same(started(("init.path", str(folder)), *mesh), parameters(source, 4))
    # Three layers as one and a half times a cycle of two lie in other arrays, and are the same layers.
    cycle = [("model.mixers", "attention,attention")]
    for path, value in started(("init.path", str(folder)), *cycle).items():
        if path.startswith("stack/"):
            _, room, block, rest = path.split("/", 3)
            whole = parameters(source, 4)[f"stack/layers/block_0/{rest}"]
            at = int(block.removeprefix("block_"))
            np.testing.assert_array_equal(value, whole[at::2][:1] if room == "layers" else whole[2])


def test_another_model_in_the_same_shapes_is_told(folder, capsys):
    started(("init.path", str(folder)), ("model.rope.theta", "5000"))
    assert "note: layer 0's rope.theta is 5000.0, and 10000.0 in" in capsys.readouterr().out


FRESH = "stack/.*/mlp/.*"


@pytest.mark.parametrize("kind", ["run", "safetensors"])
def test_parts_that_are_named_stay_fresh(source, folder, kind):
    path = ("init.path", str(source if kind == "run" else folder))
    drawn, given = started(), parameters(source, 4)
    found = started(path, ("init.fresh", FRESH))
    for name, value in found.items():
        np.testing.assert_array_equal(value, (drawn if "/mlp/" in name else given)[name], err_msg=name)


@pytest.mark.parametrize("kind", ["run", "safetensors"])
@pytest.mark.parametrize(
    "changes,words",
    [
        ([("model.mlp_width", "32")], "stack/layers/block_0/mlp/down/kernel is "),
        ([("model.layers", "2")], "there and"),
        ([("model.tied", "False")], "unembed/kernel is absent"),
        ([("model.mlp", "none")], "stack/layers/block_0/mlp.* is .* there and not a parameter here"),
        ([("data.mqar.vocab_size", "80")], "embed/embedding is "),
        ([("init.fresh", "stack/layers/block_0/mlp/dwn/kernel")], "closest: stack/layers/block_0/mlp/down/kernel"),
        ([("init.fresh", "stack(")], "no regular expression"),
    ],
)
def test_what_does_not_fit_is_named(source, folder, kind, changes, words):
    run = prepare(load(*SHORT, ("init.path", str(source if kind == "run" else folder)), *changes))
    with pytest.raises(UserError, match=words) as error:
        find(run)
    assert "\n" not in str(error.value)


def test_what_is_not_there_is_told(source, folder, tmp_path):
    for path, words in [
        (f"{source}s", "does not exist; closest: source"),
        (str(folder / "config.json"), "is a file"),
        (str(tmp_path), "no weights in"),
    ]:
        with pytest.raises(UserError, match=words):
            train(load(*SHORT, ("init.path", path)), str(tmp_path / "run"))
    for change in (("init.step", "best"), ("init.fresh", "embed/.*")):
        with pytest.raises(UserError, match=r"init\.path is empty; .*; closest: --config\.init\.path=FOLDER of"):
            train(load(*SHORT, change), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"no step '3' in .*; closest: 2"):
        train(load(*SHORT, ("init.path", str(source)), ("init.step", "3")), str(tmp_path / "run"))
    with pytest.raises(UserError, match="is no run; allowed: latest"):
        train(load(*SHORT, ("init.path", str(folder)), ("init.step", "3")), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_config_that_goes_on_takes_the_model_and_of_a_run_the_task(source, folder, tmp_path):
    def given(spec):
        return configs.load(f"configs/finetune.py:{spec}", [])

    assert given(f"path={source}").data == load(*SHORT).data
    assert given(f"path={source},task=induction").data.task == "induction"
    for found in (given(f"path={source},step=2"), given(f"path={folder},task=induction")):
        assert found.model.layers == 3 and found.model.width == load(*SHORT).model.width
    damaged = tmp_path / "damaged"
    (damaged / "checkpoints").mkdir(parents=True)
    (damaged / "config.json").write_text("{}")
    for spec, words in [
        (f"path={folder}", f"weights in {folder} come without a task; e.g. path={folder},task=text"),
        (f"path={tmp_path / 'none'}", "it does not exist"),
        (f"path={damaged}", f"{damaged}/config.json is damaged: it has no 'model'"),
    ]:
        with pytest.raises(UserError, match=words) as error:
            given(spec)
        assert "\n" not in str(error.value)


@pytest.mark.scale
def test_a_run_says_where_it_came_from_and_needs_it_no_more(source, tmp_path, monkeypatch):
    copy = shutil.copytree(source, tmp_path / "source")
    own = [("init.path", str(copy)), ("init.step", "best"), ("init.fresh", FRESH)]
    straight = train(load(*SHORT, *own), str(tmp_path / "straight"))
    origin = straight["init"]
    assert origin["path"] == str(copy) and len(origin["sha256"]) == 64
    assert origin["fresh"] == sorted(name for name in started() if "/mlp/" in name)
    assert json.loads((tmp_path / "straight" / "init.json").read_text()) == origin
    assert train(load(*SHORT), str(tmp_path / "drawn"))["init"] is None

    # Stopped before its first own checkpoint, and its source gone.
    monkeypatch.setattr(Feed, "__next__", stopping(Feed.__next__))
    assert train(load(*SHORT, *own, ("checkpoint_every", "4")), str(tmp_path / "stopped")) is None
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "00000001")
    shutil.rmtree(copy)
    resumed = train(load(*SHORT, *own, ("checkpoint_every", "4")), str(tmp_path / "stopped"))
    assert resumed["init"] == origin
    assert_same(parameters(tmp_path / "stopped", 4), parameters(tmp_path / "straight", 4))
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("stopped", "straight")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize("kind", ["run", "safetensors"])
def test_a_finished_run_asks_for_its_source_no_more(source, folder, kind, tmp_path, capsys):
    """Though its checkpoints are gone too, as from a pack."""
    copy = shutil.copytree(source if kind == "run" else folder, tmp_path / "source")
    row = train(load(*SHORT, ("init.path", str(copy))), str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.rmtree(copy)
    assert train(load(*SHORT, ("init.path", str(copy))), str(tmp_path / "run")) == row
    assert "finished already" in capsys.readouterr().out


def stopping(following):
    """SIGTERM with every batch."""

    def after(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return following(self)

    return after


def stepped(*overrides, steps: int = 2):
    """The state before and after, and the metrics of the last step."""
    run = prepare(load(*SHORT, *overrides))
    state = run.init()
    before = by_path(jax.device_get(state.params))
    for step in range(steps):
        batch = pipeline.Batch(run.task, 0, "train", run.config.batch_size, step)
        state, sums = run.train_step(state, sharding.put_batch(batch, run.batch_sharding))
    return before, state, jax.device_get(sums)


FROZEN = ("optim.frozen", r"embed/.*,stack/.*/mixer/.*")


def is_frozen(path: str) -> bool:
    return path.startswith("embed/") or "/mixer/" in path


@pytest.mark.few(1)
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_frozen_parameters_are_not_trained_and_take_no_room(accumulate):
    before, state, _ = stepped(FROZEN, ("optim.accumulate", accumulate))
    for path, value in by_path(jax.device_get(state.params)).items():
        assert np.array_equal(value, before[path]) == is_frozen(path), path
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert moments == 2 * sum(x.size for path, x in before.items() if not is_frozen(path))


def test_the_norm_of_gradients_is_of_those_that_are_trained():
    _, _, whole = stepped(steps=1)
    _, _, part = stepped(FROZEN, steps=1)
    assert 0 < part["grad_norm"][0] < 0.9 * whole["grad_norm"][0]
    assert whole["loss"] == part["loss"]


def test_patterns_of_frozen_parameters_must_mean_something():
    for pattern, words in [("embed", "closest: embed/embedding"), (".*", "leave one to be trained"), ("(", "regular")]:
        with pytest.raises(UserError, match=words):
            prepare(load(*SHORT, ("optim.frozen", pattern)))
