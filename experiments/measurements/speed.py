"""Contenders side by side: time and memory, forward and with gradient, in one process and one run."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from experiments.measurements.part import ALL, Part
from experiments.measurements.sheet import Sheet
from model.errors import UserError

MIB = 2**20
COMPILING = {"compile_s": ("s to compile", ".1f"), "compile_again_s": ("s from the cache", ".1f")}
FORWARD, GRADIENT = {"forward_ms": ("forward ms", ".2f")}, {"gradient_ms": ("with gradient ms", ".2f")}
MEMORY = {"temp_mib": ("temporary MiB", ",.0f")}
LEAST = 0.2  # seconds that a round lasts

# Forward; gradient; and what else a row says: what the gradient needs beside its inputs and outputs, and of ours how
# long it was compiled.
Contender = tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, float]]]
Setting = dict[str, Any]


def place() -> str:
    """What sizes go by."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def sheet(named: dict[str, str]) -> Sheet:
    """Of contenders in settings; a setting's keys -> their headings."""
    return Sheet(named | {"contender": "contender"}, FORWARD | GRADIENT | MEMORY | COMPILING)


def measure(
    settings: Iterable[Setting],
    contenders: Callable[[Setting], dict[str, Callable[[], Contender]]],
    rounds: int,
    part: Part = ALL,
) -> Iterator[dict[str, Any]]:
    """A row per setting and contender; one that breaks down says so in its row."""
    for setting in filter(part, settings):
        ready, rows = {}, {}
        for name, enter in contenders(setting).items():
            if not part({"contender": name}):
                continue
            try:
                ready[name] = prepared(enter())
            except UserError:  # it cannot serve this setting
                continue
            except Exception as error:  # out of memory, or a peer that cannot compile
                rows[name] = dict(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
        best = dict.fromkeys(ready, (np.inf, np.inf))
        for _ in range(rounds):  # in turn, so that a chip that slows down slows all of them
            for name, (calls, _) in ready.items():
                best[name] = tuple(min(t, round_of(*call)) for t, call in zip(best[name], calls, strict=True))
        for name, (_, said) in ready.items():
            rows[name] = dict(forward_ms=1e3 * best[name][0], gradient_ms=1e3 * best[name][1], **said)
        yield from (setting | dict(contender=name, **row) for name, row in rows.items())


def prepared(contender: Contender) -> tuple[list[tuple[Callable[[], Any], int]], dict[str, float]]:
    """Forward and gradient, each with the number of calls that make a round; and what else a row says."""
    forward, gradient, said = contender
    return [(function, calls_of(function)) for function in (forward, gradient)], said()


def calls_of(function: Callable[[], Any]) -> int:
    """Enough for launching not to show."""
    finish(function())
    start = time.perf_counter()
    finish(function())
    return max(1, int(LEAST / (time.perf_counter() - start)))


def round_of(function: Callable[[], Any], calls: int) -> float:
    """Seconds a call, in a queue of calls."""
    start = time.perf_counter()
    for _ in range(calls):
        last = function()
    finish(last)
    return (time.perf_counter() - start) / calls


def compiled(run: Callable, cotangent: Any, *args: Any) -> Contender:
    """A function of arrays, and its output and gradient for all of them."""

    def pulled(cotangent, *args):
        output, pull = jax.vjp(run, *args)
        return output, pull(cotangent)

    forward = jax.jit(run).lower(*args).compile()
    gradient, said = compiled_twice(lambda: jax.jit(pulled).lower(cotangent, *args).compile())
    said["temp_mib"] = gradient.memory_analysis().temp_size_in_bytes / MIB
    return partial(forward, *args), partial(gradient, cotangent, *args), lambda: said


def compiled_twice(compiled: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Programs, and the seconds that tracing and compiling them takes: anew, and with a cache on disk that has them."""
    seconds = []
    with fresh_cache():
        for _ in range(2):
            jax.clear_caches()
            start = time.perf_counter()
            programs = compiled()
            seconds.append(time.perf_counter() - start)
    return programs, dict(zip(COMPILING, seconds, strict=True))


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Compiled programs are kept in a folder of their own, and of any size."""
    wanted = dict(jax_persistent_cache_min_compile_time_secs=0.0, jax_persistent_cache_min_entry_size_bytes=-1)
    with tempfile.TemporaryDirectory() as folder:
        wanted |= dict(jax_compilation_cache_dir=folder, jax_enable_compilation_cache=True)
        before = {name: getattr(jax.config, name) for name in wanted}
        try:
            put(wanted)
            yield
        finally:
            put(before)


def put(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at the folder once


def compiled_bytes(step: jax.stages.Compiled) -> int:
    """What a program needs at once: arguments, results less what is written over those, and all between them."""
    found = step.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def compiled_torch(run: Callable, cotangent: Any, wanted: tuple, *args: Any) -> Contender:
    """The same of torch's tensors, `wanted` being those that a gradient is asked for; compiled by its first call."""
    torch = cuda_torch()

    def forward():  # as in training: another mode would be compiled anew
        return run(*args)

    def gradient():
        return torch.autograd.grad(run(*args), wanted, cotangent)

    start = time.perf_counter()
    finish(gradient())
    compile_s = time.perf_counter() - start

    def memory() -> dict[str, float]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = gradient()
        torch.cuda.synchronize()
        outputs = sum(x.numel() * x.element_size() for x in grads)
        return dict(temp_mib=(torch.cuda.max_memory_allocated() - before - outputs) / MIB, compile_s=compile_s)

    return forward, gradient, memory


def cuda_torch() -> Any:
    """The torch module, if it is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def finish(result: Any) -> None:
    """Waits for a result, and until torch's queue is empty."""
    jax.block_until_ready(result)
    torch = cuda_torch()
    if torch is not None:
        torch.cuda.synchronize()
