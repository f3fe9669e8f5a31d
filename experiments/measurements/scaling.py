"""How a layer of every mixer grows with the length: time and memory of a training step, as far as each goes.

Mixers share a budget of time. Next are always those that will then have had the least of it, so one that compiles long
waits for the others; what is expected not to fit into what is left is not begun. A few compile at once, and then run
one by one: on a GPU in processes of their own, as tracing is Python's, which does one thing at a time.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from data.workers import cores
from experiments.measurements.elsewhere import elsewhere
from experiments.measurements.sheet import rows_like
from experiments.measurements.speed import compiled_bytes, place
from model.contract import Context, Mixer
from model.errors import choose, out_of_memory
from model.mixers import MIXERS
from model.ops.named import implementations
from train.revision import source_digest

Row = dict[str, Any]

SHORTEST, FACTOR = 1024, 4
LONGEST = {"gpu": 2**20, "cpu": 2**14}
SIZES = {"gpu": dict(width=256, dtype="bfloat16"), "cpu": dict(width=64, dtype="float32")}
# A row's status: measured, or why its mixer goes no further.
MEASURED, NO_TIME, NO_MEMORY, FAILED = "measured", "out of time", "out of memory", "failed"
ROOT = 1.5  # the power of patterns whose stride is the root of the length
ROUNDS = 5  # at most, of which the median counts
QUEUE = 0.05  # seconds that a queue of calls lasts at least, for launching not to show
ENOUGH = 2.0  # seconds of running, after which no round is added
MOST_WORKERS = 12
HOST_SHARE = 0.5  # of a host's memory, where the device is the host

ALONE = {name: cls for name, cls in MIXERS.items() if not cls.reads_memory}


def lengths(longest: int | None = None) -> list[int]:
    """Each FACTOR times the one before."""
    last = longest or LONGEST[place()]
    found = [SHORTEST]
    while found[-1] * FACTOR <= last:
        found.append(found[-1] * FACTOR)
    return found


def make(name: str, length: int, width: int, dtype: str) -> Mixer:
    """A mixer as its defaults have it, causal if it can be; with weights for this length where it has them for each.

    Strides are the root of the length where that is what a mixer claims.
    """
    cls = ALONE[name]
    sized = {"longest": length} if hasattr(cls, "longest") else {}
    if cls.work == ROOT:
        sized["stride"] = 2 ** (length.bit_length() // 2)
    return cls(width=width, dtype=jnp.dtype(dtype), causal=not cls.both_ways_only, **sized)


def claims(cls: type[Mixer]) -> dict[str, float]:
    """The powers of the length by which a mixer says that it grows."""
    return {"claimed_memory": cls.cost, "claimed_time": cls.cost if cls.work is None else cls.work}


def asked(names: str | None) -> list[str]:
    """Mixers by their names, with commas between them; None: all that need nothing beside a row."""
    found = list(ALONE) if names is None else [name.strip() for name in names.split(",")]
    for name in found:
        choose("mixer", name, ALONE)
    return found


def rows(names: Sequence[str], lengths: Sequence[int], seconds: float, before: Sequence[Row] = ()) -> Iterator[Row]:
    """A row per mixer and length, as far as each goes, in about so many seconds; none that is there from before."""
    fixed = setting()
    claimed = {name: claims(ALONE[name]) for name in names}
    powers = {name: claim["claimed_time"] for name, claim in claimed.items()}
    with here() if place() == "cpu" else elsewhere(workers(), ready) as prepare:
        for row in survey(powers, lengths, prepare, seconds, before, workers()):
            yield fixed | claimed[row["mixer"]] | row


def share_the_device() -> None:
    """Before it is looked at: of the processes to come, the first would else take most of its memory for itself."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@contextlib.contextmanager
def here() -> Iterator[Callable[[str, int], Callable[[], Row]]]:
    yield ready


def ready(name: str, length: int) -> Callable[[], Row]:
    return prepare(make(name, length, **SIZES[place()]), length, room())


def setting() -> Row:
    """What rows have in common that stand in one table."""
    here = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "source": source_digest()}
    return here | SIZES[place()]


def kept(file: Path, mixed: bool = False) -> list[Row]:
    """The rows in a file of this code (`mixed`: of any), device and size, but for what there was no time for."""
    here = setting()
    if mixed:
        del here["source"]
    return [row for row in rows_like(file, here) if row["status"] != NO_TIME]


def measure(mixer: Mixer, length: int, room: float) -> Row:
    """One row of a batch through one layer, forward and back; `room`: bytes that it may take."""
    return prepare(mixer, length, room)()


def prepare(mixer: Mixer, length: int, room: float) -> Callable[[], Row]:
    """What measures, once all is compiled."""
    start = time.perf_counter()
    try:
        program = lowered(mixer, length)
        step = program.compile()
    except Exception as error:  # whatever a mixer breaks down with, the others are still to be measured
        return partial(broken, error)
    found = {
        "compile_s": time.perf_counter() - start,
        "temp_bytes": step.memory_analysis().temp_size_in_bytes,
    }
    if picked := implementations(program):
        found["implementation"] = ", ".join(picked)
    if compiled_bytes(step) > room:
        return lambda: {"status": NO_MEMORY, **found}

    def run() -> Row:
        try:
            seconds = seconds_of(partial(step, opened(mixer), tokens(mixer, length)))
        except Exception as error:
            return broken(error)
        return {"status": MEASURED, **found, "seconds": seconds, "tokens_per_s": length / seconds}

    return run


def broken(error: Exception) -> Row:
    lacking = out_of_memory(error)
    reason = lacking or f"{type(error).__name__}: {error}"
    return {"status": NO_MEMORY if lacking else FAILED, "error": reason.splitlines()[0][:200]}


def opened(mixer: Mixer) -> Any:
    """Parameters; those that a longer row shares stay."""
    return drawn(mixer) if hasattr(mixer, "longest") else drawn_once(mixer)


def drawn(mixer: Mixer) -> Any:
    return jax.jit(partial(draw, mixer))(jax.random.key(0))


drawn_once = cache(drawn)


def draw(mixer: Mixer, key: jax.Array) -> Any:
    return nn.unbox(mixer.init(key, tokens(mixer, 4), Context()))


def tokens(mixer: Mixer, length: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (1, length, mixer.width), mixer.dtype)


def lowered(mixer: Mixer, length: int) -> jax.stages.Lowered:
    """Value and gradient, by the parameters and by the inputs, of the sum of the outputs' squares."""

    def objective(variables, x):
        y, _ = mixer.apply(variables, x, Context(train=True))
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    variables = jax.eval_shape(partial(draw, mixer), jax.random.key(0))
    x = jax.eval_shape(partial(tokens, mixer, length))
    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(variables, x)


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes: the median over rounds, or the one call where it alone is long enough."""

    def queue(calls: int) -> float:
        start = clock()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        return (clock() - start) / calls

    first = queue(1)
    if first >= ENOUGH:
        return first
    rounds, calls = turns(queue(1))
    return statistics.median(queue(calls) for _ in range(rounds))


def turns(seconds: float) -> tuple[int, int]:
    """How many rounds, and how many calls in each, a call of so many seconds is given."""
    calls = max(1, int(QUEUE / seconds))
    return int(np.clip(ENOUGH / (calls * seconds), 1, ROUNDS)), calls


def running(seconds: float) -> float:
    """Seconds that measuring a call takes, as `seconds_of` does it."""
    if seconds >= ENOUGH:
        return seconds
    rounds, calls = turns(seconds)
    return seconds * (2 + rounds * calls)


def room() -> float:
    """Bytes that a step may take."""
    stats = jax.devices()[0].memory_stats()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else HOST_SHARE * host


def expected(rows: Sequence[Row], claimed: float, length: int) -> tuple[float, float]:
    """Seconds that the next measurement of a mixer will compile and run; none where none was made.

    Compiling takes as long as last: what else compiled at the time tells more than the length. Running grows as it did
    last or as is claimed, whichever is more: in short rows overhead hides growth.
    """
    if not rows:
        return 0.0, 0.0
    return rows[-1]["compile_s"], running(grown(rows, claimed, length))


def grown(rows: Sequence[Row], least: float, length: int) -> float:
    """Seconds that a step of so many tokens will take."""
    *before, last = rows
    powers = [
        np.log(last["seconds"] / row["seconds"]) / np.log(last["length"] / row["length"])
        for row in before[-1:]
        if row["seconds"] > 0
    ]
    return last["seconds"] * (length / last["length"]) ** max([least, *powers])


def survey(
    claimed: Mapping[str, float],
    lengths: Sequence[int],
    prepare: Callable[[str, int], Callable[[], Row]],
    seconds: float,
    kept: Sequence[Row] = (),
    workers: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Rows of every mixer, of length after length, in about so many seconds.

    claimed: mixer -> the power by which its time is said to grow. kept: rows of before, which are not measured again.
    workers: how many compile at once.
    """
    start = clock()
    done = {name: sorted_by_length(row for row in kept if row["mixer"] == name) for name in claimed}
    spent = dict.fromkeys(claimed, 0.0)
    with ThreadPoolExecutor(workers) as pool:
        while ahead := {
            name: length for name, rows in done.items() if (length := following(rows, lengths)) is not None
        }:
            wanted = {name: expected(done[name], claimed[name], length) for name, length in ahead.items()}
            left = seconds - (clock() - start)
            late = [name for name in ahead if left <= 0 or sum(wanted[name]) > left]
            order = sorted(
                (name for name in ahead if name not in late), key=lambda name: spent[name] + sum(wanted[name])
            )
            batch = together({name: wanted[name] for name in order}, left, workers)
            ready = list(pool.map(lambda name: prepare(name, ahead[name]), batch))  # nothing runs beside compiling
            for name, run in zip(batch, ready, strict=True):
                before = clock()
                row = {"mixer": name, "length": ahead[name], **run()}
                spent[name] += row.get("compile_s", 0) + clock() - before
                done[name].append(row)
                yield row
            for name in late:
                done[name].append({"mixer": name, "length": ahead[name], "status": NO_TIME})
                yield done[name][-1]


def together(wanted: Mapping[str, tuple[float, float]], left: float, workers: int) -> list[str]:
    """The first few, which compile at the same time and run one after the other, that fit into what is left."""
    batch: list[str] = []
    for name in list(wanted)[:workers]:
        compiles, runs = zip(*(wanted[one] for one in (*batch, name)), strict=True)
        if max(compiles) + sum(runs) > left:
            break
        batch.append(name)
    return batch


def workers() -> int:
    """One for each core, up to a point."""
    return min(len(cores()), MOST_WORKERS)


def following(rows: Sequence[Row], lengths: Sequence[int]) -> int | None:
    """The next length of a mixer with these rows; None where it has come to its end."""
    if any(row["status"] != MEASURED for row in rows):
        return None
    return next((length for length in lengths if not rows or length > rows[-1]["length"]), None)


def sorted_by_length(rows: Iterator[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["length"])


def sentence(row: Row) -> str:
    by = f" by {row['implementation']}" if "implementation" in row else ""
    name = f"{row['mixer']}, {row['length']:,} tokens{by}"
    if row["status"] != MEASURED:
        return f"{name}: {row['status']}" + (f" ({row['error']})" if "error" in row else "")
    time_and_memory = f"{1e3 * row['seconds']:.2f} ms, {row['temp_bytes'] / 2**20:,.1f} MiB"
    return f"{name}: {time_and_memory}, {row['tokens_per_s']:,.0f} tokens/s; compiled in {row['compile_s']:.1f} s"
