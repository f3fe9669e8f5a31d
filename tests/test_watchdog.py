"""A run that hangs ends by itself, says where it hung, and goes on when it is started again; no other run does."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from model.errors import UserError
from tests.processes import fork
from tests.test_hosts import command, losses, pair, train_until
from tests.test_train import load
from train import watchdog
from train.clock import PHASES, Clock
from train.exit_codes import RESTART
from train.identity import refuse_changes
from train.line import LOST
from train.watchdog import LONG, WARM, Watchdog, limit


@pytest.mark.quick
def test_what_is_usual_sets_the_limit():
    steps = WARM * [2.0]
    assert limit("step", steps, 20, 10) == limit("data", steps, 20, 10) == 40
    assert limit("step", steps, 3, 10) == 10, "no hiccup counts"
    assert limit("step", [*steps, 500.0], 20, 10) == 40, "one slow step does not change what is usual"
    assert limit("step", steps[1:], 20, 10) == LONG * 10, "not known yet"
    for phase in PHASES:
        assert limit(phase, [], 20, 10) == LONG * 10
        assert limit(phase, WARM * [30.0], 20, 10) == 600
    assert limit("evaluate", steps, 20, 10) == limit("save", steps, 20, 10) == LONG * 10


def watched(clock: Clock, folder, seconds: float = 0.2, factor: float = 2.0) -> tuple[Watchdog, list[int]]:
    ends: list[int] = []
    return Watchdog(clock, factor, seconds, folder, ends.append), ends


def warm() -> Clock:
    clock = Clock()
    for _ in range(WARM + 1):
        clock.enter("data")
        clock.enter("step")
    return clock


@pytest.mark.quick
def test_it_barks_once_and_leaves_every_stack(tmp_path, capfd):
    clock, held = warm(), threading.Event()

    def far_away() -> None:
        held.wait(10)

    threading.Thread(target=far_away).start()
    clock.enter("step")
    dog, ends = watched(clock, tmp_path)
    with dog:
        deadline = time.monotonic() + 10
        while not ends and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
    held.set()
    assert ends == [RESTART] == [LOST] == [75]
    kept, said = (tmp_path / "stacks.0.txt").read_text(), capfd.readouterr().err
    for text in (kept, said):
        assert "far_away" in text and "test_it_barks_once" in text and "stuck in 'step' for 0 s" in text
    assert said.splitlines()[-1].startswith("error: stuck in 'step'") and "started again it resumes" in said


@pytest.mark.quick
@pytest.mark.parametrize("why", ["off", "alive", "evaluating", "left"])
def test_it_is_silent_otherwise(why, tmp_path):
    clock = warm()
    dog, ends = watched(clock, tmp_path, seconds=0.1, factor=0.0 if why == "off" else 2.0)
    with dog:
        clock.enter("evaluate" if why == "evaluating" else "step")
        if why == "left":
            dog.__exit__()
        for _ in range(50):
            time.sleep(0.01)
            if why == "alive":
                clock.enter("step")
    assert ends == [] and not list(tmp_path.iterdir())


@pytest.mark.quick
@pytest.mark.parametrize("jump", [3600.0, 0.0])  # the second shows that the first is what keeps it silent
def test_a_process_that_slept_has_taken_no_time(jump, tmp_path, monkeypatch):
    clock, now, looks = warm(), [100.0], []
    dog, ends = watched(clock, tmp_path, seconds=10)

    def look(every: float) -> bool:
        looks.append(every)
        now[0] += jump if len(looks) == 5 else every
        return len(looks) > (9 if jump else 20)

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(dog, "_done", SimpleNamespace(wait=look))
    dog._watch()
    assert ends == ([] if jump else [RESTART])


@pytest.mark.quick
def test_its_settings():
    with pytest.raises(UserError, match=r"watchdog.factor is -1.0; allowed: a number of at least 0; closest: 0.0"):
        load(("watchdog.factor", "-1"))
    with pytest.raises(UserError, match=r"watchdog.seconds is 0.0; allowed: a number above 0"):
        load(("watchdog.seconds", "0"))
    changes = {"watchdog.seconds": (300.0, 60.0)}
    refuse_changes(changes, load(), None)  # may change on the way


PATIENCE = {"watchdog.factor": 3, "watchdog.seconds": 2, "checkpoint_every": 2}


@pytest.mark.scale
def test_a_run_that_hangs_ends_and_goes_on_as_if_nothing_had_happened(tmp_path):
    words = command(tmp_path / "run", **PATIENCE)
    stuck = fork("tests.stuck", "9", *words)
    assert stuck.wait(100) == RESTART, stuck.stderr
    assert "stuck in 'step'" in stuck.stderr.splitlines()[-1]
    kept = (tmp_path / "run" / "stacks.0.txt").read_text()
    assert "stuck.py" in kept and "loop.py" in kept
    assert fork("tests.stuck", "9", *words).wait(100) == 0
    assert fork(*command(tmp_path / "calm")).wait(100) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


@pytest.mark.scale
def test_a_run_that_was_stopped_and_continued_goes_on(tmp_path):
    process = fork(*command(tmp_path, **PATIENCE | {"steps": 2000, "eval_every": 0, "checkpoint_every": 0}))
    train_until(tmp_path, 10, [process])
    process.send(signal.SIGSTOP)
    time.sleep(5)
    reached = max(losses(tmp_path))
    process.send(signal.SIGCONT)
    train_until(tmp_path, reached + 20, [process])
    process.send(signal.SIGTERM)
    assert process.wait(60) == 0 and not (tmp_path / "stacks.0.txt").exists()


@pytest.mark.scale
def test_all_hosts_of_a_stuck_job_leave_their_stacks_and_end(tmp_path):
    words = command(tmp_path / "run", **PATIENCE)
    hosts = pair(*[["tests.stuck", "9", *words]] * 2)
    assert [host.wait(200) for host in hosts] == [RESTART] * 2, [host.stderr for host in hosts]
    assert all((tmp_path / "run" / f"stacks.{rank}.txt").exists() for rank in range(2))
    hosts = pair(words, words)
    assert [host.wait(200) for host in hosts] == [0, 0], [host.stderr for host in hosts]
