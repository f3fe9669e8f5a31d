"""How a layer of every mixer grows with the length: time and memory of a training step, as far as each goes.

Mixers share a budget of time. The next measurement is always of the mixer that will then have had the least of it, so
one that compiles long waits for the others; what is expected not to fit into what is left is not begun.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.measurements.speed import compiled_bytes
from model.contract import Context, Mixer
from model.errors import out_of_memory
from model.mixers import MIXERS

Row = dict[str, Any]

SHORTEST, FACTOR = 1024, 4
LONGEST = {"gpu": 2**20, "cpu": 2**14}
SIZES = {"gpu": dict(width=256, dtype="bfloat16"), "cpu": dict(width=64, dtype="float32")}
# A row's status: measured, or why its mixer goes no further.
MEASURED, NO_TIME, NO_MEMORY, FAILED = "measured", "out of time", "out of memory", "failed"
ROUNDS = 5  # at most, of which the median counts
QUEUE = 0.05  # seconds that a queue of calls lasts at least, for launching not to show
ENOUGH = 2.0  # seconds of running, after which no round is added
HOST_SHARE = 0.5  # of a host's memory, where the device is the host

ALONE = {name: cls for name, cls in MIXERS.items() if not cls.reads_memory}


def place() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def lengths(longest: int | None = None) -> list[int]:
    """Each FACTOR times the one before."""
    last = longest or LONGEST[place()]
    found = [SHORTEST]
    while found[-1] * FACTOR <= last:
        found.append(found[-1] * FACTOR)
    return found


def make(name: str, width: int, dtype: str) -> Mixer:
    """A mixer as its defaults have it, causal if it can be."""
    return ALONE[name](width=width, dtype=jnp.dtype(dtype), causal=not ALONE[name].both_ways_only)


def claims(cls: type[Mixer]) -> dict[str, float]:
    """The powers of the length by which a mixer says that it grows."""
    return {"claimed_memory": cls.cost, "claimed_time": cls.cost if cls.work is None else cls.work}


def measure(mixer: Mixer, length: int, room: float) -> Row:
    """One row of a batch through one layer, forward and back; `room`: bytes that it may take."""
    start = time.perf_counter()
    try:
        variables, x = opened(mixer), tokens(mixer, length)
        step = compiled(mixer, variables, x)
        compile_s = time.perf_counter() - start
        found = {"compile_s": compile_s, "temp_bytes": step.memory_analysis().temp_size_in_bytes}
        if compiled_bytes(step) > room:
            return {"status": NO_MEMORY, **found}
        seconds = seconds_of(partial(step, variables, x))
    except Exception as error:  # whatever a mixer breaks down with, the others are still to be measured
        lacking = out_of_memory(error)
        reason = lacking or f"{type(error).__name__}: {error}"
        return {"status": NO_MEMORY if lacking else FAILED, "error": reason.splitlines()[0][:200]}
    return {"status": MEASURED, **found, "seconds": seconds, "tokens_per_s": length / seconds}


@lru_cache(1)
def opened(mixer: Mixer) -> Any:
    """Parameters, of which no mixer has more for a longer row."""
    return jax.jit(lambda key: nn.unbox(mixer.init(key, tokens(mixer, 4), Context())))(jax.random.key(0))


def tokens(mixer: Mixer, length: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (1, length, mixer.width), mixer.dtype)


def compiled(mixer: Mixer, variables: Any, x: jax.Array) -> jax.stages.Compiled:
    """Value and gradient, by the parameters and by the inputs, of the sum of the outputs' squares."""

    def objective(variables, x):
        y, _ = mixer.apply(variables, x, Context(train=True))
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1))).lower(variables, x).compile()


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


def expected(rows: Sequence[Row], claimed: float, length: int) -> float:
    """Seconds that the next measurement of a mixer will take, compiling included; 0 where none was made.

    Running grows as it did last or as is claimed, whichever is more: in short rows overhead hides growth.
    """
    if not rows:
        return 0.0
    return grown(rows, "compile_s", 0, length) + running(grown(rows, "seconds", claimed, length))


def grown(rows: Sequence[Row], key: str, least: float, length: int) -> float:
    *before, last = rows
    powers = [
        np.log(last[key] / row[key]) / np.log(last["length"] / row["length"]) for row in before[-1:] if row[key] > 0
    ]
    return last[key] * (length / last["length"]) ** max(least, *powers, 0)


def survey(
    claimed: Mapping[str, float],
    lengths: Sequence[int],
    measure: Callable[[str, int], Row],
    seconds: float,
    kept: Sequence[Row] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Rows of every mixer, of length after length, in about so many seconds.

    claimed: mixer -> the power by which its time is said to grow. kept: rows of before, which are not measured again.
    """
    start = clock()
    done = {name: sorted_by_length(row for row in kept if row["mixer"] == name) for name in claimed}
    spent = dict.fromkeys(claimed, 0.0)
    while True:
        ahead = {name: following(rows, lengths) for name, rows in done.items()}
        wanted = {
            name: expected(done[name], claimed[name], length) for name, length in ahead.items() if length is not None
        }
        if not wanted:
            return
        name = min(wanted, key=lambda name: spent[name] + wanted[name])
        left = seconds - (clock() - start)
        row = {"mixer": name, "length": ahead[name]}
        if left <= 0 or wanted[name] > left:
            row |= {"status": NO_TIME, "expected_s": wanted[name]}
        else:
            before = clock()
            row |= measure(name, ahead[name])
            spent[name] += clock() - before
        done[name].append(row)
        yield row


def following(rows: Sequence[Row], lengths: Sequence[int]) -> int | None:
    """The next length of a mixer with these rows; None where it has come to its end."""
    if any(row["status"] != MEASURED for row in rows):
        return None
    return next((length for length in lengths if not rows or length > rows[-1]["length"]), None)


def kept(rows: Sequence[Row], setting: Mapping[str, Any]) -> list[Row]:
    """Those of the same setting, device and code, but for what there was no time for."""
    return [
        row
        for row in rows
        if row.get("status") in (MEASURED, NO_MEMORY, FAILED)
        and all(row.get(key) == value for key, value in setting.items())
    ]


def sorted_by_length(rows: Iterator[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["length"])


def sentence(row: Row) -> str:
    name = f"{row['mixer']}, {row['length']:,} tokens"
    if row["status"] != MEASURED:
        return f"{name}: {row['status']}" + (f" ({row['error']})" if "error" in row else "")
    time_and_memory = f"{1e3 * row['seconds']:.2f} ms, {row['temp_bytes'] / 2**20:,.1f} MiB"
    return f"{name}: {time_and_memory}, {row['tokens_per_s']:,.0f} tokens/s; compiled in {row['compile_s']:.1f} s"
