"""Decoding costs what a token needs: caches are written in place, and read no further than they are filled."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from eval.generate import decode, for_steps, prefill
from eval.sample import Sampling
from experiments.measurements import decode_speed
from model import build, entries
from model.asked import Asked
from model.ops.attention import prepare
from model.ops.decode_attention import TILE, flash_decode
from model.ops.decode_attention import decode as by_tiles
from model.ops.dense_attention import xla
from model.ops.mask import CAUSAL, window
from tests import meshes

B, ROOM, V, GREEDY = 2, 1536, 13, Sampling(temperature=0)


def made(mixer: str, dtype: str = "float32", **options):
    """A model, its parameters and a state with room for tokens, all of zeros."""
    section = base.get_config().model.to_dict() | entries.sections((mixer,), "none")
    section |= dict(mixers=(mixer,), position="none", width=32, layers=3, dtype=dtype) | options
    model = build.build(section, Asked(V))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"])
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nn.unbox(shapes))
    return model, params, jax.tree.map(jnp.asarray, model.init_state(B, ROOM))


def compiled(model, params, state):
    token, key = jnp.zeros(B, jnp.int32), jax.random.key(0)
    params = for_steps(model, params, state, token)
    return decode.lower(model, GREEDY, 4, params, state, token, key, 1, 4).compile()


def loops_copies(text: str, least: int) -> list[str]:
    """Instructions of loop bodies, and of what they call, that make an array of so many numbers out of another.

    In place is only what updates a slice. Entry computations may copy: that is once a block, not once a token.
    """
    found, inside = [], False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside = not line.startswith("ENTRY") and "{" in line
        shape = re.search(r"= \w+\[([\d,]*)\]\S* (copy|select|concatenate|transpose|slice|pad|convert)\(", line)
        if inside and shape and np.prod([int(n) for n in shape[1].split(",") if n]) >= least:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("scan", [True, False])
def test_no_cache_is_copied_in_the_loop_over_tokens(scan):
    """And all the memory between arguments and results is less than one layer's keys."""
    model, params, state = made("attention", scan=scan)
    step = compiled(model, params, state)
    keys, memory = B * ROOM * 32, step.memory_analysis()
    assert not (copies := loops_copies(step.as_text(), keys)), copies
    assert memory.alias_size_in_bytes >= held(state), "donated, and so written over"
    assert memory.temp_size_in_bytes < 4 * keys


def test_a_recurrence_s_state_is_copied_once_at_most():
    """A layer's at a time: outputs are made from the state before a token, which a CPU's program keeps for them."""
    model, params, state = made("mamba2", scan=True)
    step = compiled(model, params, state)
    one = max(leaf.size for leaf in jax.tree.leaves(state))
    assert len(loops_copies(step.as_text(), one)) <= 3 and not loops_copies(step.as_text(), one + 1)
    assert step.memory_analysis().alias_size_in_bytes >= held(state)


def held(state) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def call(filled: int, **options):
    """One query a row, of two heads to a key-value head, to a cache of which so many keys are written."""
    M, G, R, K = 2 * TILE + 40, 2, 2, 16
    q, k, v = (
        jax.random.normal(jax.random.key(i), (B, n, h, K)) for i, (n, h) in enumerate([(1, G * R), (M, G), (M, G)])
    )
    at = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, M))
    documents = (at < filled).astype(jnp.int32).at[1, 2:4].set(0)  # a prompt padded behind its second token
    places = dict(q_positions=at[:, filled - 1 : filled], q_segments=jnp.ones((B, 1), jnp.int32), k_positions=at)
    return prepare(q, k, v, **places, k_segments=documents, k_filled=jnp.asarray(filled), **options)


OPTIONS = {
    "plain": {},
    "all": dict(mask=CAUSAL & window(300), soft_cap=5.0, sinks=jnp.arange(4) * 0.3, scale=0.5),
}


@pytest.mark.parametrize("run", [by_tiles, partial(flash_decode, interpret=True)], ids=["tiles", "kernel"])
@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_filled_is_all_that_is_read(run, options):
    """Values and log-sum-exps are those of all scores at once, and a tile that is all unwritten may hold anything."""
    for filled in (1, TILE + 5, 2 * TILE + 40):
        form, o = call(filled, **OPTIONS[options])
        want = xla(form, o)
        unread = -(-filled // TILE) * TILE
        torn = o.replace(k=o.k.at[:, unread:].set(jnp.nan), v=o.v.at[:, unread:].set(jnp.nan))
        for got, wanted in zip(jax.jit(partial(run, form))(torn), want, strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_the_gradient_of_a_step_is_that_of_all_scores():
    form, o = call(TILE + 5)

    def loss(run, q, v):
        return jnp.sum(jnp.sin(run(form, o.replace(q=q, v=v))[0]))

    grads = [jax.jit(jax.grad(partial(loss, run), (0, 1)))(o.q, o.v) for run in (by_tiles, xla)]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *grads)


def test_a_step_s_parameters_are_narrow_where_they_multiply_and_no_other_numbers():
    """Kernels and embeddings are; scales of norms, and what recurrences are made of, are not."""
    model, params, state = made("mamba2", "bfloat16")
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)
    token = jnp.arange(B, dtype=jnp.int32)
    ready = for_steps(model, params, state, token)
    layer = ready["stack"]["layers"]["2"]["block_0"]["mixer"]
    assert layer["x"]["kernel"].dtype == ready["embed"]["embedding"].dtype == jnp.bfloat16
    assert layer["A_log"].dtype == layer["norm"]["scale"].dtype == jnp.float32
    step = jax.jit(lambda params: model.apply({"params": params}, token[:, None], state=state)[0])
    np.testing.assert_array_equal(step(ready), step(params))


@pytest.mark.quick
def test_a_gpu_reads_prompts_by_cudnn_and_steps_by_our_own_kernel():
    model, *arrays = made("attention", "bfloat16", width=128, layers=2)
    key, token = jax.eval_shape(lambda: (jax.random.key(0), jnp.zeros(B, jnp.int32)))
    params, state = jax.eval_shape(lambda: arrays)
    prompt = jax.ShapeDtypeStruct((B, 128), jnp.int32)
    with meshes.in_force(meshes.mesh_of("gpu")):
        read = prefill.trace(model, GREEDY, 256, params, prompt, {}, key)
        step = decode.trace(model, GREEDY, 4, params, state, token, key, 1, 4)
    read, step = (traced.lower(lowering_platforms=("cuda",)).as_text() for traced in (read, step))
    assert "fmha" in read and "decode_parts" not in read
    assert "fmha" not in step and step.count("decode_parts") >= 2


@pytest.mark.scale
def test_bench_decode_makes_rows_of_every_contender(monkeypatch):
    tiny = dict(width=16, layers=1, heads=2, vocab=V, prompt=8, tokens=17, dtype="float32")
    monkeypatch.setattr(decode_speed, "SIZES", dict.fromkeys(("cpu", "gpu"), tiny))
    monkeypatch.setattr(decode_speed, "BATCHES", (2,))
    monkeypatch.setattr(decode_speed, "CASES", {"attention": decode_speed.CASES["attention"]})
    rows = list(decode_speed.measure(rounds=1))
    assert [row["contender"] for row in rows][:2] == ["longview cached", "longview naive"]
    for row in rows[:2]:
        assert all(row[key] > 0 for key in decode_speed.SHEET.figures), row
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["token_ms"])
    first, _, cached, *_ = decode_speed.SHEET.table([rows[0], dict(rows[1], error="x")]).splitlines()
    assert first.startswith("| mixer | batch | prompt | contender | first token ms |")
    assert cached.startswith("| attention | 2 | 8 | longview cached |")
