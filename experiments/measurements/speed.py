"""Contenders side by side: time and memory, forward and with gradient, in one process and one run."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from model.errors import UserError

MIB = 2**20
LEAST = 0.2  # seconds that a round lasts

# Forward; gradient; and what else a row says: what the gradient needs beside its inputs and outputs, and of ours how
# long it was compiled.
Contender = tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, float]]]
Setting = dict[str, Any]


def measure(
    settings: Iterable[Setting], contenders: Callable[[Setting], dict[str, Callable[[], Contender]]], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row per setting and contender; one that breaks down says so in its row."""
    for setting in settings:
        ready, rows = {}, {}
        for name, enter in contenders(setting).items():
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
    gradient, cold, warm = compiled_twice(lambda: jax.jit(pulled).lower(cotangent, *args))
    said = dict(temp_mib=gradient.memory_analysis().temp_size_in_bytes / MIB, compile_s=cold, compile_again_s=warm)
    return partial(forward, *args), partial(gradient, cotangent, *args), lambda: said


def compiled_twice(lower: Callable[[], jax.stages.Lowered]) -> tuple[jax.stages.Compiled, float, float]:
    """A program; the seconds that it took, traced and compiled anew; and those with a compilation cache that has it."""
    kept = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        use_cache(folder, 0)
        for _ in range(2):
            jax.clear_caches()
            start = time.perf_counter()
            program = lower().compile()
            seconds.append(time.perf_counter() - start)
        use_cache(*kept)
    return program, *seconds


def use_cache(folder: str | None, least_seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    compilation_cache.reset_cache()


def compiled_bytes(step: jax.stages.Compiled) -> int:
    """What a program needs at once: arguments, results less what is written over those, and all between them."""
    found = step.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def compiled_torch(run: Callable, cotangent: Any, wanted: tuple, *args: Any) -> Contender:
    """The same of torch's tensors, `wanted` being those that a gradient is asked for."""
    torch = cuda_torch()

    def forward():  # as in training: another mode would be compiled anew
        return run(*args)

    def gradient():
        return torch.autograd.grad(run(*args), wanted, cotangent)

    def memory() -> dict[str, float]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = gradient()
        torch.cuda.synchronize()
        outputs = sum(x.numel() * x.element_size() for x in grads)
        return dict(temp_mib=(torch.cuda.max_memory_allocated() - before - outputs) / MIB)

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


FIGURES = {"forward_ms": "forward ms", "gradient_ms": "with gradient ms", "temp_mib": "temporary MiB"}


def table(rows: list[dict[str, Any]], lead: dict[str, str]) -> str:
    """Markdown: a line per setting and contender. lead: a setting's keys -> their headings."""
    titles = [*lead.values(), "contender", *FIGURES.values()]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        named = [f"{row[key]:,}" if isinstance(row[key], int) else str(row[key]) for key in (*lead, "contender")]
        lines.append(
            "| " + " | ".join(named + ["failed" if "error" in row else figure(row, key) for key in FIGURES]) + " |"
        )
    return "\n".join(lines) + "\n"


def figure(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:,.0f}" if key == "temp_mib" else f"{row[key]:.2f}"
