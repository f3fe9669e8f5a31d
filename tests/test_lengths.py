"""Train short, test long: the lengths a run is tested at, and the tables across them."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from matplotlib.colors import to_hex

from configs import extrapolation
from eval.accuracy import measure
from eval.restore import restore
from experiments.running import campaign, folders
from experiments.tables import formats, plot, rows
from experiments.tables.definitions import TABLES
from experiments.tables.layout import Layout, sheet
from experiments.tables.positions import FLAT
from experiments.tables.table import layout
from model.errors import LESS_MEMORY, UserError
from tests.processes import call
from tests.processes import run as run_command
from tests.test_report import row
from train import config as configs
from train import loop, scores
from train.loop import train
from train.run import at_length, prepare

TINY = [("model.width", "16"), ("model.layers", "1"), ("data.mqar.length", "16"), ("steps", "3")]


def load(*overrides: tuple[str, str]):
    return configs.load("configs/debug.py", [*TINY, *overrides])


# From config to scores


@pytest.mark.scale
def test_scores_are_those_of_an_evaluation_at_that_length(tmp_path, capsys, monkeypatch):
    def without_room_at_24(run, length):
        other = at_length(run, length)
        return replace(other, eval_step=lambda *_: jnp.zeros(2**50, jnp.uint8)) if length == 24 else other

    monkeypatch.setattr(loop, "at_length", without_room_at_24)
    learned = [("model.position", "learned"), ("model.learned.max_len", "32")]
    config = load(*learned, ("test_lengths", "16,24,32,64"), ("eval_every", "0"))
    result = train(config, str(tmp_path))
    scores = result["metrics"]
    for length in (16, 32):
        found = measure(restore(str(tmp_path), "latest", [("data.mqar.length", str(length))]), "test")
        for metric in ("accuracy", "loss"):
            assert scores[f"test/length_{length}/{metric}"] == pytest.approx(found["metrics"][metric], rel=1e-6)
    assert scores["test/length_16/loss"] == pytest.approx(scores["test/loss"], rel=1e-6)
    assert scores["test/length_16/loss"] != pytest.approx(scores["test/length_32/loss"], rel=1e-4)
    # No entry of the table for 64, which is no reason to lose the run.
    assert result["status"] == "finished" and not any("length_64" in name for name in scores)
    told = capsys.readouterr().out
    assert "not tested at length 64: length 64 is past the learned position table of 32" in told
    # Nor is a lack of memory, but that length has failed, and is so counted though no seed was tested there.
    assert "not tested at length 24: out of memory: Out of memory allocating 1125899906842624 bytes\n" in told
    assert result["untested"] == {"24": "out of memory"} and not any("length_24" in name for name in scores)
    unfolded = rows.unfold([{**result, "run": "a", "labels": {"position": "learned"}}])
    assert [(r["labels"]["length"], rows.score(r, "test/loss") is None) for r in unfolded] == [
        (16, False),
        (24, True),
        (32, False),
    ]


def test_trivial_scores_are_those_of_each_length():
    """A mix of lengths is tested with a quarter of a row pairs, so that the longer a row, the more values it shows."""
    sizes = (("train", "((16, 2, 64),)"), ("test", "((16, 2), (32, 8))"), ("length", "32"), ("vocab_size", "64"))
    run = prepare(configs.load("configs/based_recall.py:size=smoke", [(f"data.mqar_mix.{k}", v) for k, v in sizes]))
    known = scores.baselines_at(run, {length: at_length(run, length) for length in (16, 32, 64)})
    assert {length: found["any value shown"] for length, found in known.items()} == {
        "16": 1 / 4,
        "32": 1 / 8,
        "64": 1 / 16,
    }
    assert scores.baselines_at(run, {32: run}) == {}, "its own need not be said twice"
    metrics = {f"test/length_{length}/accuracy": 0.5 for length in (16, 32, 64)}
    tested = row({"arch": "a"}, 0, 0.5, baselines=run.objective.baselines(), length_baselines=known)
    made = sheet([{**tested, "metrics": metrics}], Layout("test/accuracy", ("arch",), across="length"))
    assert [low for low, _ in made.baselines["any value shown"]] == [1 / 4, 1 / 8, 1 / 16]
    assert [low for low, _ in made.baselines["chance"]] == [1 / 32] * 3


def test_only_a_lack_of_memory_is_no_reason_to_stop():
    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: it broke")

    other = replace(at_length(prepare(load()), 32), eval_step=broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="it broke"):
        scores.at_lengths({32: other}, SimpleNamespace(params=None))


ONE_OF_TWO = "jax.jit(lambda x: (x[0], n.arange(2.0**48) + x[1]))(n.ones(2))[0]"  # begun, and then without room


@pytest.mark.parametrize("made", ["n.zeros(2**50, n.uint8)", f"fetch({ONE_OF_TWO})"])
def test_a_command_without_room_says_so_in_one_line(made):
    imports = "import jax, jax.numpy as n; from train import cli; from train.evaluate import fetch"
    program = f"{imports}; cli.run(lambda _: {made})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    told = r"error: out of memory: Out of memory allocating \d{16} bytes; "
    assert re.fullmatch(told + re.escape(LESS_MEMORY) + "\n", done.stderr)


def test_a_model_without_room_is_told_at_its_start(tmp_path):
    large = ["--config.model.layers=1048576", "--config.model.width=8192"]
    done = run_command("train", "--config=configs/debug.py", f"--workdir={tmp_path}", *large)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "out of memory" in done.stderr
    assert not (tmp_path / "config.json").exists()


def test_longer_sequences_come_in_smaller_batches_and_equal_number(book):
    run = prepare(load(("batch_size", "48"), ("eval_batches", "4"), ("data.mqar.n_pairs", "2")))
    sizes = {length: at_length(run, length).config.batch_size for length in (8, 16, 20, 32, 1024)}
    # 48 x 16 tokens, or a row for each device; of 192 examples a whole number of batches.
    assert sizes == {8: 96, 16: 48, 20: 32, 32: 24, 1024: jax.device_count()}
    for length, size in sizes.items():
        other = at_length(run, length)
        assert other.task.length == length and other.config.eval_batches * size == 4 * 48
    assert run.config.batch_size == 48 and run.task.length == run.config.data.mqar.length == 16

    text = [("data.task", "text"), ("data.text.path", str(book)), ("data.text.length", "16"), ("eval_batches", "0")]
    whole = at_length(prepare(configs.load("configs/debug.py", [*TINY[:2], *text])), 32).config
    assert (whole.batch_size, whole.eval_batches) == (8, 0)  # half of 16


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([("test_lengths", "32,33")], r"test_lengths has 33: .*allowed: .*even"),
        ([("test_lengths", "long")], r"test_lengths is \('long',\); allowed: a tuple, each item a whole number from 1"),
        ([("test_lengths", "18"), ("mesh.sequence", "4")], r"test_lengths has 18: length 18 does not divide over mesh"),
    ],
)
def test_bad_lengths_are_told_before_training(overrides, told, tmp_path):
    with pytest.raises(UserError, match=told) as error:
        train(load(*overrides), str(tmp_path / "run"))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_text_too_short_for_a_length_is_told_before_training(book, tmp_path):
    text = [("data.task", "text"), ("data.text.path", str(book)), ("data.text.length", "16")]
    config = configs.load("configs/debug.py", [*TINY[:2], *text, ("test_lengths", "32,4096")])
    with pytest.raises(UserError, match=r"test_lengths has 4096: .*has only 3,000 bytes"):
        train(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", extrapolation.LENGTHS)
@pytest.mark.parametrize("task", extrapolation.LENGTHS["small"])
def test_every_length_of_the_config_can_be_tested(task, size):
    config = configs.load(f"configs/extrapolation.py:task={task},position=learned,size={size}")
    run = prepare(config)
    length, longest = extrapolation.LENGTHS[size][task]
    assert run.task.length == config.test_lengths[0] == config.model.learned.max_len == length
    assert [at_length(run, n).task.length for n in config.test_lengths] == list(config.test_lengths)
    assert config.test_lengths[-1] == longest


# From scores to tables


def scored(position: str, seed: int, scores: dict[int, float] | None) -> dict:
    """A row tested at these lengths; None: the run failed."""
    made = row({"position": position}, seed, None if scores is None else 0.5, length=16)
    made["metrics"] |= {f"test/length_{length}/accuracy": value for length, value in (scores or {}).items()}
    return made


@pytest.fixture
def short():
    """Lengths out of order, one position that ends at the training length, and a failed seed of each."""
    made = [scored("rope", 0, {1024: 0.2, 16: 1.0, 128: 0.4}), scored("rope", 1, {1024: 0.4, 16: 0.8, 128: 0.4})]
    made += [scored("rope", 2, None), scored("learned", 0, {16: 0.7}), scored("learned", 1, None)]
    return made


@pytest.mark.quick
def test_a_row_unfolds_into_one_for_each_length(short):
    unfolded = rows.unfold(short)
    assert [(r["run"], r["labels"]["length"], r["metrics"].get("test/accuracy")) for r in unfolded] == [
        ("position=rope,seed=0", 16, 1.0),
        ("position=rope,seed=0", 128, 0.4),
        ("position=rope,seed=0", 1024, 0.2),
        ("position=rope,seed=1", 16, 0.8),
        ("position=rope,seed=1", 128, 0.4),
        ("position=rope,seed=1", 1024, 0.4),
        ("position=rope,seed=2", 16, None),
        ("position=rope,seed=2", 128, None),
        ("position=rope,seed=2", 1024, None),
        ("position=learned,seed=0", 16, 0.7),
        ("position=learned,seed=1", 16, None),
    ]
    assert unfolded[0]["metrics"] == {"validation/accuracy": 0.5, "test/accuracy": 1.0}
    assert "length" not in short[0]["labels"] and "test/length_16/accuracy" in short[0]["metrics"]
    never = [row({"position": "rope"}, 0, 0.5)]
    assert rows.unfold(never) == never
    assert {r["labels"]["length"] for r in rows.unfold([*short, scored("alibi", 0, None)])[-3:]} == {16, 128, 1024}


@pytest.mark.quick
def test_a_table_across_lengths(short):
    table = sheet(short, Layout("test/accuracy", ("position",), "length", order={"position": ["rope"]}))
    assert table.columns == (16, 128, 1024)
    shown = formats.arrange(table)
    assert shown.header[:5] == ["position", "length 16", "length 128", "length 1024", "failed seeds"]
    assert [line[:5] for line in shown.body[:2]] == [
        ["rope", "90.0 ± 14.1 (1 failed)", "40.0 ± 0.0 (1 failed)", "30.0 ± 14.1 (1 failed)", "1 of 3"],
        ["learned", "70.0 (1 failed)", "", "", "1 of 2"],
    ]
    assert "Trained at length 16; blank: a length that the model cannot place. 5 runs" in shown.notes[0]
    with pytest.raises(UserError, match="unknown label 'length'; the rows have position"):
        sheet([row({"position": "rope"}, 0, 0.5)], Layout("test/accuracy", ("position",), "length"))
    own = [scored("rope", 0, {32: 0.1}) | {"labels": {"length": length}} for length in (8, 16)]
    assert sheet(own, Layout("test/accuracy", ("length",))).lines.keys() == {(8,), (16,)}


def test_many_lines_in_a_picture_all_look_different(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plot.plt, "close", kept.append)
    made = [scored(f"p{i}", seed, {16: 0.9, 32: i / 14, 256: 0.1}) for i in range(14) for seed in (0, 1)]
    plot.plot(sheet(made, Layout("test/accuracy", ("position",), "length")), tmp_path / "plot.png")
    (axis,) = kept[0].axes
    drawn = [line for line in axis.lines if line.get_marker() in plot.MARKERS]
    assert [list(line.get_xdata()) for line in drawn] == [[16, 32, 256]] * 14
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in drawn}) == 14
    assert axis.get_xscale() == "log" and axis.get_xlabel() == "length"
    assert [text.get_text() for text in axis.texts] == ["trained", "chance"]
    assert [list(line.get_ydata()) for line in axis.lines if line.get_color() == plot.GREY][1:] == [[0.1, 0.1]]
    for one in made:
        one["length_baselines"] = {"32": {"chance": 0.2}}
    plot.plot(sheet(made, Layout("test/accuracy", ("position",), "length")), tmp_path / "plot.png")
    (axis,) = kept[1].axes
    assert [list(line.get_ydata()) for line in axis.lines if line.get_color() == plot.GREY][1:] == [[0.1, 0.2, 0.1]]


@pytest.mark.quick
def test_published_numbers_stand_at_the_same_multiple_of_the_training_length():
    for scale, twice in (("small", "128"), ("smoke", "32")):
        shown = layout(TABLES["positions"], scale)
        assert shown.published["rope", twice].value == 0.836
        assert shown.published["xpos", twice].value == 0.996
    for name in ("positions", "positions_text"):
        assert layout(TABLES[name], "small").order["position"] == FLAT


def test_the_commands_print_the_table(tmp_path):
    """Every run has its result already, so nothing is trained."""
    asked = [replace(run, overrides={**run.overrides, "steps": 7}) for run in TABLES["positions"].runs("smoke")]
    planned = campaign.plan(asked, tmp_path)
    assert len(planned) == 2 * len(FLAT)
    for name, item in planned.items():
        folders.claim(tmp_path / name, item.run, item.config_hash)
        made = scored(item.run.labels["position"], item.run.overrides["seed"], {16: 0.9, 128: 0.25, 32: 0.5})
        folders.write_json(tmp_path / name / "result.json", made | {"config_hash": item.config_hash})
    code, printed, told = call(
        "experiments.reproduce", "positions", "--scale=smoke", "--config.steps=7", f"--out={tmp_path}"
    )
    assert code == 0, told
    assert "tested on long (scale smoke), steps=7" in printed
    for words in ("length 16", "25.0 ± 0.0", "83.6 [1]", "Trained at length 16", "plot.png"):
        assert words in printed
    out = f"--out={tmp_path / 'again'}"
    code, again, told = call("experiments.report", f"--dir={tmp_path}", "--across=length", out)
    assert code == 0, told
    assert "50.0 ± 0.0" in again and "length 128" in again
