"""Pairs of rows: two towers with shared weights, a contrastive loss, and both texts in one row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import build
from model.asked import Asked
from model.errors import UserError
from tests.test_model import init, model_config, run
from train.contrastive import info_nce

pytestmark = [pytest.mark.usefixtures("quick_draws"), pytest.mark.usefixtures("quickly_compiled")]
RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.integers(0, 20, (3, 7)), jnp.int32) for _ in range(2))
CLASSES, PARTNERS = Asked(20, n_classes=2, pair=True), Asked(20, pair=True)


def made(asked, **changes):
    """A model and its parameters, away from where a class is as good as another."""
    model = build.build(model_config(**dict(kind="towers", causal=False) | changes), asked)
    variables = init(model, A, **({"other": B} if asked.pair else {}))
    return model, jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape), variables)


@pytest.mark.quick
def test_both_towers_are_one_set_of_parameters():
    towers, one = (
        jax.tree_util.tree_map(np.shape, made(asked, kind=kind)[1]["params"])
        for asked, kind in ((CLASSES, "towers"), (Asked(20, n_classes=2), "stack"))
    )
    assert towers.pop("compare") == {"kernel": (4 * 16, 16), "bias": (16,)}
    assert towers == one
    assert jax.tree_util.tree_map(np.shape, made(PARTNERS)[1]["params"]) == {
        k: v for k, v in one.items() if k != "classes"
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("pool", ["mean", "cls", "last"])
def test_towers_know_the_other_row_by_its_vector_alone(pool):
    """Logits are those of the features [a, b, a b, a - b] of rows read alone; rows swapped, features say how."""
    model, variables = made(CLASSES, pool=pool)
    p = variables["params"]
    found, _ = run(model, variables, A, other=B)
    assert found.shape == (3, 2)

    def vector(rows):
        """Of rows read as pairs with themselves: then [v, v, v v, 0] goes into the hidden layer."""
        stack = build.build(model_config(causal=False, pool=pool), Asked(20, n_classes=16))
        eyes = {"classes": {"kernel": jnp.eye(16), "bias": jnp.zeros(16)}}
        return run(stack, {"params": {k: v for k, v in p.items() if k != "compare"} | eyes}, rows)[0]

    def judged(a, b):
        features = np.concatenate([a, b, a * b, a - b], axis=-1)
        hidden = jax.nn.gelu(features @ p["compare"]["kernel"] + p["compare"]["bias"])
        return hidden @ p["classes"]["kernel"] + p["classes"]["bias"]

    a, b = vector(A), vector(B)
    np.testing.assert_allclose(found, judged(a, b), atol=2e-5)
    np.testing.assert_allclose(run(model, variables, B, other=A)[0], judged(b, a), atol=2e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", [CLASSES, PARTNERS], ids=["classes", "partners"])
@pytest.mark.parametrize("kind", ["towers", "stack"])
def test_padding_changes_nothing(kind, asked):
    if kind == "stack" and asked is PARTNERS:
        return
    model, variables = made(asked, kind=kind, position="rope")
    ones = jnp.ones((3, 7), jnp.int32)
    found, _ = run(model, variables, A, other=B)
    inner = jnp.concatenate([A[:, :2], jnp.full((3, 2), 9), A[:, 2:]], axis=1)  # between the tokens of a row
    behind = jnp.pad(B, [(0, 0), (0, 2)], constant_values=5)
    padded, _ = run(
        model,
        variables,
        inner,
        segments=jnp.concatenate([ones[:, :2], 0 * ones[:, :2], ones[:, 2:]], axis=1),
        other=behind,
        other_segments=jnp.pad(ones, [(0, 0), (0, 2)]),
    )
    np.testing.assert_allclose(padded, found, atol=2e-5)
    one_side, _ = run(model, variables, A, other=B, other_segments=ones)
    np.testing.assert_allclose(one_side, found, atol=2e-5)


@pytest.mark.quick
def test_cosines_are_of_every_first_with_every_second():
    model, variables = made(PARTNERS)
    found, _ = run(model, variables, A, other=B)
    assert found.shape == (3, 3) and np.abs(found).max() <= 1 + 1e-6
    np.testing.assert_allclose(run(model, variables, B, other=A)[0], found.T, atol=1e-5)
    same, _ = run(model, variables, A, other=A)
    np.testing.assert_allclose(np.diagonal(same), 1, atol=1e-5)
    np.testing.assert_allclose(run(model, variables, A[:1], other=B[2:])[0][0, 0], found[0, 2], atol=1e-5)


def numpy_info_nce(logits, here):
    """One pair at a time, in float64."""
    loss = np.zeros(len(logits))
    among = [i for i in range(len(logits)) if here[i]]
    for i in among:
        for others in (logits[i, among], logits[among, i]):
            loss[i] += (np.log(np.exp(others).sum()) - logits[i, i]) / 2
    return loss


@pytest.mark.quick
def test_the_contrastive_loss_and_its_gradient():
    logits, here = 3 * RNG.normal(size=(5, 5)), np.asarray([True, True, False, True, True])
    found, pull = jax.value_and_grad(lambda x: jnp.sum(jnp.where(here, info_nce(x, here), 0)))(
        jnp.asarray(logits, jnp.float32)
    )
    np.testing.assert_allclose(found, numpy_info_nce(logits, here).sum(), rtol=1e-5)
    numeric = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-5
        ahead, back = (numpy_info_nce(logits + s * step, here).sum() for s in (1, -1))
        numeric[place] = (ahead - back) / 2e-5
    np.testing.assert_allclose(pull, numeric, atol=1e-5)
    assert not pull[2].any() and not pull[:, 2].any()
    assert info_nce(jnp.zeros((4, 4)), jnp.ones(4, bool))[0] == pytest.approx(np.log(4))


def test_both_texts_in_one_row_see_each_other():
    model, variables = made(CLASSES, kind="stack")
    assert variables["params"]["embed"]["embedding"].shape == (21, 16), "the separator's id comes after the task's"
    found, _ = run(model, variables, A, other=B)
    assert found.shape == (3, 2) and not np.allclose(found, run(model, variables, B, other=A)[0], atol=1e-4)

    def pulled(embedded):
        changed = {"params": variables["params"] | {"embed": {"embedding": embedded}}}
        return run(model, changed, A, other=B)[0].sum()

    pull = np.abs(jax.grad(pulled)(variables["params"]["embed"]["embedding"])).sum(-1)
    used = set(A.ravel().tolist()) | set(B.ravel().tolist()) | {20}
    assert set(np.flatnonzero(pull > 1e-7).tolist()) == used
    by_hand = jnp.concatenate([A, jnp.full((3, 1), 20), B], axis=1)
    single = build.build(model_config(causal=False), Asked(21, n_classes=2))
    sides = variables["params"]["sides"]["embedding"]
    flat = {"params": {k: v for k, v in variables["params"].items() if k != "sides"}}
    same = {"params": variables["params"] | {"sides": {"embedding": jnp.zeros_like(sides)}}}
    np.testing.assert_allclose(run(model, same, A, other=B)[0], run(single, flat, by_hand)[0], atol=1e-5)
    assert not np.allclose(run(model, same, A, other=B)[0], found, atol=1e-4), "the sides have vectors of their own"


@pytest.mark.quick
@pytest.mark.parametrize(
    "asked, changes, words",
    [
        (Asked(20, n_classes=2), dict(kind="towers"), "'towers' reads pairs of rows, .*; closest: stack"),
        (PARTNERS, dict(kind="stack"), "'stack' reads both rows of a pair as one, .*; closest: towers"),
        (CLASSES, dict(kind="seq2seq", mixers=()), "'seq2seq' reads a source and answers it"),
        (CLASSES, dict(kind="towers", pool="cls"), "pool 'cls' reads the first position"),
    ],
)
def test_what_cannot_be_is_one_line(asked, changes, words):
    with pytest.raises(UserError, match=words) as raised:
        build.build(model_config(**changes), asked)
    assert "\n" not in str(raised.value)
