"""The laws that every mixer obeys. They walk the zoo: a new mixer has its tests the day it gets its line there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.documents import looking_back
from model.errors import UserError
from tests import zoo

CASES, MATRIX = zoo.cases(), zoo.matrix()
PLAIN = [case for case in CASES if not case.values[0][1]]  # every mixer's own defaults
BARE = [case for case in PLAIN if case.values[0][2] == "none"]  # and no positions
PACKED = [[1, 1, 0, 1, 1, 2, 0, 0, 2, 2, 2, 0], [3] * 12]


def pieces(mixer, variables, x, ctx, lengths):
    """The outputs of a sequence run in pieces with the state carried, and the last state."""
    state, outputs, start = mixer.init_state(x.shape[0], x.shape[1]), [], 0
    run = zoo.apply(mixer)
    for n in lengths:
        part = Context(
            positions=ctx.positions[:, start : start + n],
            segments=None if ctx.segments is None else ctx.segments[:, start : start + n],
        )
        y, state = run(variables, x[:, start : start + n], part, state)
        outputs.append(y)
        start += n
    return jnp.concatenate(outputs, axis=1), state


@pytest.mark.few(3, each=True)
@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_split(case):
    """Whole equals any pieces with the state carried: prefill, chunked prefill and decoding at once."""
    mixer = zoo.make(case)
    variables, x = zoo.params(mixer), zoo.inputs(2, 12)
    whole, none = zoo.apply(mixer)(variables, x, Context())
    assert none is None
    for lengths in ([4, 4, 1, 1, 1, 1], [1, 4, 4, 1, 1, 1]):
        split, _ = pieces(mixer, variables, x, zoo.context(L=12), lengths)
        np.testing.assert_allclose(split, whole, atol=2e-5)


@pytest.mark.scale
@pytest.mark.parametrize("case", MATRIX)
def test_every_combination_splits_packed_rows_or_is_refused(case):
    """The split law for documents and padding, over every mixer, variant and position there is."""
    if reason := zoo.refused(case):
        assert f"position {case[2]!r}" in reason
        return
    mixer = zoo.make(case)
    variables, x, ctx = zoo.params(mixer), zoo.inputs(2, 12), zoo.context(PACKED)
    whole, _ = zoo.apply(mixer)(variables, x, ctx)
    split, _ = pieces(mixer, variables, x, ctx, [4, 4, 4])
    real = np.asarray(PACKED) > 0
    np.testing.assert_allclose(split[real], whole[real], atol=2e-5)


@pytest.mark.few(3, each=True)
@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_causality(case):
    """No output depends on a later input; in bidirectional mode, every one depends on every other in reach."""
    t, mixer, both = 4, zoo.make(case), zoo.make(case, causal=False)

    def early(L):
        """Weights of the outputs up to t."""
        return zoo.inputs(2, L, seed=1).at[:, t + 1 :].set(0)

    (_, pull), _ = zoo.gradient(mixer)(zoo.params(mixer), zoo.inputs(2, 63), zoo.context(L=63), early(63))
    size = np.abs(pull).sum(-1)
    # An FFT spreads rounding over the whole length; anything learned from the future would be far larger.
    assert (size[:, t + 1 :] < 1e-5).all() and (size[:, : t + 1] > 1e-4).all()

    try:
        variables = zoo.params(both)
        pull = jax.jit(jax.grad(lambda x: jnp.sum(both.apply(variables, x, zoo.context(L=9))[0] * early(9))))
        size = np.abs(pull(zoo.inputs(2, 9))).sum(-1)
        assert (size[:, : t + case[1].get("window", 9)] > 1e-4).all()
    except UserError as refusal:
        assert "causal" in str(refusal)


DIRECTED = [(case, True) for case in CASES] + [(case, False) for case in PLAIN]
IN_DIRECTION = [pytest.param(*c.values, d, id=f"{c.id}-{'causal' if d else 'bidirectional'}") for c, d in DIRECTED]


@pytest.mark.few(4, each=True)
@pytest.mark.quick
@pytest.mark.parametrize("case, causal", IN_DIRECTION)
def test_segments(case, causal):
    """Documents packed in a row equal each alone; padding changes nothing, in values and in gradients."""
    x = zoo.inputs(2, 12)
    if (found := packed(case, causal, [[1] * 5 + [2] * 5 + [0] * 2] * 2, x)) is None:
        return
    mixer, variables, real, pull, y = found
    rows = jnp.concatenate([x[:1], jnp.roll(x[:1], -5, axis=1)])  # each document at the front of one
    if not causal:  # else what follows a document does not reach it, and these rows are those of the split law
        rows = rows[:, :5]
    alone, _ = zoo.apply(mixer)(variables, rows, Context())
    for row, document in enumerate((slice(0, 5), slice(5, 10))):
        np.testing.assert_allclose(y[0, document], alone[row, :5], atol=2e-5)
    assert np.isfinite(pull).all() and (np.abs(pull[~real]) < 1e-7).all()


def packed(case, causal, segments, x):
    """A mixer on packed rows: its parameters, where tokens are real, and their pull and outputs. None if refused."""
    mixer, segments = zoo.make(case, causal=causal), np.asarray(segments)
    try:
        variables = zoo.params(mixer)
    except UserError as refusal:
        assert not causal and "causal" in str(refusal)
        return None
    real = segments > 0
    # Tokens weigh by their place among the real ones.
    weight = np.where(real, np.cumsum(real, axis=1), 0)[..., None] * np.ones(zoo.WIDTH)
    pull, y = zoo.pull(mixer)(x, variables, zoo.context(segments), jnp.asarray(weight, jnp.float32))
    return mixer, variables, real, pull, y


@pytest.mark.quick
@pytest.mark.parametrize("case, causal", IN_DIRECTION)
def test_padding_is_skipped(case, causal):
    """Wherever it stands in a row: real tokens get what they get where it is moved to the end, and pull as much."""
    segments = np.asarray([[0, 1, 1, 0, 0, 1, 2, 0, 2, 2, 0, 2], [1] * 2 + [0] * 5 + [1] * 5])
    x = zoo.inputs(2, 12) * np.where(segments > 0, 1, 30)[..., None]
    if (found := packed(case, causal, segments, x)) is None:
        return
    *_, real, pull, y = found
    order = np.argsort(~real, axis=1, kind="stable")
    *_, front, front_pull, front_y = packed(
        case, causal, np.take_along_axis(segments, order, 1), np.take_along_axis(x, order[..., None], 1)
    )
    np.testing.assert_allclose(y[real], front_y[front], atol=2e-5)
    np.testing.assert_allclose(pull[real], front_pull[front], atol=2e-4, rtol=1e-4)
    assert (np.abs(pull[~real]) < 1e-7).all()


@pytest.mark.few(4, each=True)
@pytest.mark.quick
@pytest.mark.parametrize("case, causal", IN_DIRECTION)
def test_right_padding(case, causal):
    """Where padding is told to be behind the rows, real tokens get what they get without being told, and pull alike."""
    segments = np.asarray([[1] * 7 + [0] * 5, [1] * 12])
    x = zoo.inputs(2, 12) * np.where(segments > 0, 1, 30)[..., None]
    if (found := packed(case, causal, segments, x)) is None:
        return
    mixer, variables, real, pull, y = found
    ctx = zoo.context(segments).replace(right_padded=True)
    weight = np.where(real, np.cumsum(real, axis=1), 0)[..., None] * np.ones(zoo.WIDTH, np.float32)
    for known in [ctx] if mixer.sees_ahead else [ctx, looking_back(ctx)]:
        told_pull, told = zoo.pull(mixer)(x, variables, known, jnp.asarray(weight, jnp.float32))
        np.testing.assert_allclose(told[real], y[real], atol=2e-5)
        np.testing.assert_allclose(told_pull[real], pull[real], atol=2e-4, rtol=1e-4)
        assert (np.abs(told_pull[~real]) < 1e-4).all()  # an FFT spreads rounding


@pytest.mark.few(3, each=True)
@pytest.mark.parametrize("case", CASES)
def test_padding_leaves_the_state(case):
    """A prompt padded at its end, then more tokens: as if the padding had not been there."""
    mixer = zoo.make(case)
    variables, x = zoo.params(mixer), zoo.inputs(2, 12)
    gap = jnp.concatenate([x[:, :5], zoo.inputs(2, 3, seed=9), x[:, 5:9]], axis=1)
    segments = np.asarray([[1] * 5 + [0] * 3 + [1] * 4] * 2)
    ctx = zoo.context(segments)
    np.testing.assert_array_equal(ctx.positions[0], [0, 1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 8])
    whole, _ = zoo.apply(mixer)(variables, x, Context())
    split, _ = pieces(mixer, variables, gap, ctx, [8, 1, 1, 1, 1])
    np.testing.assert_allclose(split[:, segments[0] > 0], whole[:, :9], atol=2e-5)


HALF = ("attention", "mla", "mamba", "mamba2", "rwkv", "s4d")  # in float16 too, one of a kind
AWKWARD = [(case, length) for case in CASES for length in ([1, 7, 63, 100] if case in BARE else [63])]


@pytest.mark.few(3, each=True)
@pytest.mark.parametrize("case, length", [pytest.param(*c.values, n, id=f"{c.id}-{n}") for c, n in AWKWARD])
def test_truth(case, length):
    """Value and gradient equal the float64 reference: tight in float32, loose in float16 and looser in bfloat16."""
    variables, x, weight = zoo.params(zoo.make(case)), zoo.inputs(2, 100), zoo.inputs(2, 100, seed=1)

    def value_and_grads(dtype, implementation, variables, x, weight):
        run = zoo.gradient(zoo.make(case, dtype=dtype, implementation=implementation))
        (grads, pull), y = run(variables, x.astype(dtype), zoo.context(L=x.shape[1]), weight)
        return [y[:, :length], pull[:, :length], *jax.tree.leaves(grads)]

    with jax.enable_x64(True):
        # At one length for all: what follows carries no weight, and must not reach what comes before.
        wide = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), (variables, x, weight.at[:, length:].set(0)))
        truth = value_and_grads(jnp.float64, zoo.reference(case), *wide)
        assert truth[0].dtype == jnp.float64
    narrow = [(jnp.float16, 0.006)] * (case[0] in HALF and case[2] == "none") + [(jnp.bfloat16, 0.06)]
    for dtype, tolerance in [(jnp.float32, 3e-5), *(narrow if length == 63 else [])]:
        got = value_and_grads(dtype, None, variables, x[:, :length], weight[:, :length])
        for one, other in zip(got, truth, strict=True):
            assert np.isfinite(np.asarray(one, np.float64)).all()
            assert zoo.far(one, other) < tolerance, (dtype, np.shape(one), zoo.far(one, other))
    if length == 63:  # what was got last, in bfloat16: added up over tokens and devices without being rounded
        assert all((grad.astype(jnp.bfloat16) != grad).any() for grad in got[2:])


@pytest.mark.parametrize("case", [case for case in CASES if case in BARE or "window" in case.values[0][1]])
def test_cost(case):
    """Compiled memory of a training step grows with the length as the mixer claims."""
    mixer = zoo.make(case)
    variables = zoo.params(mixer)

    def memory(L):
        def objective(variables, x):
            return jnp.sum(mixer.apply(variables, x, zoo.context(L=L))[0] ** 2)

        step = jax.jit(jax.grad(objective, argnums=(0, 1)))
        return step.lower(variables, zoo.inputs(1, L)).compile().memory_analysis().temp_size_in_bytes

    growth = np.log2(memory(4096) / memory(2048))
    assert growth < mixer.cost + 0.25, growth


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_state(case, dtype):
    """`state_bytes` is what the arrays hold, before and after use; recurrent states stay in float32."""
    mixer = zoo.make(case, dtype=dtype)
    for length in (5, 64):
        state = mixer.init_state(1, length)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == mixer.state_bytes(length)
    variables = zoo.params(mixer)
    _, after = jax.eval_shape(mixer.apply, variables, zoo.inputs(1, 3, dtype=dtype), zoo.context(L=3), state)
    spec = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == spec
