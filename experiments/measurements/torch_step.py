"""A training step of Hugging Face's Llama, as a peer to measure against; nothing where it is not installed."""

import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from experiments.measurements.speed import cuda_torch

NAME = "Hugging Face Llama"
GIB = 2**30


def contenders(config: ConfigDict, steps: int) -> dict[str, Callable[[], tuple[Iterator[float], dict[str, Any]]]]:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return {}
    how = "torch.compile" if cuda_torch() else "eager"
    return {f"{NAME}, {how}": partial(enter, config, steps)}


def enter(config: ConfigDict, steps: int) -> tuple[Iterator[float], dict[str, Any]]:
    """Seconds a step, again and again; with what compiling the first one took."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    m, on_gpu = config.model, cuda_torch() is not None
    device = "cuda" if on_gpu else "cpu"
    mlp_width = -(-(m.mlp_width or 8 * m.width // 3) // m.mlp_multiple) * m.mlp_multiple
    sizes = dict(hidden_size=m.width, intermediate_size=mlp_width, num_hidden_layers=m.layers)
    heads = dict(num_attention_heads=m.attention.n_heads, max_position_embeddings=config.data.noise.length)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=m.vocab_size, tie_word_embeddings=True, **sizes, **heads))
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    shape = (config.batch_size, config.data.noise.length)
    tokens = torch.randint(m.vocab_size, shape, device=device)
    run = torch.compile(model) if on_gpu else model

    def step():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=m.dtype == "bfloat16"):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    start = time.perf_counter()
    step()
    wait()
    found: dict[str, Any] = dict(params=sum(p.numel() for p in model.parameters()))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        wait()
        found |= dict(compile_s=time.perf_counter() - start, memory_gib=torch.cuda.max_memory_allocated() / GIB)

    def rounds() -> Iterator[float]:
        while True:
            start = time.perf_counter()
            for _ in range(steps):
                step()
            wait()
            yield (time.perf_counter() - start) / steps

    return rounds(), found
