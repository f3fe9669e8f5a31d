"""The line between processes, here between threads: what all get to hear, and what they make of a silence."""

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from model.errors import UserError
from train import hosts, line
from train.door import open_door

pytestmark = pytest.mark.quick


class Ends(list):
    """How each process ended: (rank, exit code, line)."""

    def of(self, rank: int):
        def end(code: int, text: str) -> None:
            self.append((rank, code, text))

        return end

    def wait(self, *ranks: int) -> list:
        deadline = time.monotonic() + 20
        while not {*ranks} <= {rank for rank, *_ in self} and time.monotonic() < deadline:
            time.sleep(0.01)
        return sorted(end for end in self if end[0] in ranks)


@contextlib.contextmanager
def connected(size: int):
    """The lines of so many processes, and how they end."""
    ends = Ends()
    listener, invitation = line.listen()
    with (
        socket.create_connection(("localhost", listener.getsockname()[1])) as stranger,
        ThreadPoolExecutor(size) as pool,
    ):
        stranger.sendall(b'{"word": "guess", "rank": 1, "name": "x"}\n')  # has no say
        first = pool.submit(line.answer, listener, size, invitation, end=ends.of(0))
        others = [pool.submit(line.call, "localhost", invitation, rank, end=ends.of(rank)) for rank in range(1, size)]
        lines = [found.result(20) for found in (first, *others)]
    try:
        yield lines, ends
    finally:
        for one in lines:
            one.close()


def everywhere(lines, function):
    """What the function, run by every process at its own pace, returns or raises there."""

    def run(one):
        time.sleep(random.uniform(0, 0.02))
        try:
            return function(one)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(lines)) as pool:
        return list(pool.map(run, lines))


def test_all_get_what_each_gave():
    with connected(4) as (lines, ends):
        for n in range(20):
            assert (
                everywhere(lines, lambda one, n=n: one.gather("n", [one.rank, n])) == [[[i, n] for i in range(4)]] * 4
            )
        large = "x" * 300_000
        assert everywhere(lines, lambda one: one.gather("large", large)[3] == large) == [True] * 4
    assert not ends  # leaving in good order is no loss


def test_all_decide_alike(monkeypatch):
    here = threading.local()
    monkeypatch.setattr(hosts, "the_line", lambda: here.line)

    def on(function):
        def run(one):
            here.line = one
            return function(one)

        return run

    def settings(one):
        return {"seed": 0, "optim.lr": 0.002 if one.rank == 2 else 0.001}

    def missing():
        raise FileNotFoundError(2, "No such file or directory", "book.txt")

    with connected(3) as (lines, ends):
        assert everywhere(lines, on(lambda one: hosts.agree(lambda: f"of {one.rank}"))) == ["of 0"] * 3
        told = {str(error) for error in everywhere(lines, on(lambda one: hosts.agree(missing)))}
        assert told == {"cannot use book.txt: No such file or directory"}
        assert everywhere(lines, on(lambda one: hosts.same(lambda: {"seed": 0}))) == [None] * 3
        told = {str(error) for error in everywhere(lines, on(lambda one: hosts.same(lambda: settings(one))))}
        assert told == {f"process 2 on {socket.gethostname()} differs from process 0: optim.lr is 0.002, not 0.001"}
    assert not ends


def test_all_stop_at_the_same_step():
    for seed in range(5):
        rng = random.Random(seed)
        pauses, asked, at = [rng.uniform(0, 0.003) for _ in range(3)], rng.randrange(3), rng.randrange(30)
        with connected(3) as (lines, ends):
            turn = threading.Barrier(3)  # as in training: nobody is more than a step ahead

            def train(one, pauses=pauses, turn=turn, asked=asked, at=at):
                for step in range(1, 500):
                    time.sleep(pauses[one.rank])
                    if step == at and one.rank == asked:
                        one.stop()
                        one.stop()  # schedulers repeat themselves
                    if one.stop_requested():
                        assert one.stop_requested()
                        turn.abort()
                        return step
                    with contextlib.suppress(threading.BrokenBarrierError):
                        turn.wait(20)

            stopped = everywhere(lines, train)
            assert len(set(stopped)) == 1 and stopped[0] < 500
        assert not ends


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_is_named_to_all_others(lost):
    with connected(3) as (lines, ends):
        lines[lost]._ending = True  # it says nothing more
        for connection in lines[lost]._sockets.values():
            connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that dies
        others = [rank for rank in range(3) if rank != lost]
        found = ends.wait(*others)
    assert [(rank, code) for rank, code, _ in found] == [(rank, line.LOST) for rank in others]
    assert all(f"process {lost} on" in text and "\n" not in text for _, _, text in found)


@pytest.mark.parametrize("code, theirs", [(2, 2), (1, line.LOST)])
def test_a_failure_of_one_ends_all(code, theirs):
    with connected(3) as (lines, ends):
        lines[2].fail(code, "the disk is full")
        found = ends.wait(0, 1)
    assert [end[:2] for end in found] == [(0, theirs), (1, theirs)]
    assert all(f"process 2 on {socket.gethostname()}: the disk is full" in text for *_, text in found)


def test_a_silent_process_is_waited_for_by_name(monkeypatch, capfd):
    for name, seconds in dict(BEAT=0.02, HUSH=0.2).items():
        monkeypatch.setattr(line, name, seconds)
    with connected(2) as (lines, ends):
        asleep = threading.Event()
        monkeypatch.setattr(lines[1], "_beat", asleep.wait)  # its watch stands still
        time.sleep(0.5)
        said = capfd.readouterr().err
        assert f"waiting for process 1 on {socket.gethostname()}" in said and lines[0].silent()
        assert not ends  # it is there, and may wake
        monkeypatch.setattr(lines[1], "_beat", type(lines[1])._beat.__get__(lines[1]))
        asleep.set()
        deadline = time.monotonic() + 20
        while "is back" not in said and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capfd.readouterr().err
        assert "process 1 on" in said and "is back" in said
        monkeypatch.setattr(line, "PATIENCE", 0.3)
        asleep.clear()
        monkeypatch.setattr(lines[1], "_beat", asleep.wait)
        assert ends.wait(0)[0][:2] == (0, line.LOST)
        asleep.set()


def test_the_first_process_is_waited_for_no_longer_than_the_others(monkeypatch):
    for name, seconds in dict(BEAT=0.02, HUSH=0.2, PATIENCE=0.5).items():
        monkeypatch.setattr(line, name, seconds)
    with connected(3) as (lines, ends):
        awake = threading.Event()
        monkeypatch.setattr(lines[0], "_beat", awake.wait)  # its watch stands still
        found = ends.wait(1, 2)
        awake.set()
    assert [end[:2] for end in found] == [(1, line.LOST), (2, line.LOST)]
    assert all(f"process 0 on {socket.gethostname()} gave no sign of life" in text for *_, text in found)


def test_a_door_stays_open_when_what_is_behind_it_closes():
    """Else JAX's client aborts the process with pages of stacks in the moment that the first process dies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, _, port = open_door(f"localhost:{server.getsockname()[1]}").rpartition(":")
        near = socket.create_connection((host, int(port)), timeout=20)
        far, _ = server.accept()
        for sender, receiver in ((near, far), (far, near)):
            sender.sendall(b"x" * 100_000)
            received = 0
            while received < 100_000:
                received += len(receiver.recv(1 << 16))
        far.close()
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(1)
        near.close()

        near = socket.create_connection((host, int(port)), timeout=20)
        far, _ = server.accept()
        near.close()
        far.settimeout(20)
        assert far.recv(1) == b""  # the other way it closes
        far.close()
