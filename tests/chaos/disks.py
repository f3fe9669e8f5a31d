"""What befalls a run whose disk is full: of its checkpoints, of its log, of both.

The disk is a tmpfs of a few hundred kilobytes, with other people's files on it; where none may be mounted, a limit on
the size of files (RLIMIT_FSIZE), which knows no difference between them.
"""

import contextlib
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.place import Outcome, Place, difference, ended, settle, told
from tests.processes import fork
from tests.test_nothing_lost import command, logged

SIZE = 16 << 20  # bytes of the disk: room for a run
FULL = ("No space left", "File too large", "the disk has")
SETTINGS = {"steps": 60, "eval_every": 20, "checkpoint_every": 5}


def full(part: str) -> Callable[[Place, random.Random, int], Iterator[Outcome]]:
    """The disk fills while a run goes on that has its checkpoints, its log or both there; then there is room again."""

    def trial(place: Place, rng: random.Random, n: int) -> Iterator[Outcome]:
        calm = place.calm(lambda path: [fork(*command(path, **SETTINGS))], "disks")
        for _ in range(n):
            folder, goal = place.new(), rng.randint(0, SETTINGS["steps"] // 2)
            with small_disk(folder, part) as disk:
                place.notes |= {"by": "tmpfs" if disk else "RLIMIT_FSIZE"}
                process = fork(*command(folder, **SETTINGS))
                with ended(process):
                    while process.running() and logged(folder) < goal:
                        time.sleep(0.01)
                    fill(disk, part, rng) if disk else limit(process, rng)
                    outcomes = [ending(process)]
                place.notes["had no room"] = place.notes.get("had no room", 0) + (process.wait() != 0)
                if disk:
                    (disk / "ballast").unlink()
                again = fork(*command(folder, **SETTINGS))
                code = again.wait(200)
                final = difference(folder, calm) if code == 0 else f"ended with {code}: {again.stderr[-200:]}"
                yield from settle(outcomes, final)

    return trial


def ending(process: fork) -> Outcome:
    """A process that noticed says so in a line; one that had all it needed is done."""
    return "" if process.wait(100) == 0 else told(process, 2, *FULL)


def fill(disk: Path, part: str, rng: random.Random) -> None:
    """Takes all the room there is, but for a little: less than the run still needs."""
    left = rng.choice((0, 0, 4096) if part == "metrics" else (0, 0, 4096, 16384, 65536))
    with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
        file.write(bytes(max(shutil.disk_usage(disk).free - left, 0)))


def limit(process: fork, rng: random.Random) -> None:
    """What the process says goes into a file as well, so that some room is left."""
    size = rng.choice((4096, 6144, 8192))
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(folder: Path, part: str) -> Iterator[Path | None]:
    """A run's folder of which a part lies on a disk of its own; None where that is not permitted."""
    checkpoints = folder / "checkpoints"
    disk = checkpoints if part == "checkpoints" else folder
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], capture_output=True
    ).returncode
    if mounted != 0:
        yield None
        return
    try:
        if part == "metrics":
            elsewhere = folder.with_name(f"{folder.name}.checkpoints")
            elsewhere.mkdir()
            checkpoints.symlink_to(elsewhere)
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
