"""What this machine has for runs, cores and accelerators, and how runs at once share it.

What a run is given it holds by lock files that its process inherits: another launcher leaves them alone until that
process has ended, however it ends, even if the launcher that started it is gone.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from data import workers
from model.errors import UserError

T = TypeVar("T")


class Kind(NamedTuple):
    """A kind of accelerator, as it shows below /dev."""

    marker: str  # must be there: render nodes and vfio groups may belong to other hardware
    nodes: str  # one for each device
    variables: tuple[str, ...]  # any of them names the devices that a process sees; we set the first


KINDS = (
    Kind(".", "nvidia[0-9]*", ("CUDA_VISIBLE_DEVICES",)),
    Kind("kfd", "dri/renderD*", ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")),
    Kind(".", "accel[0-9]*", ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")),
    Kind("vfio/0", "vfio/[0-9]*", ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")),
)


@dataclass(frozen=True)
class Machine:
    cores: tuple[int, ...]
    devices: tuple[str, ...] = ()  # accelerators, as `variable` names them
    variable: str = ""

    @property
    def slots(self) -> int:
        """Runs at once if nothing is asked: one per accelerator, else one per core."""
        return len(self.devices) or min(len(self.cores), 8)  # on a CPU each takes about half a gigabyte


@dataclass(frozen=True)
class Share:
    """What one of several runs at once is given."""

    cores: tuple[int, ...]
    devices: tuple[str, ...] = ()
    runs: int = 1  # that have the same devices


def look(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> Machine:
    """This machine, or as much of it as the environment allows. JAX is not asked: it would take the accelerators."""
    cores = tuple(workers.cores())
    if environ.get("JAX_PLATFORMS") == "cpu":
        return Machine(cores)
    for kind in KINDS:
        nodes = list(dev.glob(kind.nodes)) if (dev / kind.marker).exists() else []
        if nodes:
            variable = next((name for name in kind.variables if name in environ), kind.variables[0])
            seen = _entries(environ[variable]) if variable in environ else tuple(map(str, range(len(nodes))))
            return Machine(cores, seen, variable if seen else "")
    return Machine(cores)


def shares(machine: Machine, slots: int) -> list[Share]:
    """What each of so many runs at once is given; where there are more runs than devices, they take turns."""
    n, tpu = len(machine.devices), machine.variable.startswith("TPU")
    if tpu and slots > n:
        raise UserError(f"--jobs={slots}, but a TPU chip serves one run at a time; allowed: 1 to {n}; closest: {n}")
    given = []
    for slot in range(slots):
        cores = share(machine.cores, slot, slots)
        if n == 0:
            given.append(Share(cores))
        elif slots > n:
            given.append(Share(cores, (machine.devices[slot % n],), len(range(slot % n, slots, n))))
        elif tpu and slots > 1:  # a part of a host's chips must be a box; one of them always is
            given.append(Share(cores, (machine.devices[slot],)))
        else:
            given.append(Share(cores, share(machine.devices, slot, slots)))
    return given


def share(things: Sequence[T], slot: int, slots: int) -> tuple[T, ...]:
    """The part of one of several runs at once; all of them where there are not enough to divide."""
    if slots > len(things):
        return tuple(things)
    return tuple(things[slot * len(things) // slots : (slot + 1) * len(things) // slots])


def environment(machine: Machine, given: Share) -> dict[str, str]:
    """The variables that keep a run to its devices; none where it has the machine to itself."""
    if given.devices == machine.devices and given.runs == 1:
        return {}
    variables = {machine.variable: ",".join(given.devices)}
    if given.runs > 1:  # they must share its memory, most of which JAX otherwise takes at the start
        fraction = "XLA_PYTHON_CLIENT_MEM_FRACTION"
        variables[fraction] = os.environ.get(fraction, f"{0.9 / given.runs:.3f}")
    if machine.variable.startswith("TPU"):  # each run is a slice of one chip, with a port of its own
        port = 8476 + machine.devices.index(given.devices[0])
        variables |= {
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": str(port),
            "CLOUD_TPU_TASK_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    return variables


class Claims:
    """Lock files of this user, held against other launchers. Where there can be none, nothing is claimed."""

    def __init__(self, folder: Path | None = None):
        self._folder = folder or Path(tempfile.gettempdir(), f"longview-{os.getuid()}")
        self._held: dict[str, int] = {}

    def take(self, names: Iterable[str]) -> bool:
        """Claims all of them or, where another launcher has one, none; what is held already stays held."""
        new: dict[str, int] = {}
        for name in set(names) - self._held.keys():
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                new[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(new[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                for file in new.values():
                    os.close(file)
                return False
            except OSError:  # a folder that is not ours, or a file system without locks
                continue
        self._held |= new
        return True

    def files(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(self._held[name] for name in names if name in self._held)

    def keep(self, names: Iterable[str]) -> None:
        """Lets go of all others."""
        for name in self._held.keys() - set(names):
            os.close(self._held.pop(name))


class Grant(NamedTuple):
    """How to start a process so that it keeps to its share."""

    environment: dict[str, str]
    cores: tuple[int, ...]  # none: wherever there is room
    files: tuple[int, ...]  # to inherit: they hold its claims as long as it lives


class Slots:
    """The places of so many runs at once, each with its share of a machine, claimed while it is used."""

    def __init__(self, machine: Machine, slots: int, claims: Claims | None = None):
        self._machine, self._shares = machine, shares(machine, slots)
        self._claims = claims or Claims()

    def __len__(self) -> int:
        return len(self._shares)

    def take(self, slot: int) -> Grant | None:
        """What the next run in a slot may use; None while its accelerators serve another launcher.

        Cores are not waited for: where another launcher has them, the run is kept to none.
        """
        given, devices, cores = self._shares[slot], self._devices(slot), self._cores(slot)
        if not self._claims.take(devices):
            return None
        pinned = bool(cores) and hasattr(os, "sched_setaffinity") and self._claims.take(cores)
        files = self._claims.files([*devices, *cores])
        return Grant(environment(self._machine, given), given.cores if pinned else (), files)

    def keep(self, slots: Iterable[int]) -> None:
        """Lets go of what only other slots need."""
        self._claims.keep(name for slot in slots for name in [*self._devices(slot), *self._cores(slot)])

    def _devices(self, slot: int) -> list[str]:
        kind = self._machine.variable.partition("_")[0].lower()
        return [f"{kind}-{device}".replace("/", "-") for device in self._shares[slot].devices]

    def _cores(self, slot: int) -> list[str]:
        cores = self._shares[slot].cores
        return [f"core-{core}" for core in cores] if cores != self._machine.cores else []


def _entries(text: str) -> tuple[str, ...]:
    """The devices that such a variable names; as for CUDA, what follows one that there cannot be is not seen."""
    words = [word.strip() for word in text.split(",")]
    ends = [i for i, word in enumerate(words) if word in ("", "-1", "NoDevFiles")]
    return tuple(words[: ends[0]] if ends else words)
