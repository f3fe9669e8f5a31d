"""The run folder: one owner, whole files, and signals that end a run after a step."""

import os
import signal

import pytest

from model.errors import UserError
from tests.test_checkpoint import start
from tests.test_log import room_for
from train import hosts, workdir
from train.workdir import graceful_stop, open_workdir, read_json, write_json

HOLD = """
import sys, time
from train.workdir import open_workdir
with open_workdir(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_workdir_has_one_owner(tmp_path):
    child = start(HOLD, tmp_path / "run")
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by pid {child.pid} "), open_workdir(tmp_path / "run"):
            pass
    finally:
        child.kill()  # as abrupt as a crash, and yet no stale lock
        child.wait()
        child.stdout.close()
    with open_workdir(tmp_path / "run") as folder:
        assert folder == tmp_path / "run"
    with open_workdir(tmp_path / "run"):  # free again after the block
        pass


@pytest.mark.quick
def test_workdir_mistakes_are_told(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/below", "/proc/run"):
        with pytest.raises(UserError, match=f"cannot write to workdir {path}"), open_workdir(path):
            pass
    with pytest.raises(UserError, match="mount the bucket"), open_workdir("gs://bucket/run"):
        pass


@pytest.mark.quick
def test_a_host_with_a_folder_of_its_own_finds_out(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "the_line", lambda: "to the others")
    monkeypatch.setattr(workdir, "VISIBLE", 0.1)
    assert not workdir._sees(tmp_path, "pid 1 on a\n")
    (tmp_path / ".lock").write_text("pid 1 on a\n")
    assert workdir._sees(tmp_path, "pid 1 on a\n")
    assert not workdir._sees(tmp_path, "pid 2 on a\n")


@pytest.mark.quick
def test_json_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, 2.5, "x"]})
    assert read_json(path) == {"a": [1, 2.5, "x"]}

    def crash(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            write_json(path, {"b": 1})
    assert read_json(path) == {"a": [1, 2.5, "x"]}
    path.write_text("{")
    with pytest.raises(UserError, match=r"a\.json is not valid JSON"):
        read_json(path)
    with pytest.raises(UserError, match=r"cannot read .*b\.json: No such file"):
        read_json(tmp_path / "b.json")


@pytest.mark.quick
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with room_for(path, 10), pytest.raises(UserError, match=r"cannot write .*a\.json: File too large"):
        write_json(path, {"a": "x" * 100})
    assert read_json(path) == {"a": 1} and os.listdir(tmp_path) == ["a.json"]
    (tmp_path / "run").mkdir()
    with (
        room_for(tmp_path / "a.json", -path.stat().st_size),
        pytest.raises(UserError, match=r"cannot write to workdir .*run: File too large"),
        open_workdir(tmp_path / "run"),
    ):
        pass


@pytest.mark.quick
def test_what_a_file_must_hold_is_looked_for(tmp_path):
    path = tmp_path / "a.json"
    for text, says in {
        "[]": "holds '\\[\\]', not an object",
        "{}": "has no 'steps'",
        '{"steps": "x"}': "not a int",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=rf"a\.json is damaged: .*{says}"):
            read_json(path, steps=int)
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(path)


@pytest.mark.quick
def test_signals_ask_and_then_insist():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for first in (signal.SIGTERM, signal.SIGINT):
        with graceful_stop() as stop_requested:
            assert not stop_requested()
            os.kill(os.getpid(), first)
            assert stop_requested() and stop_requested()
            os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
