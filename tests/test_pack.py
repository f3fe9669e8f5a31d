"""Runs go through a few small files and come out as they went in; what is not whole does not come out at all."""

import fcntl
import json
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.running import folders, packing
from experiments.running.packing import INDEX, pack, unpack
from experiments.running.runs import RunSpec
from model.errors import UserError
from tests.processes import fork
from tests.test_nothing_lost import losses
from train import manifest
from train.checkpoint import steps
from train.workdir import read_json

SIZE = 2**16


def save(run: Path, step: int, score: float | None, size: int) -> None:
    """A committed step of bytes that no method makes fewer."""
    folder = manifest.step_folder(run / "checkpoints", step)
    (folder / "params" / "d").mkdir(parents=True)
    (folder / "params" / "d" / "array").write_bytes(random.Random(step).randbytes(size))
    record = {"step": step, "score": score, "extra": {}, "leaves": {}, "hosts": 1}
    manifest.sign(folder, 0, record)
    manifest.seal(folder, record)


def make(run: Path, status: str | None = None) -> Path:
    """A run that has three checkpoints, the second its best, and has been started more than once."""
    run.mkdir(parents=True)
    for name in ("config.json", "run.json", "data.json", "changes.json", "restarts.json", "goodput.json"):
        folders.write_json(run / name, {"name": name})
    folders.write_json(run / "failed.json", {"code": 1, "error": "it broke"})
    (run / "metrics.jsonl").write_text('{"step": 1}\n' * 1000)
    (run / "log.txt").write_text("not needed to go on")
    for step, score in ((10, 0.5), (20, 0.9), (30, 0.9 if status else None)):
        save(run, step, score, 2 * SIZE)
    if status:
        folders.write_json(run / "result.json", {"status": status, "metrics": {}, "config_hash": "x"})
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def sweep(tmp_path):
    for name, status in (("going", None), ("done", "finished"), ("diverged", "nonfinite")):
        make(tmp_path / "runs" / name, status)
    (tmp_path / "runs" / "rows.jsonl").write_text("made anew\n")
    return tmp_path / "runs"


@pytest.mark.quick
def test_what_a_run_needs_comes_out_as_it_was(sweep, tmp_path):
    index = pack(sweep, tmp_path / "pack", SIZE)
    files = list((tmp_path / "pack").iterdir())
    assert len(files) == len(index["parts"]) + 1 > 6 and max(path.stat().st_size for path in files) <= SIZE
    unpack(tmp_path / "pack", tmp_path / "new" / "runs")
    before, after = contents(sweep), contents(tmp_path / "new" / "runs")
    # The newest and the best of what goes on; of a run that is over its result.
    gone = {name for name in before if "/log" in name or "00000010" in name or name.startswith("done/checkpoints")}
    gone |= {name for name in before if name.startswith("diverged/checkpoints/00000020")} | {"rows.jsonl"}
    assert after == {name: text for name, text in before.items() if name not in gone}
    assert [steps(tmp_path / "new/runs" / name / "checkpoints") for name in ("going", "diverged")] == [[20, 30], [30]]
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir()], "nothing is left half made"

    pack(sweep / "done", tmp_path / "one", SIZE, all_checkpoints=True)
    unpack(tmp_path / "one", tmp_path / "alone")
    assert contents(tmp_path / "alone").keys() >= {"config.json", "checkpoints/00000030/manifest.json"}
    again = pack(sweep, tmp_path / "again", SIZE)
    assert again == index, "the same runs make the same pack"


@pytest.mark.quick
def test_a_run_that_others_have_yet_to_begin_with_keeps_its_checkpoints(tmp_path):
    first = {"scaling": "none", "tuned": "no"}
    runs = [RunSpec("x.py", {"seed": seed}, {"scaling": "yarn"}, source=first) for seed in (0, 1)]
    for run, status in zip(runs, (None, "finished"), strict=True):
        make(tmp_path / "runs" / run.source_name, "finished")
        folders.claim(make(tmp_path / "runs" / f"yarn-{run.overrides['seed']}", status), run, "x")
    pack(tmp_path / "runs", tmp_path / "pack", SIZE)
    unpack(tmp_path / "pack", tmp_path / "new")
    found = {path.name: steps(path / "checkpoints") for path in (tmp_path / "new").iterdir()}
    names = [run.source_name for run in runs]
    assert found == {names[0]: [30], names[1]: [], "yarn-0": [20, 30], "yarn-1": []}


@pytest.mark.quick
def test_the_parts_are_an_archive_that_other_tools_read(sweep, tmp_path):
    pack(sweep, tmp_path / "pack", SIZE)
    whole = tmp_path / "whole.tar.gz"
    whole.write_bytes(b"".join(path.read_bytes() for path in sorted((tmp_path / "pack").glob("part-*"))))
    with tarfile.open(whole) as archive:
        assert set(archive.getnames()) == set(packing.read_index(tmp_path / "pack")["files"])


def rewritten(path: Path, change) -> None:
    """An index that was changed by one who knows how it is sealed."""
    content = json.loads(path.read_text())
    content.pop("sha256")
    change(content)
    path.write_text(json.dumps(content | {"sha256": packing._seal(content)}))


def renamed(content: dict, name: str) -> None:
    content["files"][name] = content["files"].pop("going/config.json")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def edit(change) -> Callable[[Path], None]:
    return lambda p: rewritten(p / INDEX, change)


def text(change) -> Callable[[Path], None]:
    return lambda p: (p / INDEX).write_text(change((p / INDEX).read_text()))


DAMAGE = {
    "a part is missing": (lambda p: (p / "part-0002").unlink(), r"part-0002 is missing"),
    "a part is cut": (lambda p: (p / "part-0001").write_bytes(b"short"), r"part-0001 is damaged: it has 5 bytes"),
    "a bit is flipped": (lambda p: flip(p / "part-0003"), r"part-0003 is damaged: it does not match its SHA-256"),
    "parts change places": (lambda p: swap(p / "part-0000", p / "part-0001"), r"part-0000 is damaged"),
    "the index is missing": (lambda p: (p / INDEX).unlink(), r"no pack\.json in"),
    "the index is cut": (text(lambda t: t[:90]), r"pack\.json is not valid JSON"),
    "the index is edited": (text(lambda t: t.replace("going", "goinG")), r"does not match its own SHA-256"),
    "a path leads out": (edit(lambda c: renamed(c, "../out.json")), r"names '\.\./out\.json'"),
    "a path is absolute": (edit(lambda c: renamed(c, "/tmp/x")), r"names '/tmp/x'"),
    "a part lies elsewhere": (edit(lambda c: c["parts"][0].update(name="../part")), r"names '\.\./part'"),
    "a file is not listed": (edit(lambda c: renamed(c, "b")), r"'going/config\.json', which is not"),
    "a file is lacking": (edit(lambda c: c["files"].update({"zz": [0, "x"]})), r"is damaged: it lacks zz"),
    "a file is another": (edit(lambda c: c["files"]["going/config.json"].reverse()), r"'going/config\.json', which"),
    "a file has other bytes": (
        edit(lambda c: c["files"]["going/config.json"].__setitem__(1, "x")),
        r"config\.json does not match its SHA-256",
    ),
    "no parts are told": (edit(lambda c: c.update(parts=[5])), r"does not say what its parts"),
}


@pytest.mark.quick
@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_not_whole_is_refused_and_nothing_is_left(what, sweep, tmp_path):
    pack(sweep, tmp_path / "pack", SIZE)
    damage, told = DAMAGE[what]
    damage(tmp_path / "pack")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=told) as refusal:
        unpack(tmp_path / "pack", tmp_path / "new")
    assert "\n" not in str(refusal.value)
    assert set(tmp_path.rglob("*")) == before


def linked(path: Path) -> None:
    """An archive whose first member is a link out of the folder, under the name of a file."""
    link = tarfile.TarInfo("going/config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(path / "part-0000", "w:gz") as archive:
        archive.addfile(link)
    data = (path / "part-0000").read_bytes()

    def change(content: dict) -> None:
        digest = packing.hashlib.sha256(data).hexdigest()
        content.update(parts=[{"name": "part-0000", "bytes": len(data), "sha256": digest}])
        content.update(files={"going/config.json": [0, "x"]})

    rewritten(path / INDEX, change)


@pytest.mark.quick
def test_a_link_is_not_unpacked(sweep, tmp_path):
    pack(sweep, tmp_path / "pack", SIZE)
    linked(tmp_path / "pack")
    with pytest.raises(UserError, match="which is not in its"):
        unpack(tmp_path / "pack", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.quick
def test_folders_that_cannot_be_packed(sweep, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="full is there already"):
        pack(sweep, tmp_path / "full", SIZE)
    with pytest.raises(UserError, match="no run in"):
        pack(tmp_path / "full", tmp_path / "pack", SIZE)
    with (sweep / "going" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="going is being trained"):
            pack(sweep, tmp_path / "pack", SIZE)
    array = "checkpoints/{}/params/d/array"
    flip(sweep / "diverged" / array.format("00000030"))  # the one before is whole, as a start would find
    pack(sweep, tmp_path / "pack", SIZE)
    assert not any("diverged/checkpoints/00000030" in name for name in packing.read_index(tmp_path / "pack")["files"])
    assert any("diverged/checkpoints/00000020" in name for name in packing.read_index(tmp_path / "pack")["files"])
    flip(sweep / "going" / array.format("00000020"))
    with pytest.raises(UserError, match="00000020, the best one, is damaged"):
        pack(sweep, tmp_path / "other", SIZE)
    assert not (tmp_path / "other").exists()


@pytest.mark.quick
def test_a_folder_that_cannot_be_made_is_called_as_it_was_given(sweep):
    with pytest.raises(UserError, match=r"^cannot make the folder /proc/x: .*; give another --out$"):
        pack(sweep, Path("/proc/x"), SIZE)


@pytest.mark.scale
def test_a_run_goes_on_from_a_pack_bit_for_bit(tmp_path):
    """Its folder is lost with the machine; the step that validation chose may have been before that."""
    small = {"batch_size": 4, "eval_batches": 1, "model.width": 16, "data.mqar.length": 16, "test_at": "best"}
    settings = small | {"steps": 60, "checkpoint_every": 20, "eval_every": 5}

    def command(workdir: Path) -> list[str]:
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        return ["train", "--config=configs/debug.py", f"--workdir={workdir}", *flags]

    assert fork(*command(tmp_path / "calm")).wait(300) == 0
    first = fork(*command(tmp_path / "here"))
    while first.running() and not steps(tmp_path / "here" / "checkpoints"):
        pass
    first.send(15)
    assert first.wait(60) == 0
    packed = fork("experiments.pack", str(tmp_path / "here"), f"--out={tmp_path / 'pack'}")
    assert packed.wait(60) == 0 and re.match("1 runs, .* 1 parts of ", packed.stdout)
    shutil.rmtree(tmp_path / "here")
    unpacked = fork("experiments.pack", str(tmp_path / "pack"), "--unpack", f"--out={tmp_path / 'there'}")
    assert unpacked.wait(60) == 0, unpacked.stderr
    second = fork(*command(tmp_path / "there"))
    assert second.wait(300) == 0 and "resumed at step" in second.stdout
    assert losses(tmp_path / "there") == losses(tmp_path / "calm")
    calm, there = (read_json(tmp_path / name / "result.json") for name in ("calm", "there"))
    assert there["metrics"] == calm["metrics"] and there["tested_step"] == calm["tested_step"]
