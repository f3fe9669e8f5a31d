"""What befalls a run of two processes."""

import random
import signal
import time
from collections.abc import Callable, Iterator

from tests.chaos.place import Outcome, Place, ended, last_line, settle
from tests.test_hosts import command, losses, pair, train_until
from train.checkpoint import steps
from train.exit_codes import RESTART
from train.manifest import step_folder

STEPS = 60
SETTINGS = {"steps": STEPS, "eval_every": 20, "checkpoint_every": 5}


def start(folder, **more) -> list:
    return pair(*[command(folder, **SETTINGS | more)] * 2)


def impatient(folder) -> list:
    return start(folder, **{"watchdog.factor": 3, "watchdog.seconds": 4})


def reached(folder, ahead: int) -> int:
    """A step a little further on, and before the last."""
    return min(max(losses(folder), default=0) + ahead, STEPS - 2)


def signals(sign: signal.Signals, everyone: bool) -> Callable[[Place, random.Random, int], Iterator[Outcome]]:
    def trial(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
        folder, outcomes = place.new(), []
        for i in range(n):
            two = start(folder)
            with ended(*two):
                train_until(folder, reached(folder, rng.randint(1, 8)), two)
                for process in two if everyone else [two[i % 2]]:
                    process.send(sign)
                outcomes.append(stopped_together(folder, two))
        yield from settle(outcomes, place.compare(folder, start, "two"))

    return trial


def stopped_together(folder, two: list) -> Outcome:
    codes = [process.wait(100) for process in two]
    if codes != [0, 0]:
        return f"ended with {codes}: {last_line(two[0])}"
    at = {process.stdout.partition("stopped at step ")[2].split(",")[0] for process in two}
    if len(at) != 1 or not at <= set(map(str, steps(folder / "checkpoints"))):
        return f"stopped at {sorted(at)}, saved are {steps(folder / 'checkpoints')}"
    hosts = len(list(step_folder(folder / "checkpoints", int(*at)).glob("signed.*.json")))
    return "" if hosts == 2 else f"{hosts} of 2 have signed step {at}"


def lost(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """One is killed; the other ends with the code to start again."""
    folder, outcomes = place.new(), []
    for i in range(n):
        two = start(folder)
        with ended(*two):
            train_until(folder, reached(folder, rng.randint(1, 8)), two)
            time.sleep(rng.uniform(0, 0.2))
            two[i % 2].send(signal.SIGKILL)
            code = two[1 - i % 2].wait(60)
            outcomes.append("" if code == RESTART else f"ended with {code}: {last_line(two[1 - i % 2])}")
    yield from settle(outcomes, place.compare(folder, start, "two"))


def paused(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """One is stopped for a while; the other waits for it."""
    for i in range(n):
        folder = place.new()
        two = start(folder)
        with ended(*two):
            train_until(folder, reached(folder, rng.randint(1, 20)), two)
            two[i % 2].send(signal.SIGSTOP)
            time.sleep(rng.uniform(2, 4))
            two[i % 2].send(signal.SIGCONT)
            codes = [process.wait(100) for process in two]
            outcome = "" if codes == [0, 0] else f"ended with {codes}: {last_line(two[0])}"
        yield outcome or place.compare(folder, start, "two")


def frozen(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """One is stopped for good; the other's watchdog ends it, and the job goes on when it is started again."""
    for i in range(n):
        folder, still = place.new(), i % 2
        two = impatient(folder)
        with ended(*two):
            train_until(folder, reached(folder, rng.randint(10, 20)), two)
            two[still].send(signal.SIGSTOP)
            code = two[1 - still].wait(100)
            outcome = "" if code == RESTART else f"ended with {code}: {last_line(two[1 - still])}"
            stacks = folder / f"stacks.{1 - still}.txt"
            outcome = outcome or ("" if stacks.exists() else "no stacks")
        yield outcome or place.compare(folder, impatient, "two, impatient")
