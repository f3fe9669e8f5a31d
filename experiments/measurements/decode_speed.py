"""How fast a model writes: prefill and decoding apart, from a carried state and, beside it, from scratch every time.

On a GPU the peer of attention is a LLaMA of the same size, where `transformers` is installed: its cache is of one size,
and its step compiled.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from eval.generate import BLOCK, decode, for_steps, prefill
from eval.sample import Sampling
from experiments.measurements import torch_decode
from experiments.measurements.part import ALL, Part
from experiments.measurements.sheet import Sheet
from experiments.measurements.speed import COMPILING, Setting, compiled_twice, place
from model import build, entries
from model.asked import Asked

GREEDY = Sampling(temperature=0)
CASES = {"attention": dict(position="rope"), "mamba2": dict(position="none", mlp="none")}
SIZES = {
    "gpu": dict(width=768, layers=12, heads=12, vocab=32_000, prompt=2048, tokens=129, dtype="bfloat16"),
    "cpu": dict(width=64, layers=2, heads=4, vocab=256, prompt=128, tokens=33, dtype="float32"),
}
BATCHES = (1, 8, 64)
FROM_SCRATCH = 4  # tokens that are made by reading all before them: each takes as long as the next
SHEET = Sheet(
    {"case": "mixer", "batch": "batch", "prompt": "prompt", "contender": "contender"},
    {
        "first_ms": ("first token ms", ".1f"),
        "token_ms": ("ms a token", ".3f"),
        "tokens_per_s": ("tokens/s, all rows", ",.0f"),
        **COMPILING,
    },
)

# Made ready: seconds to the first token, and seconds for each of the others, of one turn.
Turn = Callable[[], tuple[float, float]]


def settings() -> Iterator[Setting]:
    size = SIZES[place()]
    for case in CASES:
        for batch in BATCHES:
            yield dict(case=case, batch=batch, **size)


def measure(rounds: int, part: Part = ALL) -> Iterator[dict[str, Any]]:
    """A row per setting and contender: the best of all rounds; one that breaks down says so.

    Peers come last: whatever they do to the device, ours are measured by then.
    """
    for contenders in (ours, torch_decode.contenders):
        for setting, (name, enter) in ((s, each) for s in settings() for each in contenders(s).items()):
            row = setting | dict(contender=name)
            if not part(row):
                continue
            try:
                turn, compiling = enter(setting)
                first, token = (min(times) for times in zip(*(turn() for _ in range(rounds)), strict=True))
                speed = dict(first_ms=1e3 * first, token_ms=1e3 * token, tokens_per_s=setting["batch"] / token)
                yield row | speed | compiling
            except Exception as error:  # out of memory, or a peer that cannot compile
                yield row | dict(error=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def ours(setting: Setting) -> dict[str, Callable[[Setting], tuple[Turn, dict[str, float]]]]:
    return {"longview cached": cached, "longview naive": naive}


def model_of(setting: Setting) -> tuple[Any, Any, jax.Array]:
    """The model, parameters as training begins, and prompts `[B, P]`."""
    sizes = {key: setting[key] for key in ("case", "width", "layers", "heads", "vocab", "dtype")}
    rows = np.random.default_rng(0).integers(0, setting["vocab"], (setting["batch"], setting["prompt"]))
    return *opened(**sizes), jnp.asarray(rows, jnp.int32)


@cache  # drawing takes longer than what is measured
def opened(case: str, width: int, layers: int, heads: int, vocab: int, dtype: str) -> tuple[Any, Any]:
    section = base.get_config().model.to_dict() | entries.sections((case,), CASES[case]["position"])
    section |= dict(mixers=(case,), width=width, layers=layers, dtype=dtype) | CASES[case]
    if case == "attention":
        section["attention"] |= dict(n_heads=heads)
    model = build.build(section, Asked(vocab))
    begin = jax.jit(lambda: nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]))
    return model, begin()


def cached(setting: Setting) -> tuple[Turn, dict[str, float]]:
    """The prompt once, then blocks of steps from the state."""
    model, params, prompts = model_of(setting)
    key, n = jax.random.key(0), setting["tokens"]
    room = setting["prompt"] + n

    def compiled() -> tuple[Callable, Callable]:
        first = prefill.lower(model, GREEDY, room, params, prompts, {}, key)
        token, state = first.out_info
        ready = jax.eval_shape(partial(for_steps, model), params, state, token)
        steps = decode.lower(model, GREEDY, BLOCK, ready, state, token, key, 1, BLOCK)
        return first.compile(), steps.compile()

    (first, steps), compiling = compiled_twice(compiled)
    ready = None

    def turn() -> tuple[float, float]:
        nonlocal ready
        start = time.perf_counter()
        token, state = jax.block_until_ready(first(params, prompts, {}, key))
        read = time.perf_counter()
        ready = for_steps(model, params, state, token) if ready is None else ready
        jax.block_until_ready(ready)
        begun, made = time.perf_counter(), 0
        while made < n - 1:
            state, token, _ = steps(ready, state, token, key, made + 1, BLOCK)
            made += BLOCK
        jax.block_until_ready(token)
        return read - start, (time.perf_counter() - begun) / made

    return turn, compiling


def naive(setting: Setting) -> tuple[Turn, dict[str, float]]:
    """Every token from all before it, in rows as long as they will ever be."""
    model, params, prompts = model_of(setting)
    P = setting["prompt"]
    rows = jnp.pad(prompts, ((0, 0), (0, setting["tokens"])))

    @jax.jit
    def step(params: Any, rows: jax.Array, done: int) -> jax.Array:
        at = jnp.full((rows.shape[0], 1), done - 1, jnp.int32)
        logits, _ = model.apply({"params": params}, rows, at=at)
        return rows.at[:, done].set(jnp.argmax(logits[:, 0], -1).astype(rows.dtype))

    run, compiling = compiled_twice(lambda: step.lower(params, rows, P).compile())

    def turn() -> tuple[float, float]:
        times = [time.perf_counter()]
        made = rows
        for i in range(1 + FROM_SCRATCH):
            made = jax.block_until_ready(run(params, made, P + i))
            times.append(time.perf_counter())
        return times[1] - times[0], (times[-1] - times[1]) / FROM_SCRATCH

    return turn, compiling
