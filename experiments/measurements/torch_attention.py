"""Torch's attention on a GPU, as a peer to measure against; nothing where torch or the GPU is missing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.measurements.speed import Contender, Setting, compiled_torch, cuda_torch


def contenders(
    setting: Setting, seen: Callable[[Any], Callable], soft_cap: float
) -> dict[str, Callable[[], Contender]]:
    """`seen(torch)` is the function that says who sees whom."""
    torch = cuda_torch()
    if torch is None:
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, n, heads = setting["case"], setting["n"], setting["heads"]
    shape = (setting["batch"], heads, n, setting["head_dim"])
    dtype = getattr(torch, setting["dtype"])
    q, k, v, d = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], device="cuda")
    table = torch.randn((32, heads), device="cuda")  # fixed: flex_attention failed to compile its gradient
    sinks = torch.zeros(heads, device="cuda", requires_grad=True)
    hidden, hidden_bias = torch.randn((2, 32), device="cuda")
    out = torch.randn((32, heads), device="cuda")

    def t5_bucket(distance):
        far = 16 + (torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16) * 16).to(torch.int32)
        return torch.where(distance < 16, distance, far.clamp(max=31))

    def fire(h, i, j):
        """With the reach at which ours begins; every unit is written out, as a score is a scalar to flex_attention."""
        far = torch.clamp(i, min=math.exp(6.0))
        x = torch.log1p((i - j).clamp(min=0)) / torch.log1p(far)
        return sum(out[u, h] * torch.relu(hidden[u] * x + hidden_bias[u]) for u in range(32))

    scores = {
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
        "kerple": lambda s, b, h, i, j: s - math.log(2) * torch.log1p(math.log(2) * (i - j).abs()),  # as ours begins
        "fire": lambda s, b, h, i, j: s + fire(h, i, j),
        "t5": lambda s, b, h, i, j: s + table[t5_bucket((i - j).clamp(min=0)), h],
        "soft cap": lambda s, b, h, i, j: soft_cap * torch.tanh(s / soft_cap),
    }
    mask = create_block_mask(seen(torch), None, None, n, n, device="cuda")
    torch.compiler.reset()  # after eight versions of a function torch compiles no more
    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(q, k, v):
        if case != "sinks":
            return compiled(q, k, v, score_mod=scores.get(case), block_mask=mask)
        out, lse = compiled(q, k, v, block_mask=mask, return_lse=True)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    def sdpa(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    wanted = (q, k, v, sinks) if case == "sinks" else (q, k, v)
    found = {"torch flex_attention": partial(compiled_torch, flex, d, wanted, q, k, v)}
    if case == "causal":
        found["torch sdpa cudnn"] = partial(compiled_torch, sdpa, d, wanted, q, k, v)
        # As a model has them: tokens first in memory, then heads.
        projected = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]

        def of_projections(*tokens_first):
            return sdpa(*(x.transpose(1, 2) for x in tokens_first)).transpose(1, 2)

        found["torch sdpa cudnn, tokens first"] = partial(
            compiled_torch, of_projections, d.transpose(1, 2).contiguous(), tuple(projected), *projected
        )
    return found
