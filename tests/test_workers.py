"""Costly examples made by many processes: the same bits by any number of them, and none left behind."""

import contextlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from data import TASKS, build, pipeline, workers
from data.kept import Blocks, FixedSets
from data.workers import Block, Workers
from model.errors import UserError
from tests.processes import ROOT
from tests.test_feed import eventually, state
from tests.test_kept import bits
from train import config as configs
from train.feed import Feed
from train.run import prepare

EASY = {"difficulty": "easy", "n_train": 640}
SHORT = {"length": 100, "max_depth": 6, "min_length": 10, "max_length": 100}


@pytest.fixture(scope="module")
def two():
    """Two workers that are called at once."""
    found = Workers(2, start=0.0)
    yield found
    found.close()


def blocks_of(name: str, section: dict, n: int) -> list[Block]:
    task = build(name, section)
    return [Block(task, 0, "train", 0, i, i) for i in range(0, n * task.block, task.block)]


def pids(found: Workers) -> list[int]:
    return [process.pid for process in found._processes.values()]


def fresh(monkeypatch, found: Workers) -> None:
    """Nothing has been made, and these are to make it."""
    monkeypatch.setattr(pipeline, "WORKERS", found)
    monkeypatch.setattr(pipeline, "FIXED", FixedSets(64 << 20))
    monkeypatch.setattr(pipeline, "PASSING", Blocks(1 << 20))


# --- the same bits ---


@pytest.mark.parametrize(("name", "section"), [("pathfinder", EASY), ("listops", SHORT)])
def test_a_block_is_the_same_whoever_makes_it(two, name, section):
    blocks = blocks_of(name, section, 5)
    made = dict(two.make(blocks))
    assert two.hands == len(pids(two)) == 2
    assert {block: bits(block.make()) for block in blocks} == {block: bits(example) for block, example in made.items()}


@pytest.mark.parametrize("room", [1 << 20, 1000], ids=["kept", "too large to keep"])
def test_batches_are_the_same_by_any_number_of_workers(two, room, monkeypatch):
    task, seen = build("pathfinder", EASY | {"protocol": "s4"}), []
    for found in (Workers(0), two):
        fresh(monkeypatch, found)
        monkeypatch.setattr(pipeline, "FIXED", FixedSets(room))
        batches = [pipeline.batch_at(task, 0, "train", 5, step) for step in range(2)]
        batches += [batch.rows(np.arange(70)) for batch in pipeline.eval_batches(task, 0, "test", 70, 1)]
        seen.append([bits(batch) for batch in batches])
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("quickly_compiled")
def test_a_run_has_the_same_bits_by_any_number_of_workers(two, monkeypatch):
    task = [(f"data.listops.{key}", str(value)) for key, value in (SHORT | {"n_train": 40}).items()]
    tiny = [("data.task", "listops"), ("model.width", "16"), ("model.layers", "1"), ("steps", "4"), ("seed", "3")]
    run, ends = prepare(configs.load("configs/debug.py", [*task, *tiny])), []
    for found in (Workers(0), two):
        fresh(monkeypatch, found)
        with Feed(run, state()) as batches:
            now = run.init()
            for _ in range(4):
                now, _ = run.train_step(now, next(batches))
        ends.append([np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(now.params))])
    assert ends[0] == ends[1]


# --- when they are called ---


@pytest.mark.quick
def test_workers_are_for_what_takes_long(monkeypatch):
    found = Workers(2)
    fresh(monkeypatch, found)
    pipeline.batch_at(build("listops", SHORT), 0, "train", 64, 0)
    assert found.hands == 1 and not pids(found), "some milliseconds of work"
    monkeypatch.setattr(pipeline, "WORKERS", None)
    pipeline.batch_at(build("mqar", {}), 0, "train", 64, 0)
    costly = {name for name, task in TASKS.items() if task.costly is not False}
    assert costly == {"listops", "pathfinder"} and not Workers(0, start=0.0).count
    assert build("pathfinder", {}).costly and build("listops", {}).costly


@pytest.mark.quick
def test_one_core_is_left_to_the_model(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    assert workers.spare_cores() == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(500), raising=False)
    assert workers.spare_cores() == workers.MOST
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert workers.spare_cores() == 0


def test_no_more_is_made_than_waits_to_be_taken(two, monkeypatch):
    sent, send = [], multiprocessing.connection.Connection.send
    monkeypatch.setattr(
        multiprocessing.connection.Connection, "send", lambda pipe, block: sent.append(block) or send(pipe, block)
    )
    with contextlib.closing(two.make(blocks_of("listops", SHORT, 20))) as made:
        for taken in range(1, 10):
            next(made)
            assert len(sent) < 2 * 2 + taken
    assert two.count == 2, "whoever asks may stop"


# --- their end ---


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


ASKS = """
import signal

from data import build
from data.workers import Block, Workers

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are started without
found, task = Workers(2, start=0.0), build("pathfinder", {})
for made in found.make([Block(task, 0, "train", 0, i, i) for i in range(0, 160_000, 64)]):
    print(*(process.pid for process in found._processes.values()), flush=True)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda sign: sign.name)
def test_none_outlives_the_process_that_asked(sign):
    command = [sys.executable, "-c", ASKS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asking:
        found = [int(word) for word in asking.stdout.readline().split()]
        assert len(found) == 2 and all(map(alive, found))
        ended = None
        while ended is None:  # what interrupts Python where it cannot raise, as in a finaliser, is lost
            asking.send_signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = asking.communicate(timeout=5)  # it may be printing still
    assert asking.returncode == -sign and eventually(lambda: not any(map(alive, found)))


def test_what_a_lost_worker_had_in_hand_is_made_by_another():
    found, blocks = Workers(2, start=0.0), blocks_of("pathfinder", EASY, 8)
    making = found.make(blocks)
    made = [next(making)]
    os.kill(pids(found)[0], signal.SIGKILL)
    made += making
    assert sorted(block.place for block, _ in made) == [block.place for block in blocks] and found.count == 1
    os.kill(pids(found)[0], signal.SIGKILL)
    assert eventually(lambda: all(pipe.poll() for pipe in found._processes))  # a process may be dead before its threads
    assert len(list(found.make(blocks[:2]))) == 2 and found.count == 1, "one that had nothing to do is replaced"
    found.close()


def test_what_no_worker_can_make_is_told_here(monkeypatch):
    impossible = SHORT | {"max_args": 2, "min_length": 90, "max_length": 92, "max_depth": 7}
    monkeypatch.setattr("data.listops._TRIES", 10)
    found = Workers(1, start=0.0)
    monkeypatch.setattr(workers, "SERVE", "import nothing_of_that_name")
    with pytest.raises(UserError, match="no tree of 90 < tokens < 92 in 10 tries"):
        list(found.make(blocks_of("listops", impossible, 3)))
    assert not pids(found) and len(list(found.make(blocks_of("listops", SHORT, 3)))) == 3


@pytest.mark.quick
def test_a_worker_with_nothing_to_do_ends(monkeypatch):
    monkeypatch.setattr(workers, "IDLE", 0.05)
    here, there = multiprocessing.connection.Pipe()
    serving = threading.Thread(target=workers.serve, args=(os.dup(there.fileno()),))
    serving.start()
    there.close()
    here.send(blocks_of("listops", SHORT, 1)[0])
    assert here.recv().keys() >= {"inputs", "targets"}
    serving.join(5)
    assert not serving.is_alive() and here.poll() and workers.answer(here) is None
