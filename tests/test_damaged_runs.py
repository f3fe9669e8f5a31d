"""A run's folder after a bad night: whatever file is damaged, the next start says so in one line or goes on as before.

Each case harms one file of a run that was interrupted after step 4 of 6, and starts it again. It may be refused, by
the words given, or it must end with the losses of the run that nothing happened to.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from eval.restore import choose_step
from experiments.running import folders
from experiments.tables import rows
from model.errors import UserError
from tests.test_checkpoint import append, flip, truncate
from train import config as configs
from train import log, loop, manifest, sharding
from train.checkpoint import UNFINISHED
from train.run import prepare

pytestmark = pytest.mark.scale

DEEP = "[" * 100_000
DEEPER = '{"a":' * 400 + "1" + "}" * 400  # JSON can read it
NEWEST, OLDER = "checkpoints/00000004", "checkpoints/00000002"
SETTINGS = {"steps": 6, "checkpoint_every": 2, "eval_every": 3, "log_every": 1, "eval_batches": 1}
TINY = {"model.width": 16, "model.layers": 1, "batch_size": 8, "data.mqar.length": 16, "best": "loss", "keep": 3}
SCORES = {3: 0.5, 6: 0.7}  # the best stands at a step that is not otherwise saved


@pytest.fixture(scope="module")
def run():
    """On one device, where a save has fewer pieces."""
    overrides = [(key, str(value)) for key, value in (SETTINGS | TINY).items()]
    shape = (1,) * len(sharding.AXES)
    mesh = jax.make_mesh(shape, sharding.AXES, (AxisType.Auto,) * len(shape), devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharding, "make_mesh", lambda *args: mesh)
        return prepare(configs.load("configs/debug.py", overrides))


@pytest.fixture(autouse=True)
def quick(run, monkeypatch):
    """Built and compiled once for all cases; evaluation, which plays no part in them, is played."""
    monkeypatch.setattr(loop, "prepare", lambda config: run)

    def scores(run, state, split, *args, **kwargs):
        value = SCORES.get(int(state.step), 0.6)
        return {f"{split}/loss": value, f"{split}/accuracy": 1 - value}

    monkeypatch.setattr(loop, "validate", scores)


def go_on(folder: Path, run) -> tuple[dict[str, Any], list[str]]:
    """Trains to the end; the result and the bits of every loss."""
    result = loop.train(run.config, str(folder))
    return result, [line["loss"].hex() for line in log.read_metrics(folder / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def calm(run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        quick.__wrapped__(run, patched)
        folder = tmp_path_factory.mktemp("calm")
        return folder, *go_on(folder, run)


@pytest.fixture(scope="module")
def interrupted(run, calm, tmp_path_factory):
    folder, left = tmp_path_factory.mktemp("interrupted"), [4]

    def step(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return run.train_steps(*args)

    with pytest.MonkeyPatch.context() as patched:
        quick.__wrapped__(dataclasses.replace(run, train_steps=step), patched)
        with pytest.raises(KeyboardInterrupt):
            loop.train(run.config, str(folder))
    shutil.rmtree(folder / "checkpoints/00000003")  # the best: in the way of what the cases are about
    return folder


def put(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def sealed(name: str, **changes: Any) -> Callable[[Path], None]:
    """A signed file with other contents, as another program would write it; None takes a key out."""

    def harm(folder: Path) -> None:
        content = json.loads((folder / name).read_text())["content"] | changes
        kept = {key: value for key, value in content.items() if value is not None or key not in changes}
        (folder / name).write_text(manifest._sealed(kept))

    return harm


def a_folder(name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        if (folder / name).exists():
            (folder / name).unlink()
        (folder / name).mkdir()

    return harm


def line(number: int, text: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        lines[number] = text
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return harm


def data_file(harm: Callable[[Path], Any], part: str) -> Callable[[Path], None]:
    return lambda folder: harm(max((folder / NEWEST / part).rglob("d/*"), key=lambda path: path.stat().st_size))


def swap(folder: Path) -> None:
    (folder / NEWEST).rename(folder / "aside")
    (folder / OLDER).rename(folder / NEWEST)
    (folder / "aside").rename(folder / OLDER)


def copy(source: str, target: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        shutil.rmtree(folder / target, ignore_errors=True)
        shutil.copytree(folder / source, folder / target)

    return harm


GOES_ON = None
CASES: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    **{
        f"config.json = {text[:12]!r}, {len(text)}": (put("config.json", text), says)
        for text, says in {
            "": "not valid JSON",
            "{": "not valid JSON",
            "[]": "is damaged: it holds",
            "5": "is damaged: it holds",
            "null": "is damaged: it holds",
            "{}": "another config",
            '{"model": 5}': "another config",
            '{"a.b": 1}': "another config",
            "\x00\x01": "not valid JSON",
            DEEP: "not valid JSON",
            DEEPER: "not valid JSON: it is nested more than 100 deep",
        }.items()
    },
    "config.json not text": (put("config.json", b"\xff\xfe\xfa"), "not valid JSON"),
    "config.json a folder": (a_folder("config.json"), "cannot read .*directory"),
    **{
        f"data.json = {text[:12]!r}": (put("data.json", text), says)
        for text, says in {
            "": "not valid JSON",
            "{}": "is damaged: it has no 'fingerprint'",
            "[]": "is damaged: it holds",
            "7": "is damaged: it holds",
            '{"fingerprint": 5}': "is damaged: 'fingerprint' is '5', not a str",
            '{"fingerprint": "x"}': "data of task mqar has changed",
        }.items()
    },
    **{
        f"result.json = {text[:12]!r}": (put("result.json", text), says)
        for text, says in {
            "": "not valid JSON",
            "{}": "is damaged: it has no 'status'",
            "[]": "is damaged: it holds",
            "null": "is damaged: it holds",
            '{"status": 1}': "is damaged: 'status' is '1', not a str",
            '{"status": "finished"}': "is damaged: it has no 'config_hash'",
        }.items()
    },
    **{
        f"changes.json = {text!r}": (put("changes.json", text), says)
        for text, says in {
            "": "not valid JSON",
            "{}": "is damaged: it has no 'changes'",
            '{"changes": 5}': "is damaged: 'changes' is '5', not a list",
            '{"changes": [5]}': "is damaged: '5' is no change",
            '{"changes": [{"step": 9, "key": [], "old": 1, "new": 2}]}': "is damaged: .* is no change",
        }.items()
    },
    **{
        f"metrics.jsonl has {text[:16]!r}": (line(1, text), "metrics.jsonl line 2 is not an event")
        for text in ("garbage", "[1]", '{"step": null}', '{"step": "2"}', '{"step": true}', '{"loss": 1}', "", DEEP)
    },
    "metrics.jsonl glued": (line(1, '{"step": 2, "lo{"step": 3}'), "line 2 is not an event"),
    "metrics.jsonl torn": (lambda f: truncate(f / "metrics.jsonl"), GOES_ON),
    "metrics.jsonl ends in garbage": (lambda f: append(f / "metrics.jsonl"), GOES_ON),
    "metrics.jsonl a folder": (a_folder("metrics.jsonl"), "metrics.jsonl"),
    "goodput.json garbage": (put("goodput.json", b"\xff{"), GOES_ON),
    "goodput.json a folder": (a_folder("goodput.json"), GOES_ON),
    ".lock garbage": (put(".lock", b"\xff" * 300), GOES_ON),
    ".lock a folder": (a_folder(".lock"), "cannot write to workdir"),
    "checkpoints a file": (
        lambda f: (shutil.rmtree(f / "checkpoints"), put("checkpoints", "")(f)),
        "cannot use .*checkpoints: File exists",
    ),
    **{
        f"manifest = {text[:12]!r}": (put(f"{NEWEST}/manifest.json", text), GOES_ON)
        for text in ("", "{}", "[]", "5", '{"content": 5}', DEEP)
    },
    **{
        f"manifest without {key}": (sealed(f"{NEWEST}/manifest.json", **{key: None}), GOES_ON)
        for key in ("step", "extra", "leaves", "hosts", "files")
    },
    "manifest of another step": (sealed(f"{NEWEST}/manifest.json", step=9), GOES_ON),
    "manifest with odd kinds": (sealed(f"{NEWEST}/manifest.json", files=[], extra=3), GOES_ON),
    "manifest with odd digests": (sealed(f"{NEWEST}/manifest.json", files={"signed.0.json": 5}), GOES_ON),
    "manifest without notes": (sealed(f"{NEWEST}/manifest.json", extra={}), GOES_ON),
    "manifest gone": (lambda f: (f / NEWEST / "manifest.json").unlink(), GOES_ON),
    "every manifest empty": (
        lambda f: [put(f"{step}/manifest.json", "")(f) for step in (NEWEST, OLDER)],
        "every checkpoint in .* is damaged",
    ),
    "signature gone": (lambda f: (f / NEWEST / "signed.0.json").unlink(), GOES_ON),
    "signature empty": (put(f"{NEWEST}/signed.0.json", ""), GOES_ON),
    "signature without files": (sealed(f"{NEWEST}/signed.0.json", files=None), GOES_ON),
    "parameters flipped": (data_file(flip, "params"), GOES_ON),
    "parameters cut short": (data_file(truncate, "params"), GOES_ON),
    "moments flipped": (data_file(flip, "rest"), GOES_ON),
    "moments gone": (lambda f: shutil.rmtree(f / NEWEST / "rest"), GOES_ON),
    "steps swapped": (swap, "every checkpoint in .* is damaged .*manifest.json is that of step 2"),
    "older step over the newest": (copy(OLDER, NEWEST), GOES_ON),
    "step with a short name": (copy(OLDER, "checkpoints/0000400"), GOES_ON),
    "step in superscript": (copy(OLDER, "checkpoints/\u2074"), GOES_ON),
    "somebody's folder": (lambda f: (f / "checkpoints/00000006").mkdir(), GOES_ON),
    "somebody's file": (put("checkpoints/00000006", "notes"), GOES_ON),
    "save never begun": (lambda f: (f / f"checkpoints/00000006{UNFINISHED}").mkdir(), GOES_ON),
    **{
        f"save signed for {record}": (
            lambda f, record=record: (
                copy(NEWEST, f"checkpoints/00000005{UNFINISHED}")(f),
                sealed(f"checkpoints/00000005{UNFINISHED}/signed.0.json", record=record)(f),
            ),
            GOES_ON,
        )
        for record in ({}, [], 5, {"hosts": 1}, {"step": 5, "hosts": "two"})
    },
    "save signed and empty": (
        lambda f: (copy(NEWEST, f"checkpoints/00000005{UNFINISHED}")(f), shutil.rmtree(f / NEWEST / "rest")),
        GOES_ON,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_told_or_overcome(case, run, calm, interrupted, tmp_path, monkeypatch):
    harm, refusal = CASES[case]
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    harm(folder)
    seldom = run.config.copy_and_resolve_references()
    seldom.checkpoint_every = 0  # spares the cases saves that play no part
    monkeypatch.setattr(loop, "prepare", lambda config: dataclasses.replace(run, config=seldom))
    if refusal is not GOES_ON:
        with pytest.raises(UserError, match=refusal) as caught:
            go_on(folder, run)
        assert "\n" not in str(caught.value)
        return
    result, losses = go_on(folder, run)
    _, expected, bits = calm
    assert (result["status"], result["steps"], result["metrics"]) == ("finished", 6, expected["metrics"])
    assert losses == bits


def test_there_are_many():
    assert len(CASES) >= 40


def test_a_new_best_is_saved_where_it_is_found(calm, run):
    """Step 3 has the best loss and is no multiple of `checkpoint_every`."""
    folder, _, _ = calm
    assert choose_step(folder / "checkpoints", "best") == 3
    assert choose_step(folder / "checkpoints", "latest") == 6


def test_the_loop_looks_after_its_saves(run, tmp_path, monkeypatch):
    """Every step asks whether the save in the background has failed, and a step is saved after what was logged."""
    calls = []
    for owner, name in ((loop.Checkpoints, "check"), (loop.Checkpoints, "save"), (loop.MetricsLog, "sync")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, name=name, original=original: (calls.append(name), original(*args))
        )
    monkeypatch.setattr(loop.Checkpoints, "save", lambda *args, **kwargs: calls.append("save"))
    loop.train(run.config, str(tmp_path))
    checked = ["check"]
    saved = ["check", "sync", "save"]
    assert calls == [*checked, *saved, *saved, *saved, *checked, *saved]  # steps 2, 3 (a new best), 4 and 6


@pytest.mark.parametrize(
    "name", ["config.json", "run.json", "result.json", "failed.json", "metrics.jsonl", "rows.jsonl"]
)
@pytest.mark.parametrize("text", ["", "[]", "5", "{}", DEEP])
def test_experiments_read_damaged_files(name, text, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    whole = {
        "run.json": {"labels": {}, "overrides": {}, "config_hash": "x"},
        "failed.json": {"error": "no", "code": 1},
        "config.json": {"steps": 3},
    }
    for file, content in whole.items():
        folders.write_json(folder / file, content)
    (folder / name).write_text(text)
    for use in (
        lambda: rows.collect(tmp_path),
        lambda: folders.position(folder),
        lambda: folders.strayed(folder),
        lambda: rows.read_rows(folder / name),
        lambda: configs.load(str(folder / "config.json")),
    ):
        try:
            use()
        except UserError as error:
            assert "\n" not in str(error)
