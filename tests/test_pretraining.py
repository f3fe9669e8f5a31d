"""Self-pretraining: a task's own inputs first, then the task from those parameters."""

import re

import jax
import numpy as np
import pytest

from configs import pretraining
from data import build
from data.pipeline import batch_at
from experiments.running import campaign
from experiments.tables.definitions import TABLES
from experiments.tables.table import with_a_place
from model.errors import UserError
from model.paths import by_path
from tests import sets
from train import config as configs
from train.checkpoint import load_params
from train.loop import train
from train.objectives import OBJECTIVES
from train.run import prepare

SHORT = {"length": 40, "max_depth": 5, "min_length": 8, "max_length": 40}
TINY = {"steps": 2, "batch_size": 8, "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1, "model.width": 16}


@pytest.fixture(scope="module")
def rows():
    task = build("listops", SHORT)
    return task, batch_at(task, 0, "validation", 6, 0)


def test_the_next_token_is_asked_wherever_there_is_one(rows):
    task, batch = rows
    seen = OBJECTIVES["next_token"](task).view(batch, None)
    for tokens, segments, targets, weights in zip(
        batch["inputs"], batch["segments"], seen["targets"], seen["weights"], strict=True
    ):
        n = int(segments.sum())
        assert 8 < n <= 40 and np.array_equal(weights, np.arange(40) < n - 1)
        assert np.array_equal(targets[: n - 1], tokens[1:n])


def test_rows_past_the_end_of_a_split_are_not_asked(rows):
    task, batch = rows
    past = batch | {"weights": batch["weights"] * (np.arange(6) < 4)}
    for kind in ("next_token", "masked"):
        counts = np.asarray(OBJECTIVES[kind](task).view(past, jax.random.key(0))["weights"]).sum(1)
        assert (counts[:4] > 0).all() and not counts[4:].any()


def test_masked_tokens_are_real_ones_and_were_there(rows):
    task, batch = rows
    seen = jax.device_get(OBJECTIVES["masked"](task, rate=0.3).view(batch, jax.random.key(0)))
    at, counts = seen["at"], seen["weights"] > 0
    assert np.array_equal(np.take_along_axis(batch["inputs"], at, 1)[counts], seen["targets"][counts])
    assert (np.take_along_axis(batch["segments"], at, 1)[counts] == 1).all()
    assert seen["inputs"].max() == task.vocab_size and not any(name.startswith("attr_") for name in seen)


def test_objectives_of_rows_ask_for_tokens_and_know_chance(rows):
    task, _ = rows
    for kind, extra in (("next_token", 0), ("masked", 1)):
        objective = OBJECTIVES[kind](task)
        assert not objective.asked.n_classes and objective.asked.vocab_size == task.vocab_size + extra
        assert objective.baselines() == {"chance": 1 / task.vocab_size} and not objective.attributes


@pytest.mark.parametrize("kind", ["next_token", "span_corruption", "prefix_lm"])
def test_what_has_no_rows_of_tokens_is_refused(kind):
    with pytest.raises(UserError, match=f"objective '{kind}' needs running text, and task 'mqar' has none"):
        OBJECTIVES[kind](build("mqar", {}))


def test_a_text_asks_for_the_next_token_itself(book):
    with pytest.raises(UserError, match=r"asks for the next token itself; closest: objective\.kind=task"):
        OBJECTIVES["next_token"](build("text", {"path": str(book), "length": 16}))


def test_a_row_of_one_token_has_no_next():
    with pytest.raises(UserError, match=r"rows of task 'majority' have 1; closest: data.majority.length=2"):
        OBJECTIVES["next_token"](build("majority", {"length": 1}))


def settings(start: str, **changes) -> configs.ConfigDict:
    found = {f"data.listops.{key}": value for key, value in SHORT.items()} | TINY | changes
    spec = f"configs/lra.py:task=listops,arch=attention,size=smoke,start={start}"
    return configs.load(spec, [(key, str(value)) for key, value in found.items()])


def test_a_model_that_sees_the_next_token_is_refused():
    with pytest.raises(UserError, match=r"this model sees it; closest: model\.causal=True"):
        prepare(settings("pretrain_causal", **{"model.causal": False}))


@pytest.mark.parametrize(
    "spec, kinds",
    [
        ("configs/listops.py:size=short,arch=attention", ("masked", "next_token")),
        ("configs/seqimage.py:task=smnist,protocol=lra,arch=attention", ("masked", "next_token")),
        ("configs/seqimage.py:task=smnist,arch=attention", ("masked_values",)),
    ],
)
def test_other_benchmarks_begin_with_their_inputs_too(spec, kinds, tmp_path):
    sets.write(tmp_path)
    digits = {"data.smnist.root": str(tmp_path), "data.smnist.n_validation": "20"} if "seqimage" in spec else {}
    few = {"eval_batches": "1", "batch_size": "8"}
    for kind, how in zip(kinds, ("masked", "causal"), strict=False):
        runs = [
            prepare(configs.load(f"{spec},start={part}_{how}", {**digits, **few}.items()))
            for part in ("pretrain", "from")
        ]
        assert [run.config.objective.kind for run in runs] == [kind, "task"]
        assert {run.config.model.causal for run in runs} == {how == "causal"}
        first, then = (by_path(run.abstract.params) for run in runs)
        taken = [path for path in then if not any(re.fullmatch(p, path) for p in runs[1].config.init.fresh)]
        assert taken and all(first[path].shape == then[path].shape for path in taken)


@pytest.mark.parametrize("spec", ["configs/seqimage.py:task=scifar", "configs/lra.py:task=image,protocol=s4"])
@pytest.mark.parametrize("part", ["pretrain", "from"])
def test_real_numbers_have_no_next_token(spec, part):
    with pytest.raises(UserError, match=f"protocol=lra.*closest: {part}_masked"):
        configs.load(f"{spec},start={part}_causal")


@pytest.mark.parametrize("task", ["retrieval", "links"])
@pytest.mark.parametrize("start", pretraining.STARTS[1:])
def test_pairs_are_only_learned_from_scratch(task, start):
    with pytest.raises(UserError, match=f"start is '{start}', and data.task=.* reads pairs; allowed: start=scratch"):
        configs.load(f"configs/lra.py:task={task},start={start}")
    configs.load(f"configs/lra.py:task={task},start=scratch")


def test_an_unknown_start_is_named():
    with pytest.raises(UserError, match=r"'from_mask'.*closest: from_masked"):
        settings("from_mask")


@pytest.mark.scale
@pytest.mark.parametrize("how", ["masked", "causal"])
def test_a_task_begins_with_what_its_inputs_taught(how, tmp_path):
    first, then = tmp_path / "first", tmp_path / "then"
    train(settings(f"pretrain_{how}"), str(first))
    c = settings(f"from_{how}", **{"init.path": first, "steps": 1, "optim.lr": 0.0})
    assert train(c, str(then))["init"]["step"] == 2
    run = prepare(c)
    taught = load_params(first / "checkpoints", prepared(first), 2)
    begun = load_params(then / "checkpoints", run.abstract.params, 1)
    assert begun.keys() == taught.keys() | {"classes"}
    for name in taught:
        jax.tree.map(np.testing.assert_array_equal, taught[name], begun[name])


def prepared(folder):
    """The shapes of a run's parameters."""
    return prepare(configs.load(str(folder / "config.json"))).abstract.params


def test_a_recipe_whose_norms_are_over_the_batch_can_begin_causally():
    """With norms of its layers: others would tell of the tokens that it is asked for."""
    norms = {}
    for start in ("scratch", "pretrain_causal", "from_causal"):
        config = configs.load(f"configs/lra.py:task=listops,arch=s4d,size=paper,start={start}", [("batch_size", "8")])
        prepare(config)
        norms[start] = config.model.norm
    assert norms == dict(scratch="batchnorm", pretrain_causal="layernorm", from_causal="layernorm")


def test_a_class_is_read_off_what_both_runs_have():
    """LRA's Transformer reads it off a vector in front, which a causal model would not show the others."""
    spec = "configs/lra.py:task=listops,arch=attention,size=paper"
    assert [configs.load(f"{spec},start={start}").model.pool for start in pretraining.STARTS] == ["cls"] + ["mean"] * 4


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_a_table_shows_the_task_and_not_what_came_before(scale, tmp_path):
    table = TABLES["self_pretraining"]
    rows = [
        {"run": name, "labels": dict(item.run.labels), "begins": item.run.source_name, "config": item.run.config}
        for name, item in campaign.plan(table.runs(scale), tmp_path).items()
    ]
    shown = with_a_place(table, rows)
    assert {row["labels"]["start"] for row in shown} == {"scratch", "masked", "causal"}
    assert {row["run"] for row in rows} - {row["run"] for row in shown} == {row["begins"] for row in shown} - {""}
    for row in shown:
        way = row["labels"]["start"]
        assert row["config"].endswith("scratch" if way == "scratch" else f"from_{way}")
        assert way == "scratch" or f"start={way}" in row["begins"]


def test_all_runs_of_other_tables_have_a_place():
    for name, table in TABLES.items():
        rows = [{"labels": run.labels} for run in table.runs("smoke")]
        assert name == "self_pretraining" or with_a_place(table, rows) == rows
