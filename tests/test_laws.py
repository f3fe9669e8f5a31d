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
WRITING = [case for case in CASES if case.values[0][0] in zoo.WRITERS]  # can be causal, and go on from a state
BARE = [case for case in PLAIN if case.values[0][2] == "none"]  # and no positions
# Those that run code of their own. Other settings and positions are held to the laws whose programs tell them apart.
OWN = [case for case in CASES if case in BARE or "window" in case.values[0][1]]
REST = [c for c in MATRIX if c.id not in {case.id for case in CASES} and c.values[0][0] in zoo.WRITERS]
L, DOCUMENT = 20, 9  # tokens of a row, and of a document in it
PACKED = np.asarray([[1, 1, 0, 1, 1, 2, 0, 0, 2, 2, 2, 0, 2, 0, 3, 3, 0, 0, 3, 3], [3] * L])
GAP = np.asarray([[1] * 5 + [0] * 3 + [1] * 12] * 2)  # a prompt padded at its end, then more tokens


def pieces(mixer, x, ctx, lengths):
    """The outputs of rows run in pieces with the state carried; of one document, segments tell padding and no more."""
    variables, state, outputs, start = zoo.params(mixer), mixer.init_state(*x.shape[:2]), [], 0
    x, ctx = jax.device_get((x, ctx))
    for n in lengths:
        part = jax.tree.map(lambda leaf, here=slice(start, start + n): leaf[:, here], ctx)
        if ctx.segments.max() == 1 and part.segments.all():
            part = part.replace(segments=None)
        y, state = zoo.apply(mixer)(variables, x[:, start : start + n], part, state)
        outputs.append(y)
        start += n
    assert start == x.shape[1]
    return np.concatenate(outputs, axis=1)


@pytest.mark.quick
@pytest.mark.parametrize("case", [case for case in OWN if case in WRITING])
def test_split(case):
    """Whole equals any pieces with the state carried, whatever padding lies between: prefill, chunks and decoding."""
    mixer, x, ctx, real = zoo.make(case), zoo.inputs(2, L), zoo.context(GAP), GAP[0] > 0
    np.testing.assert_array_equal(ctx.positions[0], [0, 1, 2, 3, 4, 0, 0, 0, *range(5, 17)])
    gapped = np.array(zoo.inputs(2, L, seed=9))
    gapped[:, real] = x[:, : real.sum()]
    _, whole = zoo.run(mixer, x)
    for lengths in ([4] * 3 + [1] * 8, [1] + [4] * 4 + [1] * 3):
        np.testing.assert_allclose(pieces(mixer, gapped, ctx, lengths)[:, real], whole[:, : real.sum()], atol=2e-5)


def splits_packed_rows(case, lengths):
    mixer, x, ctx = zoo.make(case), zoo.inputs(2, L), zoo.context(PACKED)
    _, whole = zoo.run(mixer, x, ctx=ctx)
    np.testing.assert_allclose(pieces(mixer, x, ctx, lengths)[PACKED > 0], whole[PACKED > 0], atol=2e-5)


@pytest.mark.parametrize("case", WRITING)
def test_packed_rows_split(case):
    """The split law for documents and padding."""
    splits_packed_rows(case, [4] * 5)


@pytest.mark.scale
@pytest.mark.parametrize("case", [case for case in OWN if case in WRITING])
def test_packed_rows_split_into_tokens(case):
    splits_packed_rows(case, [1] * L)


@pytest.mark.scale
@pytest.mark.parametrize("case", REST)
def test_every_combination_splits_packed_rows_or_is_refused(case):
    """With the cases of the law before, every mixer, variant and position there is."""
    if reason := zoo.refused(case):
        assert f"position {case[2]!r}" in reason
        return
    mixer, x, ctx = zoo.make(case), zoo.inputs(2, L), zoo.context(PACKED)
    whole, none = zoo.apply(mixer)(zoo.params(mixer), x, ctx)
    assert none is None
    split = pieces(mixer, x, ctx, [4] * 5)
    np.testing.assert_allclose(split[PACKED > 0], np.asarray(whole)[PACKED > 0], atol=2e-5)


T = 4  # the last token whose output is heard


def size_of_pull(mixer, L):
    """How much the outputs up to T depend on each input, `[B, L]`."""
    pull, _ = zoo.run(mixer, zoo.inputs(2, L), zoo.inputs(2, L, seed=1).at[:, T + 1 :].set(0))
    return np.abs(pull).sum(-1)


@pytest.mark.quick
@pytest.mark.parametrize("case", WRITING)
def test_causality(case):
    """No output depends on a later input, by gradient."""
    size = size_of_pull(zoo.make(case), zoo.LENGTH)
    # An FFT spreads rounding over the whole length; anything learned from the future would be far larger.
    assert (size[:, T + 1 :] < 1e-5).all() and (size[:, : T + 1] > 1e-4).all()


@pytest.mark.quick
@pytest.mark.parametrize("case", [case for case in CASES if case in PLAIN + OWN or case not in WRITING])
def test_bidirectional_mode(case):
    """Every output depends on every input in reach, or the mode is refused."""
    try:
        size = size_of_pull(zoo.make(case, causal=False), DOCUMENT)
        assert (size[:, : T + case[1].get("window", DOCUMENT)] > 1e-4).all()
    except UserError as refusal:
        assert "causal" in str(refusal)


def directed(cases):
    """Each the way it runs, and with its defaults both ways."""
    ways = [(case, case in WRITING) for case in cases] + [
        (case, False) for case in PLAIN if case in cases and case in WRITING
    ]
    return [
        pytest.param(*case.values, causal, id=f"{case.id}-{'causal' if causal else 'bidirectional'}", marks=case.marks)
        for case, causal in ways
    ]


def in_direction(case, causal):
    """The mixer; None if it refuses to run so."""
    mixer = zoo.make(case, causal=causal)
    try:
        zoo.params(mixer)
    except UserError as refusal:
        assert not causal and "causal" in str(refusal)
        return None
    return mixer


def places(segments):
    """Where tokens are real, and weights of outputs: by their place among the real ones."""
    real = segments > 0
    return real, np.where(real, np.cumsum(real, axis=1), 0)[..., None] * np.ones(zoo.WIDTH)


@pytest.mark.quick
@pytest.mark.parametrize("case, causal", directed(CASES))
def test_segments(case, causal):
    """Documents packed in a row equal each alone; padding changes nothing, in values and in gradients."""
    if (mixer := in_direction(case, causal)) is None:
        return
    segments, x = np.repeat([[1, 2, 0]] * 2, [DOCUMENT, DOCUMENT, 2], axis=1), np.asarray(zoo.inputs(2, L))
    real, weight = places(segments)
    pull, y = zoo.run(mixer, x, weight, zoo.context(segments))

    def documents(rows):
        """Those of the first row, each a row of its own."""
        return rows[0, : 2 * DOCUMENT].reshape(2, DOCUMENT, zoo.WIDTH)

    alone_pull, alone = zoo.run(mixer, documents(x), documents(weight))
    np.testing.assert_allclose(documents(y), alone, atol=2e-5)
    np.testing.assert_allclose(documents(pull), alone_pull, atol=2e-4, rtol=1e-4)
    assert np.isfinite(pull).all() and (np.abs(pull[~real]) < 1e-7).all()


def loud(segments):
    """Inputs that are much larger where there is padding."""
    return np.asarray(zoo.inputs(*segments.shape) * np.where(segments > 0, 1, 30)[..., None])


@pytest.mark.quick
@pytest.mark.parametrize("case, causal", directed(CASES))
def test_padding_is_skipped(case, causal):
    """Wherever it stands in a row: real tokens get what they get where it is moved to the end, and pull as much."""
    if (mixer := in_direction(case, causal)) is None:
        return
    scattered = [0, 1, 1, 0, 0, 1, 2, 0, 2, 2, 0, 2, 0, 0, 0, 2, 2, 0, 2, 0]
    segments = np.asarray([scattered, [1] * 2 + [0] * 5 + [1] * 13])
    (real, weight), x = places(segments), loud(segments)
    order = np.argsort(~real, axis=1, kind="stable")

    def moved(rows):
        return np.take_along_axis(rows, order.reshape(order.shape + (1,) * (rows.ndim - 2)), axis=1)

    pull, y = zoo.run(mixer, x, weight, zoo.context(segments))
    front_pull, front_y = zoo.run(mixer, moved(x), moved(weight), zoo.context(moved(segments)))
    np.testing.assert_allclose(y[real], front_y[moved(real)], atol=2e-5)
    np.testing.assert_allclose(pull[real], front_pull[moved(real)], atol=2e-4, rtol=1e-4)
    assert (np.abs(pull[~real]) < 1e-7).all()


@pytest.mark.quick
@pytest.mark.parametrize("case, causal", directed(OWN))
def test_right_padding(case, causal):
    """Where padding is told to be behind the rows, real tokens get what they get without being told, and pull alike."""
    if (mixer := in_direction(case, causal)) is None:
        return
    segments = np.asarray([[1] * 7 + [0] * 13, [1] * L])
    (real, weight), x, ctx = places(segments), loud(segments), zoo.context(segments)
    pull, y = zoo.run(mixer, x, weight, ctx)
    ctx = ctx.replace(right_padded=True)
    for known in [ctx] if mixer.sees_ahead else [ctx, looking_back(ctx)]:
        told = known.replace(right_padded=zoo.asks(mixer, x, known))  # else it runs as if it had not been told
        told_pull, told_y = zoo.run(mixer, x, weight, told)
        np.testing.assert_allclose(told_y[real], y[real], atol=2e-5)
        np.testing.assert_allclose(told_pull[real], pull[real], atol=2e-4, rtol=1e-4)
        assert (np.abs(told_pull[~real]) < 1e-4).all()  # an FFT spreads rounding


@pytest.mark.quick
@pytest.mark.parametrize("case, causal", directed(CASES))
def test_odd_inputs(case, causal):
    """Zeros, numbers a thousand times as large, both in turn, rows of nothing but padding: numbers come out, gradients
    too."""
    if (mixer := in_direction(case, causal)) is None:
        return
    segments = np.asarray([[0] * L, [0, 1, 1, 0, 0, 1, 2, 0, 2, 2, 0, 2, 0, 0, 0, 2, 2, 0, 2, 0]])
    (real, weight), x = places(segments), np.asarray(zoo.inputs(2, L))
    for odd in (0 * x, 1000 * x, np.where(np.arange(L)[:, None] % 3, 1000 * x, 0)):
        pull, y = zoo.run(mixer, odd, weight, zoo.context(segments))
        assert np.isfinite(y[real]).all() and np.isfinite(pull).all()
        assert (np.abs(pull[~real]) < 1e-7).all()


LEAST = 0.01  # the share of the whole gradient below which a parameter's is not looked at any closer
HALF = ("attention", "mla", "mamba", "mamba2", "rwkv", "s4d")  # in float16 too, one of a kind
AWKWARD = [(case, length) for case in CASES for length in ([1, 63, 100] if case in BARE else [63])]


@pytest.mark.parametrize(
    "case, length",
    [pytest.param(*c.values, n, id=f"{c.id}-{n}", marks=[zoo.LATER] if n == 1 else c.marks) for c, n in AWKWARD],
)
def test_truth(case, length):
    """Value and gradient equal the float64 reference: tight in float32, loose in float16 and looser in bfloat16."""
    # At one length for all that see no later token: what follows carries no weight, and must not reach what is before.
    longest = max(n for _, n in AWKWARD) if case[0] in zoo.WRITERS else length
    variables, x, weight = jax.device_get(
        (zoo.params(zoo.make(case)), zoo.inputs(2, longest), zoo.inputs(2, longest, 1))
    )

    def value_and_grads(dtype, implementation, variables, x, weight, ctx):
        run = zoo.gradient(zoo.make(case, dtype=dtype, implementation=implementation))
        (grads, pull), y = jax.device_get(run(variables, x.astype(dtype), ctx, weight))
        return y[:, :length], pull[:, :length], jax.tree.leaves(grads)

    with jax.enable_x64(True):
        heard = weight * (np.arange(longest) < length)[:, None]
        wide = jax.tree.map(lambda v: v.astype(np.float64), (variables, x, heard))
        *true, true_grads = value_and_grads(jnp.float64, zoo.reference(case), *wide, zoo.context(L=longest))
        assert true[0].dtype == np.float64
    # Some parameters can do nothing in a short row (queries where there is but one key), and what is to be zero comes
    # out as rounding of what cancelled. Errors are measured by a parameter's own gradient down to this much of all.
    least = LEAST * np.sqrt(sum(np.sum(grad**2) for grad in true_grads))
    narrow = [(jnp.float16, 0.006)] * (case[0] in HALF and case[2] == "none") + [(jnp.bfloat16, 0.06)]
    for dtype, tolerance in [(jnp.float32, 3e-5), *(narrow if length == zoo.LENGTH else [])]:
        *got, grads = value_and_grads(dtype, None, variables, x[:, :length], weight[:, :length], Context())
        for one, other, floor in zip([*got, *grads], [*true, *true_grads], [0, 0] + [least] * len(grads), strict=True):
            assert np.isfinite(one.astype(np.float64)).all()
            assert zoo.far(one, other, floor) < tolerance, (dtype, one.shape, zoo.far(one, other, floor))
    if length == zoo.LENGTH:  # what was got last, in bfloat16: added up over tokens and devices without being rounded
        assert all((grad.astype(jnp.bfloat16).astype(grad.dtype) != grad).any() for grad in grads)


GROWTH = {1: 4.6, 1.5: 9, 2: 18}  # claimed power of the length -> times the memory, at most, of four times the length


@pytest.mark.few(16)
@pytest.mark.parametrize("case", OWN)
def test_cost(case):
    """Compiled memory of a training step grows with the length as the mixer claims, past where all pairs are cheap."""

    def memory(length):
        mixer = zoo.make(case)
        short = getattr(mixer, "longest", length) < length
        return zoo.memory(mixer.clone(longest=length) if short else mixer, length)

    growth = memory(16384) / memory(4096)
    assert growth < GROWTH[zoo.make(case).cost], growth


@pytest.mark.quick
@pytest.mark.parametrize("case", [case for case in BARE if case not in WRITING])
def test_what_mixes_whole_rows_is_refused_where_it_cannot(case):
    """As a causal mixer, and with a state: by name."""
    name, _, _ = case
    with pytest.raises(UserError, match=rf"{name}.*causal.*closest"):
        zoo.shapes(zoo.make(case, causal=True))
    with pytest.raises(UserError, match=rf"{name}.*state.*closest"):
        zoo.make(case).init_state(1, 4)


@pytest.mark.quick
@pytest.mark.parametrize("case", WRITING)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_state(case, dtype):
    """`state_bytes` is what the arrays hold, before and after use; recurrent states stay in float32."""
    mixer = zoo.make(case, dtype=dtype)
    for length in (5, 64):
        state = jax.eval_shape(lambda n=length: mixer.init_state(1, n))
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) == mixer.state_bytes(length)
    variables = zoo.params(mixer)
    _, after = jax.eval_shape(mixer.apply, variables, zoo.inputs(1, 3, dtype=dtype), zoo.context(L=3), state)
    spec = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == spec
