"""The tables of language: equal sizes, the usual split, and runs that begin where another ended."""

from pathlib import Path

import jax
import numpy as np
import pytest

from configs import enwik8, extension, sinks
from data.text import Text
from eval.restore import restore
from experiments.running import campaign
from experiments.running.runs import RunSpec, command
from experiments.tables import rows
from experiments.tables.definitions import TABLES
from experiments.tables.language import caches, heads, longer
from model.errors import UserError
from train import config as configs
from train.loop import train
from train.run import prepare

TINY = [("model.width", "16"), ("model.layers", "1"), ("steps", "2"), ("batch_size", "8"), ("eval_batches", "1")]


def test_the_split_of_enwik8_is_the_usual_one(book):
    assert Text(path=str(book), length=16).spans(100_000_000) == {
        "train": (0, 90_000_000),
        "validation": (90_000_000, 5_000_000),
        "test": (95_000_000, 5_000_000),
    }


def test_small_caches_are_not_small_models(book):
    """All have as many parameters, within 1 %, and a head less is as many bytes of state less."""
    found = {}
    for run in heads("small"):
        if run.overrides["seed"]:
            continue
        made = prepare(configs.load(run.config, [("data.text.path", str(book)), ("data.text.length", "16")]))
        found[tuple(run.labels.values())] = made.params, made.model.state_bytes(1000)
    params, state = zip(*found.values(), strict=True)
    assert max(params) <= 1.01 * min(params)
    by_heads = [size for (keys, _), (_, size) in found.items() if keys == "heads"]
    assert by_heads == sorted(by_heads, reverse=True) and by_heads[0] - by_heads[1] == 2 * (by_heads[1] - by_heads[2])
    assert min(state) == found["latent", 64][1]


@pytest.mark.quick
@pytest.mark.parametrize("size", enwik8.SIZES)
@pytest.mark.parametrize(("keys", "most"), [("heads", "heads"), ("latent", "width")])
def test_a_cache_is_no_larger_than_what_is_in_it(keys, most, size, book):
    most = enwik8.SIZES[size][most]
    text = [("data.text.path", str(book)), ("data.text.length", "16"), ("batch_size", "8")]
    prepare(configs.load(f"configs/heads.py:keys={keys},n={most},size={size}", text))
    says = dict(heads="unknown n {}; choose from 1, 2, ", latent="argument n is {}; allowed: 1 to .* ")[keys]
    for n, near in ((0, 1), (most + 1, most), (100_000, most)):
        with pytest.raises(UserError, match=rf"{says.format(n)}.*; closest: {near}$"):
            configs.load(f"configs/heads.py:keys={keys},n={n},size={size}")


@pytest.mark.quick
def test_key_value_heads_that_do_not_divide_the_heads_are_no_choice():
    with pytest.raises(UserError, match="unknown n 3; choose from 1, 2, 4, 8; closest: "):
        configs.load("configs/heads.py:n=3")


@pytest.mark.quick
@pytest.mark.parametrize("scale", ["smoke", "small"])
@pytest.mark.parametrize(("table", "runs"), [("sinks", caches), ("extension", longer)])
def test_one_run_is_trained_and_the_others_begin_with_it(table, runs, scale):
    out = Path("out")
    planned = campaign.plan(runs(scale), out)
    first = [name for name, item in planned.items() if not item.run.source_name]
    assert first == [name for name, item in planned.items() if item.run.labels == runs(scale)[0].labels]
    for name, item in planned.items():
        words = command(item.run, out / name)
        seed = item.run.overrides["seed"]
        source = next(other for other in first if planned[other].run.overrides["seed"] == seed)
        assert (f"--config.init.path={out / source}" in words) == (name not in first)
        c = configs.load(item.run.config)
        if name in first:
            assert c.steps > 100
        elif item.run.labels.get("tuned") == "yes":
            assert c.data.text.length == extension.FACTOR * extension.SIZES[scale][0] and c.optim.lr > 0
        else:
            assert (c.steps, c.optim.lr) == (1, 0.0)


@pytest.mark.quick
def test_a_source_that_no_run_is_called_by_is_a_mistake():
    lost = [RunSpec("configs/debug.py", {"seed": 0}, {"a": 1}, source={"a": 2})]
    with pytest.raises(ValueError, match="parameters of a=2,seed=0, and no run is called so"):
        campaign.plan(lost, Path("out"))


@pytest.mark.quick
def test_caches_of_one_size():
    for n in (0, 1, 8):
        c = sinks.get_config(f"cache={n},size=smoke")
        assert (c.model.attention.window + n, c.model.attention.get("sink_tokens", 0)) == (64, n)
    assert sinks.get_config("cache=recompute,size=smoke").stream.recompute == 64
    with pytest.raises(UserError, match="allowed: all, recompute, or how many first bytes, below 64"):
        sinks.get_config("cache=64,size=smoke")
    for cache, near in (("1000", "63"), ("recomput", "recompute")):
        with pytest.raises(UserError, match=f"cache is '{cache}'; allowed: .*, below 64; closest: {near}$"):
            sinks.get_config(f"cache={cache},size=smoke")


@pytest.mark.scale
@pytest.mark.usefixtures("quickly_compiled")
def test_a_run_that_is_only_tested_has_the_parameters_it_began_with(book, tmp_path):
    """And, asked the same, the scores of the run that trained them; asked otherwise, others."""
    text = [*TINY, ("data.text.path", str(book)), ("data.text.length", "16"), ("stream.length", "64")]
    source, same, other = (tmp_path / name for name in ("source", "same", "other"))
    trained = train(configs.load("configs/sinks.py:cache=all,size=smoke", text), str(source))
    text = [pair for pair in text if pair[0] != "steps"] + [("init.path", str(source))]
    again = configs.load("configs/sinks.py:cache=2,size=smoke", [*text, ("model.attention.window", "62")])
    tested = train(again, str(same))
    narrow = configs.load("configs/sinks.py:cache=2,size=smoke", [*text, ("model.attention.window", "4")])
    narrowed = train(narrow, str(other))
    jax.tree.map(
        np.testing.assert_array_equal, restore(str(same), "latest").params, restore(str(source), "latest").params
    )
    for name in ("test/bits_per_byte", "test/stream_bits_per_byte", "test/length_32/stream_bits_per_byte"):
        assert tested["metrics"][name] == pytest.approx(trained["metrics"][name], rel=1e-5)
    assert narrowed["metrics"]["test/stream_bits_per_byte"] != pytest.approx(
        trained["metrics"]["test/stream_bits_per_byte"], rel=1e-5
    )
    assert narrowed["state_bytes"] < trained["state_bytes"]
    unfolded = rows.unfold([{**tested, "run": "a", "labels": {}}])
    assert [row["labels"]["length"] for row in unfolded] == [16, 32, 64]
    assert all("test/stream_bits_per_byte" in row["metrics"] for row in unfolded)


@pytest.mark.quick
def test_fewer_bits_are_better():
    made = [
        {"run": name, "status": "finished", "labels": {"lr": lr}, "metrics": {"validation/bits_per_byte": bits}}
        for name, lr, bits in (("a", 1, 2.5), ("b", 2, 1.5))
    ]
    assert [row["run"] for row in rows.best(made, ["lr"], "test/bits_per_byte")] == ["b"]
    assert all(TABLES[name].metric.endswith("bits_per_byte") for name in ("enwik8", "heads", "sinks", "extension"))
