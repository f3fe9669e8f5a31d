"""Torch's state spaces on a GPU, as peers to measure against; nothing where they or the GPU are missing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from experiments.measurements.speed import Contender, compiled_torch, cuda_torch


def contenders(case: str, arrays: dict[str, Any]) -> dict[str, Callable[[], Contender]]:
    """Named; arrays: as ours get them, and put in the layout that each peer likes best."""
    torch = cuda_torch()
    if torch is None:
        return {}
    if case == "convolution":
        channels_first = {"u": arrays["u"].swapaxes(1, 2), "kernel": arrays["kernel"].T}
        return {"torch fft": partial(enter, torch, fft_convolution(torch), channels_first)}
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return {}
    return {"mamba_ssm triton": partial(enter, torch, partial(mamba_chunk_scan_combined, chunk_size=256), arrays)}


def enter(torch: Any, run: Callable, arrays: dict[str, np.ndarray], /) -> Contender:
    """Puts the arrays on the GPU; the first is what the output's cotangent is made from."""
    args = [tensor(torch, array).requires_grad_() for array in arrays.values()]
    return compiled_torch(run, args[0].detach().clone(), tuple(args), *args)


def tensor(torch: Any, array: np.ndarray) -> Any:
    """torch knows no bfloat16 of numpy's."""
    wide = torch.tensor(np.ascontiguousarray(array, np.float32), device="cuda")
    return wide.to(getattr(torch, str(array.dtype)))


def fft_convolution(torch: Any) -> Callable:
    def run(u, kernel):  # [B, D, L], [D, L]
        L = u.shape[-1]
        return torch.fft.irfft(torch.fft.rfft(u, n=2 * L) * torch.fft.rfft(kernel, n=2 * L), n=2 * L)[..., :L]

    return run
