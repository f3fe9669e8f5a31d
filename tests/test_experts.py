"""A mixture of experts is the sum over each token's chosen experts, at the cost of those alone, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import build
from model.asked import Asked
from model.contract import Context
from model.errors import UserError
from model.mlps.experts import Experts, arrival
from model.mlps.mlp import FORMS
from model.ops.grouped import LAYOUTS, bounded_layout, grouped, moved
from train import config as configs

pytestmark = pytest.mark.usefixtures("quickly_compiled")

B, L, D, F, X = 2, 9, 8, 12, 4
SEGMENTS = jnp.asarray([[1] * 9, [1, 1, 0, 1, 1, 2, 2, 0, 0]])


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("implementation", LAYOUTS)
@pytest.mark.parametrize("sizes", [(5, 0, 3, 4), (12, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 0)])
def test_a_grouped_product_is_each_rows_with_the_matrix_of_its_group(implementation, sizes):
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(5), (*sizes, 3)))  # three rows of no group
    x, kernel, weight = drawn(len(group), D), drawn(X, D, F, seed=1), drawn(len(group), F, seed=2)

    def through(x, kernel):
        slots = LAYOUTS[implementation](jnp.asarray(group), X)
        return moved(grouped(moved(x, slots.row, slots.slot), kernel, slots), slots.slot, slots.row)

    def plain(x, kernel):
        padded = jnp.concatenate([kernel, jnp.zeros((1, D, F))])
        return jnp.einsum("ri,rio->ro", x, padded[group])

    for ours, truth in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(lambda *a: (weight * through(*a)).sum(), (0, 1)))(x, kernel)),
        jax.tree.leaves(jax.value_and_grad(lambda *a: (weight * plain(*a)).sum(), (0, 1))(x, kernel)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, truth, atol=1e-4)


def test_rows_past_the_room_of_their_group_get_nothing():
    slots = bounded_layout(jnp.asarray([1, 0, 1, 1, 9, 0]), 2, 2)
    assert slots.slot.tolist() == [2, 0, 3, 4, 4, 1] and slots.row.tolist() == [1, 5, 0, 2]


def made(**settings):
    mixer = Experts(D, hidden=F, n_experts=X, **settings)
    x = drawn(B, L, D)
    variables = mixer.init(jax.random.key(0), x, Context())
    return mixer, jax.tree.map(lambda leaf: leaf.unbox(), {"params": variables["params"]}, is_leaf=is_boxed), x


def is_boxed(leaf):
    return hasattr(leaf, "unbox")


def one_by_one(params, x, k, kind="swiglu", over="chosen", send=lambda b, l, e: True):
    """Token by token, expert by expert, in numpy's order."""
    form = FORMS[kind](parent=None, width=D)
    y = np.zeros(x.shape)
    for b, l in np.ndindex(*x.shape[:2]):
        token = x[b, l]
        scores = np.asarray(token @ params["router"]["kernel"], np.float64)
        best = np.argsort(-scores, kind="stable")[:k]
        share = np.exp(scores[best]) / np.exp(scores[best] if over == "chosen" else scores).sum()
        for e, weight in zip(best, share, strict=True):
            h = form.activation(token @ params["up"][e])
            h = h * (token @ params["gate"][e]) if form.gated else h
            y[b, l] += weight * np.asarray(h @ params["down"][e]) * send(b, l, e)
    return y


@pytest.mark.few(1)
@pytest.mark.quick
@pytest.mark.parametrize("implementation", LAYOUTS)
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 1, "weights": "all", "kind": "relu"}, {"top_k": 4}], ids=["top 2", "switch", "all"]
)
def test_each_token_is_the_weighted_sum_of_its_experts(settings, implementation):
    mixer, variables, x = made(implementation=implementation, **settings)
    params = variables["params"]
    assert set(params) == {"router", "up", "down"} | ({"gate"} if mixer.kind == "swiglu" else set())
    y, _ = jax.jit(mixer.apply)(variables, x, Context())
    truth = one_by_one(params, x, mixer.top_k, mixer.kind, mixer.weights)
    np.testing.assert_allclose(y, truth, atol=1e-5)


def test_shared_experts_are_one_more_mlp_for_every_token():
    mixer, variables, x = made(shared=2)
    params = variables["params"]
    assert params["shared"]["up"]["kernel"].shape == (D, 2 * F) and "bias" not in params["shared"]["up"]
    always = FORMS["swiglu"](D, hidden=2 * F)
    y = mixer.apply(variables, x, Context())[0] - always.apply({"params": params["shared"]}, x, Context())[0]
    np.testing.assert_allclose(y, one_by_one(params, x, 2), atol=1e-5)


def test_an_expert_takes_its_room_of_each_row_first_come_first_served():
    """Whatever the room, who is dropped is told, and padding takes none of it."""
    mixer, variables, x = made(capacity=0.5)
    ctx = Context(segments=SEGMENTS, positions=jnp.zeros((B, L), jnp.int32), train=True)
    (y, _), told = mixer.apply(variables, x, ctx, mutable=["losses", "reports"])
    room, taken = -(-0.5 * 2 * L // X), {}

    def send(b, l, e):
        if SEGMENTS[b, l] == 0:
            return False
        taken[b, e] = taken.get((b, e), 0) + 1
        return taken[b, e] <= room

    truth = one_by_one(variables["params"], x, 2, send=send)
    real = np.asarray(SEGMENTS) > 0
    np.testing.assert_allclose(y[real], truth[real], atol=1e-5)
    dropped = sum(max(n - room, 0) for n in taken.values()) / (2 * real.sum())
    assert dropped > 0.1
    np.testing.assert_allclose(told["reports"]["dropped"][0], dropped, atol=1e-6)

    free, _ = mixer.apply(variables, x, Context(segments=SEGMENTS))
    np.testing.assert_allclose(free[real], one_by_one(variables["params"], x, 2)[real], atol=1e-5)


def test_arrival_counts_those_before():
    chosen = jnp.asarray([[[0, 1], [1, 0], [1, 2]]])
    kept = jnp.asarray([[[True, True], [True, False], [True, True]]])
    assert arrival(chosen, kept, 3).tolist() == [[[0, 0], [1, 1], [2, 0]]]


def test_losses_and_reports_are_those_of_the_papers():
    mixer, variables, x = made(balance=1.0, router_z=1.0)
    ctx = Context(segments=SEGMENTS, positions=jnp.zeros((B, L), jnp.int32), train=True)
    _, told = mixer.apply(variables, x, ctx, mutable=["losses", "reports"])
    real = np.asarray(SEGMENTS) > 0
    scores = np.asarray(x @ variables["params"]["router"]["kernel"], np.float64)[real]
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    f = np.bincount(np.argsort(-scores)[:, :2].ravel(), minlength=X) / (2 * len(scores))
    want = {
        "balance": X * (f * p.mean(0)).sum(),
        "router_z": np.mean(np.log(np.exp(scores).sum(-1)) ** 2),
        "load": X * f.max(),
        "dropped": 0.0,
        "router_entropy": -(p * np.log(p)).sum(-1).mean(),
    }
    found = {name: float(value[0]) for part in told.values() for name, value in part.items()}
    assert found == pytest.approx(want, abs=1e-5)


def test_work_grows_with_the_experts_a_token_goes_through_not_with_those_there_are():
    def flops(n, k):
        mixer = Experts(32, hidden=64, n_experts=n, top_k=k)
        x = jax.ShapeDtypeStruct((4, 64, 32), jnp.float32)
        variables = jax.eval_shape(mixer.init, jax.random.key(0), x, Context())
        run = jax.jit(lambda v, x: mixer.apply(v, x, Context())[0])
        return run.lower(variables, x).compile().cost_analysis()["flops"]

    assert flops(16, 2) < 1.3 * flops(4, 2)
    assert flops(16, 4) > 1.7 * flops(16, 2)


@pytest.mark.scale
def test_a_model_of_experts_generates_what_it_would_answer():
    """A capacity is for training alone, so a token does not hang on how many come with it."""
    config = configs.load("configs/debug.py", [("model.mlp", "experts"), ("model.experts.capacity", "0.5")])
    model = build.build(config.model.to_dict(), Asked(20))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 10)))
    variables, run = jax.jit(model.init)(jax.random.key(0), tokens), jax.jit(model.apply)
    whole, _ = run(variables, tokens)
    state, parts = model.init_state(2, 10), []
    for piece in (tokens[:, :6], tokens[:, 6:7], tokens[:, 7:]):
        logits, state = run(variables, piece, state=state)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5)


@pytest.mark.scale
@pytest.mark.parametrize("implementation", LAYOUTS)
def test_gradients_in_bfloat16_are_summed_wide(implementation):
    _, variables, x = made()
    mixer = Experts(D, hidden=F, n_experts=X, dtype=jnp.bfloat16, implementation=implementation)
    grads = jax.grad(lambda v: mixer.apply(v, x.astype(jnp.bfloat16), Context())[0].astype(jnp.float32).sum())(
        variables
    )
    for name, leaf in grads["params"].items():
        leaf = jax.tree.leaves(leaf)[0]
        assert leaf.dtype == jnp.float32 and (leaf.astype(jnp.bfloat16) != leaf).any(), name


def test_jitter_is_drawn_in_training_alone():
    mixer, variables, x = made(jitter=0.9)
    plain = mixer.apply(variables, x, Context())[0]
    np.testing.assert_allclose(plain, one_by_one(variables["params"], x, 2), atol=1e-5)
    drawn = mixer.apply(variables, x, Context(train=True), rngs={"dropout": jax.random.key(0)})[0]
    assert np.abs(drawn - plain).max() > 1e-3


def test_more_experts_a_token_than_there_are():
    with pytest.raises(UserError, match=r"top_k 5 is more than n_experts 4; closest: 4"):
        made(top_k=5)
