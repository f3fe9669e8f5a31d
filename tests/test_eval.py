"""The eval room: exact generation, exact sampling, and numbers that agree with the run they come from."""

import functools
import json
import math
import re
import shutil
import socket
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import archs, base
from data import build as build_task
from eval import generate as generation
from eval.accuracy import by_bin, measure
from eval.continuation import continuation, decode, encode
from eval.generate import check, generate, pad
from eval.report import finite
from eval.restore import choose_step, restore
from eval.sample import Sampling, sample
from eval.suites import SUITES
from model import build, entries
from model.asked import Asked
from model.errors import UserError
from tests import zoo
from tests.processes import fork
from train import config as configs
from train import log
from train.loop import train
from train.workdir import open_workdir, read_json

ROOT = Path(__file__).parent.parent
V, P, N, L = 13, 5, 8, 16  # vocabulary, prompt, new tokens, length of the pass from scratch
GREEDY = Sampling(temperature=0)
KEY = jax.random.key(7)
pytestmark = pytest.mark.usefixtures("quickly_compiled")


@functools.cache
def tiny(mixers: tuple[str, ...], position: str):
    """A small model and parameters made by hand, which spares a compilation each.

    Untied, with loud mixers and slow clocks, so that what it says depends on all it has read.
    """
    section = base.get_config().model.to_dict() | entries.sections(mixers, position)
    section |= {"mixers": mixers, "position": position, "width": 16, "mlp_width": 16, "tied": False}
    section["layers"] = max(2, len(mixers))
    section |= {"learned": {"max_len": L}} | zoo.PLACES
    model = build.build(section, Asked(V))
    rng = np.random.default_rng(0)

    def filled(path, leaf):
        *place, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        shift = {"log_dt": -3, "dt_bias": -3, "scale": 1}.get(name, 0)
        scale = 1 if name in ("embedding", "table") or ("mixer" in place and name == "kernel") else 0.3
        return jnp.asarray(shift + scale * rng.standard_normal(leaf.shape), leaf.dtype)

    shapes = jax.eval_shape(lambda: model.init(KEY, jnp.zeros((1, 2), jnp.int32))["params"])
    return model, jax.tree_util.tree_map_with_path(filled, nn.unbox(shapes))


@functools.partial(jax.jit, static_argnames="model")
def from_scratch(model, params, tokens, at):
    return model.apply({"params": params}, tokens, at=at)[0][:, 0]


def without_state(model, params, prompts, sampling) -> np.ndarray:
    """The definition of generation, [N, B]: every token from a new pass over all the tokens before it.

    Rows are as long as they will ever be; what a causal model does not see yet may stand there.
    """
    rows = np.zeros((len(prompts), L), np.int32)
    ends = np.array([len(prompt) for prompt in prompts])
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    made = []
    for i in range(N):
        logits = from_scratch(model, params, rows, (ends - 1)[:, None])
        chosen = sample(jax.random.fold_in(KEY, i), logits, sampling.temperature, sampling.top_k, sampling.top_p)
        rows[np.arange(len(rows)), ends] = chosen
        made.append(np.asarray(chosen))
        ends = ends + 1
    return np.stack(made)


PROMPTS = np.random.default_rng(0).integers(0, V, (6, P)).astype(np.int32)


# --- generation ---


@pytest.mark.few(3)
@pytest.mark.parametrize(("mixer", "position"), [pair for pair in zoo.PAIRS if pair[0] in zoo.AT_ONCE])
def test_greedy_generation_is_the_argmax_of_passes_from_scratch(mixer, position):
    model, params = tiny((mixer,), position)
    made = np.stack(list(generate(model, params, PROMPTS, N, GREEDY, KEY, block=3)))
    np.testing.assert_array_equal(made, without_state(model, params, PROMPTS, GREEDY))
    others = np.concatenate([(PROMPTS[:, :1] + 1) % V, PROMPTS[:, 1:]], axis=1)
    assert np.any(made != without_state(model, params, others, GREEDY)), "too forgetful to show a lost state"


def streams(name: str) -> bool:
    """Whether a mixer's state is of one size however much it has read."""
    mixer = zoo.make((name, {}, "none"))
    return mixer.state_bytes(10) == mixer.state_bytes(10_000)


STREAMING = tuple(name for name in zoo.WRITERS if name in zoo.FIRST_OF_KIN and streams(name))


@pytest.mark.scale
@pytest.mark.long
def test_ten_thousand_tokens_stream_in_constant_memory():
    """Every recurrence in one stack: a state of one size, one program, and at the end what a pass from scratch says."""
    model, params = tiny(STREAMING, "none")
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_state(1, n))) for n in (10, 10_000)]
    assert sizes[0] == sizes[1]
    list(generate(model, params, PROMPTS[:1], 10, GREEDY, KEY, block=500))
    before = generation.decode._cache_size()
    made = np.stack(list(generate(model, params, PROMPTS[:1], 10_000, GREEDY, KEY, block=500)))[:, 0]
    assert generation.decode._cache_size() == before and len(set(made)) > 2
    rows = np.concatenate([PROMPTS[0], made])[None]
    again = jax.jit(model.apply)({"params": params}, rows[:, :-1])[0][0, P - 1 :].argmax(-1)
    assert (again == made).mean() > 0.999 and (again[-100:] == made[-100:]).all()


RAGGED = {name: archs.ARCHS[name] for name in ("attention", "alibi", "s4d", "mamba", "hybrid")}


@pytest.mark.few(3)
@pytest.mark.parametrize("arch", RAGGED)
def test_a_ragged_batch_is_each_row_alone(arch):
    model, params = tiny(RAGGED[arch]["mixers"], RAGGED[arch].get("position", "none"))
    prompts = [list(row[:length]) for row, length in zip(PROMPTS, (2, P, 1, 4, 3, P), strict=True)]
    tokens, segments = pad(prompts)
    made = np.stack(list(generate(model, params, tokens, N, GREEDY, KEY, segments, block=3)))
    np.testing.assert_array_equal(made, without_state(model, params, prompts, GREEDY))


def test_sampled_tokens_are_those_of_passes_from_scratch_in_blocks_of_any_size():
    model, params = tiny(("attention",), "rope")
    sampling = Sampling(temperature=2.0, top_k=8, top_p=0.9)
    want = without_state(model, params, PROMPTS, sampling)
    before = generation.decode._cache_size()
    for count, block in enumerate((1, 3), start=1):
        made = np.stack(list(generate(model, params, PROMPTS, N, sampling, KEY, block=block)))
        np.testing.assert_array_equal(made, want)
        assert generation.decode._cache_size() == before + count, "one program for full blocks and the last"


def test_one_token_needs_no_step():
    model, params = tiny(("attention",), "rope")
    (only,) = generate(model, params, PROMPTS, 1, GREEDY, KEY)
    np.testing.assert_array_equal(only, without_state(model, params, PROMPTS, GREEDY)[0])


@pytest.mark.quick
def test_what_cannot_generate_is_refused_before_anything_is_compiled():
    sections = base.get_config().model.to_dict() | entries.sections(("attention",), "learned")
    sections |= {"position": "learned", "learned": {"max_len": L}}
    model = build.build(sections, Asked(V))
    check(model, P, L - P)
    with pytest.raises(UserError, match=f"{L} positions.*closest: {L - P} new"):
        generate(model, None, PROMPTS, L - P + 1, GREEDY, KEY)
    with pytest.raises(UserError, match="classifier"):
        check(build.build(sections, Asked(V, n_classes=3)), P, 1)
    with pytest.raises(UserError, match="bidirectional"):
        check(build.build(sections | {"causal": False}, Asked(V)), P, 1)
    with pytest.raises(UserError, match="at least 1"):
        check(model, P, 0)
    with pytest.raises(UserError, match="empty"):
        pad([[1, 2], []])


# --- prompts and text ---


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("So it goes: all at once, and then nothing for a while.\n" * 60)
    return path


@pytest.mark.quick
def test_text_survives_the_way_through_bytes(book):
    task = build_task("text", {"path": str(book), "length": 16})
    text = "naïve – 😀\n"
    assert "".join(decode(task, encode(task, text))) == text
    assert encode(task, "") == [10], "nothing said: a line begins"
    assert "".join(decode(task, b"a\xffb\x1b[2J\xe2\x82")) == "a\ufffdb\ufffd[2J\ufffd"
    seen = []
    pieces = decode(task, (seen.append(byte) or byte for byte in b"ab"))
    assert next(pieces) == "a" and seen == [97], "shown as it comes"


@pytest.mark.quick
@pytest.mark.parametrize("task,of", [("mqar", "prompt"), ("copy", "source")])
def test_a_prompt_of_endless_digits_is_refused(task, of):
    with pytest.raises(UserError, match=rf"^{of} holds '9{{50,}}\.\.\.; task {task} takes token ids from") as error:
        encode(build_task(task, {}), f"5 {'9' * 5000}")
    assert len(str(error.value)) < 200


@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["", "1 16", "1 -2", "one"])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    task = build_task("induction", {"vocab_size": 16})
    assert encode(task, "3 15") == [3, 15] and "".join(decode(task, [0, 4])) == " 0 4"
    with pytest.raises(UserError, match="from 0 to 15"):
        encode(task, wrong)


# --- a run and its checkpoints ---


def trained(tmp_path_factory, config: str, **overrides) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    file, _, argument = config.partition(":")
    spec = f"{ROOT / file}:{argument}" if argument else str(ROOT / file)
    train(configs.load(spec, [(key, str(value)) for key, value in overrides.items()]), str(folder))
    return folder


@pytest.fixture(scope="module")
def recall_run(tmp_path_factory) -> Path:
    few = {"steps": 6, "eval_every": 3, "checkpoint_every": 3, "data.mqar.min_pairs": 2, "model.width": 16}
    return trained(tmp_path_factory, "configs/debug.py", **few)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory, book) -> Path:
    few = {
        "steps": 1,
        "model.width": 16,
        "model.layers": 1,
        "data.text.length": 16,
        "eval_batches": 1,
        "batch_size": 8,
    }
    return trained(tmp_path_factory, f"configs/text.py:path={book}", **few)


@pytest.fixture(scope="module")
def recall(recall_run):
    return restore(str(recall_run), "latest")


def weighted(lines: list[dict]) -> float:
    full = [line for line in lines if line["count"]]
    return sum(line["accuracy"] * line["count"] for line in full) / sum(line["count"] for line in full)


one_run = pytest.mark.xdist_group("eval")  # its tests go to one worker, which trains it once


@one_run
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_numbers_are_those_of_the_run(recall_run, recall, split):
    found = measure(recall, split)
    assert found["examples"] == 32
    assert set(found["slices"]) == {"distance", "pairs"}
    for lines in found["slices"].values():
        assert weighted(lines) == pytest.approx(found["metrics"]["accuracy"], rel=1e-6)
        assert sum(line["count"] for line in lines) == found["targets"]
    assert found["metrics"]["perplexity"] == pytest.approx(math.exp(found["metrics"]["loss"]))
    logged = next(e for e in reversed(log.read_metrics(recall_run / "metrics.jsonl")) if "validation/loss" in e)
    logged |= read_json(recall_run / "result.json")["metrics"]
    assert logged["step"] == recall.step == 6
    for metric in ("accuracy", "loss"):
        if split != "train":  # which no run is scored on
            assert found["metrics"][metric] == logged[f"{split}/{metric}"]


@one_run
def test_the_suite_writes_and_shows_what_it_measured_and_leaves_the_run_alone(recall_run, capsys):
    def files():
        inside = [p for p in recall_run.rglob("*") if p.is_file() and "eval" not in p.parts]
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in inside}

    before = files()
    with open_workdir(recall_run):  # as if it were still training
        before = files()
        SUITES["accuracy"](restore(str(recall_run), "3"), split="validation")
        longer = restore(str(recall_run), "best", [("data.mqar.length", "64"), ("batch_size", "8")])
        SUITES["accuracy"](longer, split="validation")
    assert files() == before
    out = capsys.readouterr().out
    written = {path.name: json.loads(path.read_text()) for path in (recall_run / "eval").iterdir()}
    report = written.pop("accuracy-validation-3.json")
    assert report["step"] == 3 and report["split"] == "validation" and report["changes"] == {}
    row = read_json(recall_run / "result.json")
    for key in ("config_hash", "data_fingerprint", "device", "revision", "date"):
        assert report[key] == row[key]
    assert report["slices"]["distance"][0] == {"bin": "1", "accuracy": None, "count": 0}
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "-", "0"] in lines
    assert ["accuracy", f"{report['metrics']['accuracy']:.4f}"] in lines
    ((name, other),) = written.items()
    assert name.startswith(f"accuracy-validation-{longer.step}-"), "other data do not take the file's place"
    assert other["changes"] == {"batch_size": [16, 8], "data.mqar.length": [32, 64]}
    assert other["data_fingerprint"] != report["data_fingerprint"]
    assert other["examples"] == 16 and other["config_hash"] == row["config_hash"]
    assert any("data.mqar.length=64" in line for line in out.splitlines())


@pytest.mark.scale
def test_a_whole_split_of_bytes_and_a_text_from_it(text_run, capsys):
    loaded = restore(str(text_run), "latest", [("eval_batches", "0")])
    size = loaded.run.task.size("test")
    found = measure(loaded, "test")
    assert size % 8 and found["examples"] == size and found["targets"] == 16 * size
    assert found["metrics"]["bits_per_byte"] == pytest.approx(found["metrics"]["loss"] / math.log(2))
    ask = {"tokens": 20, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    capsys.readouterr()
    for seed in (0, 0, 1):
        continuation(loaded, prompt="So it ", seed=seed, **ask)
    said, told = capsys.readouterr()
    pace = r"compiled in (\d+\.\d\d) s; first token after (\d+\.\d{3}) s, then [\d,]+ tokens/s"
    compiling, soon = zip(*(map(float, re.fullmatch(pace, line).groups()) for line in told.splitlines()), strict=True)
    assert len(soon) == 3 and soon[0] < compiling[0] / 5  # the clock starts when programs are there
    assert said.startswith("So it ") and said.endswith("\n")
    first, again, other = said.removeprefix("So it ").split("\nSo it ")
    assert first == again != other.removesuffix("\n")


@one_run
def test_a_checkpoint_of_another_shape_is_refused_in_one_line(recall_run):
    with pytest.raises(UserError, match="does not fit") as refused:
        restore(str(recall_run), "latest", [("model.width", "32")])
    assert "\n" not in str(refused.value)


@one_run
def test_parameters_are_all_that_is_read(recall_run, recall, tmp_path, monkeypatch):
    """A checkpoint whose every other file is gone serves; and Orbax is asked for parameters alone."""
    copy = tmp_path / "run"
    shutil.copytree(recall_run, copy)
    for rest in copy.glob("checkpoints/*/rest"):
        shutil.rmtree(rest)
    asked = []
    reading = ocp.PyTreeCheckpointHandler.restore

    def watched(self, *args, **options):
        arrays = reading(self, *args, **options)
        asked.extend(arrays)
        return arrays

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", watched)
    chex.assert_trees_all_equal(restore(str(copy), "latest").params, recall.params)
    assert len(asked) == len(jax.tree.leaves(recall.params)) and all(path.startswith("params/") for path in asked)


@one_run
def test_two_hosts_measure_what_one_does(recall_run, recall):
    """Two processes of a device each; the first prints and writes, for both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    (recall_run / "eval" / "accuracy-test-6.json").unlink(missing_ok=True)
    words = ("eval", f"--workdir={recall_run}", "--distributed")
    ranks = [{"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)} for rank in range(2)]
    pair = [fork(*words, JAX_COORDINATOR_ADDRESS=address, **rank) for rank in ranks]
    assert [process.wait(200) for process in pair] == [0, 0], [process.stderr for process in pair]
    alone, together = measure(recall, "test"), read_json(recall_run / "eval" / "accuracy-test-6.json")
    assert together["devices"] == 2 and together["examples"] == alone["examples"]
    for metric, value in alone["metrics"].items():
        assert together["metrics"][metric] == pytest.approx(value, rel=1e-6)
    assert together["slices"] == finite(alone["slices"])
    said = [[line for line in rank.stdout.splitlines() if not line.startswith("[Gloo]")] for rank in pair]
    assert said[0][0].startswith("mqar test split at step 6") and said[1] == []


@pytest.mark.quick
def test_steps_are_chosen_among_those_there_are(tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        choose_step(tmp_path, "latest")
    for step in (20, 40):
        (tmp_path / f"{step:08d}").mkdir()
        (tmp_path / f"{step:08d}" / "manifest.json").write_text("{}")
    assert choose_step(tmp_path, "latest") == 40 and choose_step(tmp_path, "20") == 20
    with pytest.raises(UserError, match="closest: 40"):
        choose_step(tmp_path, "100")
    with pytest.raises(UserError, match="closest: latest"):
        choose_step(tmp_path, "last")
    with pytest.raises(UserError, match=r"no checkpoint .* has a validation score; closest: latest"):
        choose_step(tmp_path, "best")


@pytest.mark.quick
def test_an_empty_bin_has_no_accuracy():
    first, second = by_bin(("a", "b"), np.array([1.0, 0.0]), np.array([4.0, 0.0]))
    assert first == {"bin": "a", "accuracy": 0.25, "count": 4}
    assert math.isnan(second["accuracy"]) and second["count"] == 0


@one_run
def test_what_there_is_no_room_for_is_told_with_what_makes_it_smaller(recall_run):
    command = fork("eval", f"--workdir={recall_run}", "--suite=generate", "--prompt=1 2", "--tokens=2000000000")
    assert (command.wait(), command.stdout, command.stderr.count("\n")) == (1, "", 1)
    assert "error: out of memory: " in command.stderr and "; lower --tokens, or shorten --prompt" in command.stderr


@one_run
def test_mistakes_end_in_one_line_and_exit_code_2(recall_run):
    run = f"--workdir={recall_run}"
    cases = {
        ("--workdir=" + str(recall_run.parent / "rum"),): f"does not exist; closest: {recall_run}",
        (run, "--suite=acuracy"): "closest: accuracy",
        (run, "--split=tests"): "closest: test",
        (run, "--step=5"): "closest: 6",
        (run, "--tokens=5"): "suite accuracy does not take --tokens; allowed: --split",
        (run, "--suite=generate", "--distributed"): "does not take --distributed; allowed with it: accuracy",
    }
    for args, words in cases.items():
        command = fork("eval", *args)
        assert (command.wait(), command.stdout) == (2, ""), (args, command.stderr)
        err = command.stderr
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err, (args, err)
