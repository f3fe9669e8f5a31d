"""Every host signs for its own files; a step that all have signed is committed, and nobody's data is deleted."""

import errno
import json
import shutil
import signal
import socket
import sys
import time
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from model.errors import UserError
from tests.test_checkpoint import abstract, assert_same, flip, make_state, said, save_all, start
from train import arrays, checkpoint, manifest
from train.checkpoint import UNFINISHED, Checkpoints
from train.manifest import MANIFEST

RECORD = {"step": 7, "score": None, "extra": {}, "leaves": {}, "hosts": 2}


@pytest.fixture(scope="module")
def like():
    return abstract(make_state(0))


def two_hosts(folder):
    """What two hosts and the first one's index leave in a folder."""
    for name in ("rest/_METADATA", "rest/ocdbt.process_0/d/a", "rest/ocdbt.process_1/d/b", "array_metadatas/process_1"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.mark.quick
def test_each_host_signs_for_its_own_files(tmp_path):
    folder = tmp_path / "00000007"
    two_hosts(folder)
    manifest.sign(folder, 0, RECORD)
    assert manifest.record_of(folder) is None and manifest.unsigned(folder, RECORD) == [1]
    manifest.sign(folder, 1)
    signed = [json.loads((folder / manifest.signature(i)).read_text())["content"]["files"] for i in range(2)]
    assert list(signed[1]) == ["array_metadatas/process_1", "rest/ocdbt.process_1/d/b"]
    assert list(signed[0]) == ["rest/_METADATA", "rest/ocdbt.process_0/d/a"]
    assert manifest.record_of(folder) == RECORD

    manifest.seal(folder, RECORD)
    assert set(manifest.read_manifest(folder)["files"]) == {"signed.0.json", "signed.1.json"}
    assert manifest.damage(folder) is None
    flip(folder / "rest/ocdbt.process_1/d/b")
    found = [manifest.damage(folder, share=(i, 3)) for i in range(3)]  # whoever has the share it lies in says so
    assert sorted(found, key=str) == [None, None, "rest/ocdbt.process_1/d/b does not match its SHA-256"]
    (folder / "signed.1.json").unlink()
    assert manifest.damage(folder) == "signed.1.json is missing"


@pytest.mark.quick
def test_files_and_their_folders_are_on_the_disk_before_they_are_signed_for(tmp_path, monkeypatch):
    folder, log = tmp_path / "00000007", []
    two_hosts(folder)
    write_text, sync_folder = manifest.write_text, manifest.sync_folder
    monkeypatch.setattr(manifest, "write_text", lambda path, text: (log.append(path.name), write_text(path, text)))
    monkeypatch.setattr(
        manifest, "sync_folder", lambda path: (log.append(str(path.relative_to(folder))), sync_folder(path))
    )
    manifest.sign(folder, 1)
    assert log.pop() == "signed.1.json"
    assert set(log) == {".", "rest", "rest/ocdbt.process_1", "rest/ocdbt.process_1/d", "array_metadatas"}
    manifest.sign(folder, 0, RECORD)
    log.clear()
    manifest.seal(folder, RECORD)
    assert log.pop() == MANIFEST
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()} <= set(log)


def test_parameters_are_read_alone(tmp_path, monkeypatch, like):
    state = {"params": make_state(1)["params"], "moments": make_state(2)["params"]}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state)
    folder = tmp_path / "00000001"
    flip(next((folder / "rest").rglob("d/*")))
    read, digests = [], manifest._digests
    monkeypatch.setattr(manifest, "_digests", lambda folder, names: (read.extend(names), digests(folder, names))[1])
    assert_same(checkpoint.load_params(tmp_path, abstract(state["params"]), 1), state["params"])
    assert {name.split("/")[0] for name in read} == {"params", "signed.0.json"}
    with pytest.raises(UserError, match="00000001 is damaged: rest/"):
        checkpoint.load(tmp_path, abstract(state), 1)
    with pytest.raises(UserError, match=r"params/w is float32\[16,8\] there, absent in this run"):
        checkpoint.load_params(tmp_path, {"b": like["params"]["b"]}, 1)
    flip(next((folder / "params").rglob("d/*")))
    with pytest.raises(UserError, match="00000001 is damaged: params/"):
        checkpoint.load_params(tmp_path, abstract(state["params"]), 1)


@pytest.mark.parametrize("moment", ["merge", "seal", "rename"])
def test_what_every_host_has_signed_is_not_lost(tmp_path, monkeypatch, moment, like):
    save_all(tmp_path, [1])

    def killed(*args):
        raise OSError(errno.EINTR, "killed")

    where = {"merge": checkpoint.arrays, "seal": manifest, "rename": checkpoint.os}[moment]
    with monkeypatch.context() as patched:
        patched.setattr(where, moment, killed)
        with pytest.raises(UserError, match="00000002 could not be written: killed"):
            save_all(tmp_path, [2])
    assert checkpoint.steps(tmp_path) == [1]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert "00000002 was signed by every host" in checkpoints.reports[0]
        step, state = checkpoints.restore(like)
    assert step == 2
    assert_same(state, make_state(2))


def test_what_is_not_ours_is_put_aside(tmp_path, like):
    save_all(tmp_path, [1, 2])
    (tmp_path / "00000400").mkdir()
    (tmp_path / "00000400/thesis.txt").write_text("years of work")
    for name in ("0000400", "\u2074\u2070\u2070"):  # short, and in superscript digits
        shutil.copytree(tmp_path / "00000001", tmp_path / name)
    (tmp_path / "00000500").write_text("a file")
    (tmp_path / f"00000300{UNFINISHED}").mkdir()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [1, 2] and checkpoints.restore(like)[0] == 2
        reports = "\n".join(checkpoints.reports)
        checkpoints.save(400, make_state(4))
        checkpoints.save(500, make_state(5))
        checkpoints.wait()
    assert f"00000300{UNFINISHED} is an unfinished save: removed" in reports
    assert "00000400 has no manifest.json; put aside as 00000400.unsigned" in reports
    assert "0000400 is ignored" in reports and "\u2074\u2070\u2070 is ignored" in reports
    assert (tmp_path / "00000400.unsigned/thesis.txt").read_text() == "years of work"
    kept = {"0000400", "\u2074\u2070\u2070", "00000400.unsigned", "00000500.unsigned", "00000500"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert checkpoint.steps(tmp_path) == [500]


def test_a_step_under_another_name_is_not_believed(tmp_path, like):
    save_all(tmp_path / "whole", [1, 2, 3])
    swapped, copied = tmp_path / "swapped", tmp_path / "copied"
    for directory in (swapped, copied):
        shutil.copytree(tmp_path / "whole", directory)
    (swapped / "00000002").rename(swapped / "two")
    (swapped / "00000003").rename(swapped / "00000002")
    (swapped / "two").rename(swapped / "00000003")
    shutil.rmtree(copied / "00000003")
    shutil.copytree(copied / "00000001", copied / "00000003")
    for directory, good, says in ((swapped, 1, "is that of step 2"), (copied, 2, "is that of step 1")):
        with Checkpoints(directory, keep=2) as checkpoints:
            step, state = checkpoints.restore(like)
            assert step == good and says in checkpoints.reports[0]
            assert_same(state, make_state(good))


def test_an_old_step_that_cannot_be_removed_stops_nothing(tmp_path, monkeypatch, caplog):
    def busy(path, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", busy)
            checkpoints.save(2, make_state(2))
            checkpoints.wait()
        assert "00000001.pruned could not be removed: Directory not empty" in caplog.text
        assert checkpoints.steps() == [2] and (tmp_path / "00000001.pruned").exists()
        checkpoints.save(3, make_state(3))
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


def test_a_save_that_cannot_begin_says_so_and_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot use .*file: File exists"):
        Checkpoints(tmp_path / "file", keep=1)
    monkeypatch.setattr(checkpoint.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"cannot write checkpoints to .*c: it is read-only"):
        Checkpoints(tmp_path / "c", keep=1)
    monkeypatch.undo()
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        (tmp_path / "c").rmdir()
        with pytest.raises(UserError, match=r"00000001 could not be written: No such file"):
            checkpoints.save(1, make_state(1))
        assert checkpoints._thread is None  # nothing goes on in the background
        (tmp_path / "c").mkdir()
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(UserError, match="it takes 532 bytes, and the disk has 100 left"):
            checkpoints.save(1, make_state(1))
    assert not list((tmp_path / "c").iterdir())


@pytest.mark.quick
def test_errors_that_come_too_late_are_not_shown_and_others_are(monkeypatch):
    """A full disk is told in one line, by whichever hook the layers below complain that nobody listens any more."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(str(error)))
    monkeypatch.setattr(sys, "unraisablehook", lambda args: shown.append(str(args.exc_value)))
    arrays._hush.__wrapped__()
    for text in ("Event loop is closed", "another"):
        error = RuntimeError(text)
        sys.excepthook(RuntimeError, error, None)
        sys.unraisablehook(SimpleNamespace(exc_type=RuntimeError, exc_value=error))
    assert shown == ["another"] * 2


TWO_PROCESSES = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from model.errors import UserError
from tests.test_checkpoint import abstract
from train import manifest
from train.checkpoint import Checkpoints, load
from train.workdir import graceful_stop, open_workdir
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
place = {"w": NamedSharding(mesh, P("data")), "step": NamedSharding(mesh, P())}
state = jax.jit(lambda: {"w": jnp.zeros((8, 3)), "step": jnp.int32(0)}, out_shardings=place)()
advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0, out_shardings=place)
with open_workdir(sys.argv[1]) as workdir, Checkpoints(workdir / "c", keep=2) as checkpoints:
    with graceful_stop() as stop_requested:
        assert checkpoints.restore(abstract(state)) is None
        print("started 0", flush=True)
        step = 0
        while not stop_requested() and step < 2000:
            step += 1
            state = advance(state)
            time.sleep(0.005)
            if step % 10 == 0:
                checkpoints.save(step, state, score=-step)
        checkpoints.save(step, state)
        like = abstract(state)
        found, state = checkpoints.restore(like)
        assert found == step and state["step"] == step
        assert all((np.asarray(s.data) == step).all() for s in state["w"].addressable_shards)
        try:
            load(checkpoints.directory, like, 12345)
        except UserError as error:  # told to both, not just to the one that looked
            assert "no checkpoint of step 12345" in str(error)
            print("stopped", step, flush=True)

    def fail(*args):
        raise OSError(28, "No space left on device")

    def hang(*args):
        time.sleep(1000)

    sign, second = manifest.sign, jax.process_index() == 1
    manifest.sign = fail if second else sign
    checkpoints.save(step + 1, state)  # one cannot sign: both are told, and soon
    try:
        checkpoints.wait()
    except UserError as error:
        told = "No space left on device" if second else "process 1 of 2 has not signed"
        assert str(error).endswith(f"{step + 1:08d} could not be written: {told}"), error
        print("told", checkpoints.steps()[-1], flush=True)
    manifest.sign = hang if second else sign
    checkpoints.save(step + 2, state)  # until the parent kills both
    checkpoints.wait()
"""


def test_two_processes_sign_and_stop_together(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=2"
    children = [start(TWO_PROCESSES, tmp_path, address, i, XLA_FLAGS=flags) for i in range(2)]
    try:
        for child in children:
            said(child, "started")
        time.sleep(0.3)
        children[1].send_signal(signal.SIGTERM)
        stopped, other = (said(child, "stopped") for child in children)
        assert 0 < stopped == other < 2000
        assert [said(child, "told") for child in children] == [stopped, stopped]
        unfinished = manifest.step_folder(tmp_path / "c", stopped + 2).with_name(f"{stopped + 2:08d}{UNFINISHED}")
        while not (unfinished / "signed.0.json").exists() and all(child.poll() is None for child in children):
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    assert (unfinished / "signed.0.json").exists() and not (unfinished / "signed.1.json").exists()
    folder = manifest.step_folder(tmp_path / "c", stopped)
    for host in range(2):
        signed = json.loads((folder / f"signed.{host}.json").read_text())["content"]["files"]
        assert {name for name in signed if f"process_{1 - host}" in name} == set()
        assert any(f"ocdbt.process_{host}/d/" in name for name in signed)
    # What one of two has signed is no step; and one process may go on with what two have saved.
    state = {"w": jnp.full((8, 3), float(stopped)), "step": jnp.int32(stopped)}
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert unfinished.name in checkpoints.reports[0]
        step, restored = checkpoints.restore(abstract(state))
    assert step == stopped and not unfinished.exists()
    assert_same(restored, state)
