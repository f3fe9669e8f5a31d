"""What befalls the files of a run that is not going on."""

import functools
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from tests.chaos.place import Outcome, Place, told
from tests.processes import fork
from tests.test_elastic import digest
from tests.test_nothing_lost import command, interrupt, losses
from train import checkpoint
from train import config as configs
from train.checkpoint import Checkpoints
from train.run import prepare

OLDER, NEWEST = 2, 4
SAVED = {"steps": NEWEST, "eval_every": 0, "checkpoint_every": OLDER, "keep": 3}
Harm = Callable[[Path, Path, random.Random], None]  # to a step, the one before it given too


def bit(step: Path, older: Path, rng: random.Random) -> None:
    """Of any file alike, or of any byte alike."""
    files = files_of(step)
    weights = [file.stat().st_size for file in files] if rng.random() < 0.5 else None
    (file,) = rng.choices(files, weights)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(step: Path, older: Path, rng: random.Random) -> None:
    file = rng.choice(files_of(step))
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def take(step: Path, older: Path, rng: random.Random) -> None:
    """Some files, or a folder of them."""
    if rng.random() < 0.2:
        shutil.rmtree(rng.choice([path for path in step.rglob("*") if path.is_dir()]))
        return
    files = files_of(step)
    for file in rng.sample(files, rng.randint(1, min(3, len(files)))):
        file.unlink()


def swap(step: Path, older: Path, rng: random.Random) -> None:
    """Two files of a step, or one of each of two steps."""
    while True:
        one, other = rng.choice(files_of(step)), rng.choice(files_of(rng.choice((step, older))))
        mine, theirs = one.read_bytes(), other.read_bytes()
        if mine != theirs:
            one.write_bytes(theirs)
            if other.is_relative_to(step):
                other.write_bytes(mine)
            return


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


@functools.cache
def sample(folder: Path) -> tuple[Path, Any, dict[int, str]]:
    """A run with two checkpoints, what fits them, and their bits."""
    whole = folder / "whole"
    if code := (process := fork(*command(whole, **SAVED))).wait(200):
        raise RuntimeError(f"an undisturbed run ended with {code}: {process.stderr}")
    words = [word.removeprefix("--config.").partition("=") for word in command(whole, **SAVED) if "config." in word]
    run = prepare(configs.load("configs/debug.py", [(key, value) for key, _, value in words]))
    bits = {step: digest(checkpoint.load(whole / "checkpoints", run.abstract, step)) for step in (OLDER, NEWEST)}
    return whole, run.abstract, bits


def checkpoints(harm: Harm) -> Callable[[Place, random.Random, int], Iterator[Outcome]]:
    def trial(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
        whole, like, bits = sample(place.folder)
        for _ in range(n):
            folder = shutil.copytree(whole / "checkpoints", place.new())
            harm(checkpoint.step_folder(folder, NEWEST), checkpoint.step_folder(folder, OLDER), rng)
            yield found(folder, like, bits)
            shutil.rmtree(folder)

    return trial


def found(folder: Path, like: Any, bits: dict[int, str]) -> Outcome:
    """Whether the harmed step was seen through, and the one before it taken, bit for bit."""
    try:
        with Checkpoints(folder, keep=3) as saved:
            step, state = saved.restore(like)
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if step != OLDER:
        return f"step {step} was believed"
    return "" if digest(state) == bits[OLDER] else f"step {step} has other bits"


SMALL = ("config.json", "data.json", "changes.json", "goodput.json", ".lock")


def small(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
    """A bit of one of the small files: the next start says so in a line, or the run goes on as if nothing were."""
    folder = place.new()
    interrupt(folder, signal.SIGTERM, rng, settings=SMALLER)
    calm = place.calm(lambda path: [fork(*command(path, **SMALLER))], "small files")
    for _ in range(n):
        harmed = shutil.copytree(folder, place.new())
        file = harmed / rng.choice(SMALL)
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        process = fork(*command(harmed, **SMALLER))
        if process.wait(200):
            yield told(process, 2, file.name, "another config", "has changed")
        else:
            yield "" if losses(harmed) == losses(calm) else f"{file.name}: another run"


SMALLER = {"steps": 20, "eval_every": 10, "checkpoint_every": 4}
