"""What befalls a run of one process."""

import random
import signal
import time
from collections.abc import Iterator

from tests.chaos.place import Outcome, Place, ended, last_line, settle, told
from tests.processes import PLAIN, fork
from tests.test_nothing_lost import STEPS, command, interrupt, logged
from train.exit_codes import RESTART
from train.workdir import read_json

ROUND = 10  # kills of one run
VARIANTS = (
    {},
    {"steps_per_dispatch": 4},
    {"eval_every": 7, "test_at": "best", "keep": 1},
    {"checkpoint_every": 7},
    {"model.mixers": "mamba", "model.position": "none"},
)


def rounds(n: int) -> list[int]:
    """n tries, shared out to runs."""
    return [min(ROUND, n - first) for first in range(0, n, ROUND)]


def kills(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """One in four while the process starts, compiles or restores; the others a few steps after the last checkpoint."""
    for number, times in enumerate(rounds(n)):
        folder, settings, outcomes = place.new(), VARIANTS[number % len(VARIANTS)], []
        for _ in range(times):
            if rng.random() < 0.25:
                process = fork(*command(folder, **settings))
                time.sleep(rng.uniform(0, 3))
                process.send(signal.SIGKILL)
                process.wait(60)
            else:
                process = interrupt(folder, signal.SIGKILL, rng, settings=settings)
            finished = (folder / "result.json").exists()
            outcomes.append("" if process.wait() == -signal.SIGKILL and not finished else last_line(process))
        yield from settle(outcomes, place.finish(folder, settings))


def notices(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    for times in rounds(n):
        folder, outcomes = place.new(), []
        for i in range(times):
            process = interrupt(folder, (signal.SIGTERM, signal.SIGINT)[i % 2], rng)
            outcomes.append("" if process.wait() == 0 and "saved" in process.stdout else last_line(process))
        yield from settle(outcomes, place.finish(folder))


SLOW = {"steps": 400, "checkpoint_every": 40, "eval_every": 200, "model.width": 32, "data.mqar.length": 64}


def preempted(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """The work that notices cost: steps that had to be taken again."""
    folder = place.new()
    for _ in range(n):
        interrupt(folder, signal.SIGTERM, rng, SLOW["steps"] // n, SLOW)
    final = place.finish(folder, SLOW)
    row = {} if final else read_json(folder / "result.json")["goodput"]
    share = row.get("repeated_steps", SLOW["steps"]) / SLOW["steps"]
    place.notes |= {"repeated": share, "goodput": row.get("goodput"), "attempts": row.get("attempts")}
    yield from settle(n * ["" if share < 0.03 else f"{share:.1%} of the steps were repeated"], final)


def unannounced(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """The same of kills, beside the steps since the last checkpoint, which are lost in any case."""
    folder, lost, reached = place.new(), [], 0
    for left in range(n, -1, -1):
        process = fork(*command(folder, **SLOW))
        goal = reached + rng.randint(1, SLOW["steps"] // n - 5) if left else SLOW["steps"] + 1
        while process.running() and logged(folder) < goal:  # past where the last one was killed
            time.sleep(0.002)
        if left:
            process.send(signal.SIGKILL)
        process.wait(60)
        lost.append(reached - int((process.stdout.partition("resumed at step ")[2].split() or [0])[0]))
        reached = logged(folder)
    final = place.finish(folder, SLOW)
    share = sum(max(steps - SLOW["checkpoint_every"], 0) for steps in lost) / SLOW["steps"]
    place.notes |= {"repeated": sum(lost) / SLOW["steps"], "beside the interval": share}
    if not final and (known := read_json(folder / "result.json")["goodput"]["repeated_steps"]) != sum(lost):
        final = f"{known} repeated steps are on its account, not {sum(lost)}"
    yield from settle(n * ["" if share < 0.03 else f"{share:.1%} of the steps beside the interval"], final)


IMPATIENT = {"watchdog.factor": 3, "watchdog.seconds": 2}


def stopped(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """As a laptop that sleeps, for longer than the watchdog would wait."""
    for _ in range(n):
        folder, settings = place.new(), {"steps": 10 * STEPS, "checkpoint_every": STEPS} | IMPATIENT
        process, goal = fork(*command(folder, **settings)), rng.randint(10, STEPS)
        with ended(process):
            while logged(folder) < goal and process.running():
                time.sleep(0.01)
            process.send(signal.SIGSTOP)
            time.sleep(rng.uniform(5, 7))
            process.send(signal.SIGCONT)
            outcome = last_line(process) if process.wait(200) else ""
        yield outcome or place.finish(folder, settings)


def stuck(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """A step that never ends."""
    for _ in range(n):
        folder, settings, at = place.new(), {"steps": STEPS} | IMPATIENT, rng.randint(8, STEPS)
        process = fork("tests.stuck", str(at), *command(folder, **settings))
        outcome = told(process, RESTART, "stuck in 'step'")
        kept = folder / "stacks.0.txt"
        outcome = outcome or ("" if kept.exists() and "stuck.py" in kept.read_text() else "no stacks")
        yield outcome or place.finish(folder, settings)


SHIFTS = (3600, -3600, 86400, -86400, 3e8, -3e8)


def clocks(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """Set forward and back while the run goes on, and between its attempts."""
    began, folder, outcomes = time.monotonic(), place.new(), []
    for i in range(n):
        process = fork("tests.shifted", str(SHIFTS[i % len(SHIFTS)]), *command(folder))
        goal = min(logged(folder) + rng.randint(1, 9), STEPS - 1)
        while process.running() and logged(folder) < goal:
            time.sleep(0.005)
        process.send(rng.choice((signal.SIGTERM, signal.SIGKILL)))
        outcomes.append("" if process.wait(60) in (0, -signal.SIGTERM, -signal.SIGKILL) else last_line(process))
    final = place.finish(folder)
    if not final:
        wall, took = read_json(folder / "result.json")["goodput"]["wall_s"], time.monotonic() - began
        place.notes |= {"wall": wall, "took": round(took, 2)}
        final = "" if 0 < wall <= took + 1 else f"{wall} s are on its account, and {took:.0f} s have passed"
    yield from settle(outcomes, final)


def rivals(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """Three processes begin on one folder at once; the one that gets it is killed, and the next three come."""
    folder, outcomes = place.new(), []
    for _ in range(n):
        three = [fork(*command(folder)) for _ in range(3)]
        with ended(*three):
            deadline = time.monotonic() + 100
            goal = min(logged(folder) + 5, STEPS - 1)
            while time.monotonic() < deadline and (
                sum(process.running() for process in three) > 1 or logged(folder) < goal
            ):
                time.sleep(0.01)
            trains = [process for process in three if process.running()]
            refused = [told(process, 2, "is in use by pid") for process in three if process not in trains]
            outcome = "" if len(trains) == 1 else f"{len(trains)} of them train"
            outcomes.append(outcome or "; ".join(filter(None, refused)))
            for process in trains:
                process.send(signal.SIGKILL)
                process.wait(60)
    yield from settle(outcomes, place.finish(folder))


MESHES = (
    (1, {}),
    (2, {"mesh.data": 2}),
    (2, {"mesh.data": 1, "mesh.fsdp": 2}),
    (4, {"mesh.data": 2, "mesh.fsdp": 2}),
    (2, {"mesh.data": 1, "mesh.tensor": 2}),
    (4, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2}),
    (2, {"mesh.data": 1, "mesh.sequence": 2}),
)


def meshes(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """Killed or asked to stop on one mesh, resumed on another: the same run within rounding."""
    for times in rounds(n):
        folder, outcomes = place.new(), []
        for _ in range(times):
            devices, settings = rng.choice(MESHES)
            flags = f"--xla_force_host_platform_device_count={devices} {PLAIN['XLA_FLAGS']}"
            sign = rng.choice((signal.SIGTERM, signal.SIGKILL))
            process = interrupt(folder, sign, rng, settings=settings, XLA_FLAGS=flags)
            # One that is asked to stop before it has begun has nothing to save.
            right = (-signal.SIGKILL,) if sign == signal.SIGKILL else (0, -signal.SIGTERM)
            outcomes.append("" if process.wait() in right else last_line(process))
        yield from settle(outcomes, place.finish(folder, exact=False))
