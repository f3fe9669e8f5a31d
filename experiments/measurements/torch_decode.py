"""A LLaMA of transformers on a GPU, as a peer to write against; nothing where it, torch or the GPU is missing."""

import time
from collections.abc import Callable
from typing import Any

from experiments.measurements.speed import Setting, cuda_torch


def contenders(setting: Setting) -> dict[str, Callable[[Setting], tuple[Callable, dict[str, float]]]]:
    if cuda_torch() is None or setting["case"] != "attention":
        return {}
    try:
        import transformers  # noqa: F401
    except ImportError:
        return {}
    return {"transformers static cache": llama}


def llama(setting: Setting) -> tuple[Callable[[], tuple[float, float]], dict[str, float]]:
    """A cache of one size, and a compiled step; what it takes to compile is that of the first turn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch, width, n = cuda_torch(), setting["width"], setting["tokens"]
    inner = -(-8 * width // 3 // 32) * 32  # as ours
    sizes = dict(hidden_size=width, intermediate_size=inner, num_hidden_layers=setting["layers"])
    heads = dict(num_attention_heads=setting["heads"], num_key_value_heads=setting["heads"])
    room = dict(vocab_size=setting["vocab"], max_position_embeddings=setting["prompt"] + n, tie_word_embeddings=True)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **room)).to("cuda", getattr(torch, setting["dtype"])).eval()
    prompt = torch.randint(0, setting["vocab"], (setting["batch"], setting["prompt"]), device="cuda")

    def write(tokens: int) -> float:
        asked: dict[str, Any] = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompt, **asked, cache_implementation="static", attention_mask=torch.ones_like(prompt))
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def turn() -> tuple[float, float]:
        first, all_of_them = write(1), write(n)
        return first, (all_of_them - first) / (n - 1)

    start = time.perf_counter()
    turn()
    return turn, dict(compile_s=time.perf_counter() - start)
