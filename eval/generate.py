"""Autoregressive generation from the carried state: prefill of the prompt, then blocks of decoding steps."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from eval.sample import Sampling, sample
from model import placement
from model.build import Model
from model.contract import State
from model.errors import UserError
from model.layers import Dense, Embed
from model.stack import apart

# Tokens per dispatch. On a CPU 16 made a small model 3 to 6 times as fast as 1; 64 gave little more.
BLOCK = 16


@dataclasses.dataclass
class Pace:
    """When tokens were there; filled in as they are made, if it is given."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    first: float = 0.0  # the prompt was read, and the first token drawn
    stepping: float = 0.0  # the first block of steps was compiled and on its way
    last: float = 0.0
    tokens: int = 0

    @property
    def first_s(self) -> float:
        """Seconds to the first token; compiling included, if the program was new."""
        return self.first - self.started

    @property
    def tokens_per_s(self) -> float | None:
        """Of each row, after the first, without compiling; None: there were no more."""
        return (self.tokens - 1) / (self.last - self.stepping) if self.tokens > 1 else None


def generate(
    model: Model,
    params: Any,
    prompt: np.ndarray,
    n: int,
    sampling: Sampling,
    key: jax.Array,
    segments: np.ndarray | None = None,
    block: int = BLOCK,
    source: np.ndarray | None = None,
    source_segments: np.ndarray | None = None,
    pace: Pace | None = None,
) -> Iterator[np.ndarray]:
    """The n tokens after the prompt `[B, P]`, each `[B]`, as they are made.

    `segments` is 1 on the prompt and 0 on the padding behind it (see `pad`), for rows of different lengths. A model
    that answers a source `[B, S]`, with segments of its own, reads it once; the prompt is then how the answer begins.
    Token i is drawn with `fold_in(key, i)`, so the tokens do not depend on the size of a block.
    """
    check(model, prompt.shape[1], n, 0 if source is None else source.shape[1])
    given = {"segments": segments, "source": source, "source_segments": source_segments}
    given = {name: array for name, array in given.items() if array is not None}
    return tokens_by_block(model, params, prompt, n, sampling, key, given, block, pace or Pace())


def check(model: Model, prompt: int, n: int, source: int = 0) -> None:
    """Refuses, before anything is compiled, what this model cannot go on from or to."""
    if model.n_classes:
        raise UserError(f"a classifier of {model.n_classes} classes cannot generate; train a language model")
    if not model.causal:
        raise UserError("a bidirectional model cannot generate; train with model.causal=True")
    if prompt < model.shortest_prompt or n < 1:
        raise UserError(
            f"{prompt} prompt tokens and {n} new ones; allowed: at least {model.shortest_prompt} of the prompt and at "
            f"least 1 new; closest: {max(prompt, model.shortest_prompt)} and {max(n, 1)}"
        )
    if bool(source) != bool(model.source):
        answers, given = ("a source", "none") if model.source else ("no source", f"one of {source} tokens")
        raise UserError(f"this model answers {answers}, and is given {given}; allowed: what its task brings")
    if not source and model.shortest_prompt > 1:  # a row that holds a source and the target's first token
        source, prompt = prompt - 1, 1
    limit = model.source_limit()
    if source and limit is not None and source > limit:
        raise UserError(f"a source of {source} tokens is past the {limit} positions that the encoder can place")
    limit = model.limit()
    if limit is not None and prompt + n > limit:
        raise UserError(
            f"{prompt} prompt tokens and {n} new ones are past the {limit} positions that this model can "
            f"place; closest: {max(limit - prompt, 0)} new ones"
        )


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of different lengths as rows `[B, P]`, padded on the right, and their segments."""
    if not prompts or not all(prompts):
        raise UserError("a prompt is empty; each needs at least 1 token")
    tokens, segments = np.zeros((2, len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        segments[row, : len(prompt)] = 1
    return tokens, segments


def tokens_by_block(
    model: Model,
    params: Any,
    prompt: np.ndarray,
    n: int,
    sampling: Sampling,
    key: jax.Array,
    given: Mapping[str, np.ndarray],
    block: int,
    pace: Pace,
) -> Iterator[np.ndarray]:
    token, state = prefill(model, sampling, prompt.shape[1] + n, params, prompt, given, key)
    ready, count, done = token[None], 1, 1
    jax.block_until_ready(token)
    pace.first = pace.last = time.perf_counter()
    if n > 1:
        params = for_steps(model, params, state, token)

    def shown() -> np.ndarray:
        arrived = np.asarray(ready)[:count]
        pace.last, pace.tokens = time.perf_counter(), pace.tokens + count
        return arrived

    while done < n:
        ahead = min(block, n - done)
        state, token, made = decode(model, sampling, block, params, state, token, key, done, ahead)
        pace.stepping = pace.stepping or time.perf_counter()
        # One block behind the device, which is at work on the next while the caller is shown this one.
        yield from shown()
        ready, count, done = made, ahead, done + ahead
    yield from shown()


@partial(jax.jit, static_argnames=("model", "sampling", "max_len"))
def prefill(
    model: Model,
    sampling: Sampling,
    max_len: int,
    params: Any,
    prompt: jax.Array,
    given: Mapping[str, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, State]:
    """The first new token `[B]`, and the state after the prompt with room for `max_len` tokens.

    `given` is what the model is called with besides: segments, a source and its segments, where there are such.
    """
    B, P = prompt.shape
    last = (given["segments"] > 0).sum(1) - 1 if "segments" in given else jnp.full(B, P - 1)
    state = model.init_state(B, max_len)
    logits, state = model.apply({"params": params}, prompt, **given, state=state, at=last[:, None])
    return draw(sampling, key, 0, logits), state


@partial(jax.jit, static_argnames="model")
def for_steps(model: Model, params: Any, state: State, token: jax.Array) -> Any:
    """The parameters as a step reads them, made once: each layer's apart, and kernels in the dtype they multiply in.

    Else every token would cut them out of arrays that hold all layers, and narrow them. The numbers are the same.
    """
    params, narrow = apart(nn.unbox(params)), {}

    def note(call, args, kwargs, at):
        if isinstance(at.module, (Dense, Embed)):
            for name in {"kernel", "embedding"} & at.module.variables["params"].keys():
                narrow[id(at.module.variables["params"][name])] = at.module.dtype
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(lambda: model.apply({"params": params}, token[:, None], state=state))
    return jax.tree.map(lambda leaf: leaf.astype(narrow.get(id(leaf), leaf.dtype)), params)


@partial(jax.jit, static_argnames=("model", "sampling", "block"), donate_argnames="state")
def decode(
    model: Model,
    sampling: Sampling,
    block: int,
    params: Any,
    state: State,
    token: jax.Array,
    key: jax.Array,
    done: int,
    count: int,
) -> tuple[State, jax.Array, jax.Array]:
    """`count` steps in one dispatch: the state, the last token, and all of them, `[block, B]`.

    The count is traced, so that one program serves full blocks and the shorter last one. A GPU, which would have to
    tell its host after every token whether to go on, always makes a block: what is past the count means nothing.
    """
    steps = block if placement.platform() == "gpu" else count

    def step(i, carry):
        state, token, made = carry
        # No segments: whatever padding lay behind the prompt, each row goes on with its one document.
        logits, state = model.apply({"params": params}, token[:, None], state=state)
        token = draw(sampling, key, done + i, logits)
        return state, token, made.at[i].set(token)

    return jax.lax.fori_loop(0, steps, step, (state, token, jnp.zeros((block, *token.shape), token.dtype)))


def draw(sampling: Sampling, key: jax.Array, i: int | jax.Array, logits: jax.Array) -> jax.Array:
    """Token number i, `[B]`, from logits `[B, 1, V]`."""
    return sample(jax.random.fold_in(key, i), logits[:, 0], sampling.temperature, sampling.top_k, sampling.top_p)
