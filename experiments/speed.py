"""Contenders side by side: time and memory, forward and with gradient, in one process and one run."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from model.errors import UserError

LEAST = 0.2  # seconds that a round lasts

# Forward; gradient; the bytes that the gradient needs beside its inputs and outputs.
Contender = tuple[Callable[[], Any], Callable[[], Any], Callable[[], float]]
Setting = dict[str, Any]


def measure(
    settings: Iterable[Setting], contenders: Callable[[Setting], dict[str, Callable[[], Contender]]], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row per setting and contender; one that breaks down says so in its row."""
    for setting in settings:
        for name, enter in contenders(setting).items():
            try:
                forward, gradient, memory = enter()
                figures = dict(
                    forward_ms=1e3 * timed(forward, rounds),
                    gradient_ms=1e3 * timed(gradient, rounds),
                    temp_mib=memory() / 2**20,
                )
            except UserError:  # it cannot serve this setting
                continue
            except Exception as error:  # out of memory, or a peer that cannot compile
                figures = dict(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
            yield setting | dict(contender=name, **figures)


def compiled(run: Callable, cotangent: Any, *args: Any) -> Contender:
    """A function of arrays, and its gradient for all of them."""

    def pulled(cotangent, *args):
        return jax.vjp(run, *args)[1](cotangent)

    forward = jax.jit(run).lower(*args).compile()
    gradient = jax.jit(pulled).lower(cotangent, *args).compile()
    return (
        partial(forward, *args),
        partial(gradient, cotangent, *args),
        lambda: gradient.memory_analysis().temp_size_in_bytes,
    )


def compiled_torch(run: Callable, cotangent: Any, wanted: tuple, *args: Any) -> Contender:
    """The same of torch's tensors, `wanted` being those that a gradient is asked for."""
    torch = cuda_torch()

    def forward():
        with torch.no_grad():
            return run(*args)

    def gradient():
        return torch.autograd.grad(run(*args), wanted, cotangent)

    def memory() -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = gradient()
        torch.cuda.synchronize()
        outputs = sum(x.numel() * x.element_size() for x in grads)
        return torch.cuda.max_memory_allocated() - before - outputs

    return forward, gradient, memory


def cuda_torch() -> Any:
    """The torch module, if it is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def timed(function: Callable[[], Any], rounds: int) -> float:
    """Seconds a call: the best of some rounds, each a queue of calls long enough for launching not to show."""
    finish(function())
    start = time.perf_counter()
    finish(function())
    calls = max(1, int(LEAST / (time.perf_counter() - start)))
    best = np.inf
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            last = function()
        finish(last)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


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
