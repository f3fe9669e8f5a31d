"""The loss over a vocabulary: chunks change nothing but the memory it takes, on one device or on many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model import build
from model.asked import Asked
from model.ops.cross_entropy import PART, Readout, Targets, likeliest, vocabulary_scores
from tests.host_mesh import RULES, mesh_of, on_mesh
from tests.jaxprs import equations
from train import config as configs
from train.sharding import in_force

B, L, V, D = 4, 6, 16, 8
PLAIN = 10**9  # logits, so that all are made at once
FORMS = {
    "plain": (Readout(), 0.0, False),
    "all": (Readout(scale=0.7, soft_cap=3.0), 0.1, True),
}

pytestmark = pytest.mark.quick


def example(dtype=jnp.float32, lead=(B, L), V=V, D=D):
    rng = np.random.default_rng(0)
    x, table, bias = (jnp.asarray(rng.normal(size=shape)) for shape in ((*lead, D), (V, D), (V,)))
    weights = jnp.asarray(rng.integers(0, 2, lead) * rng.random(lead))  # some are not asked
    ids = jnp.asarray(rng.integers(0, V, lead), jnp.int32)
    kept = dtype if dtype == jnp.float64 else jnp.float32
    return x.astype(dtype), table.astype(kept), bias.astype(kept), weights.astype(kept), ids


def judged(form, room, x, table, bias, weights, ids):
    """Losses, hits and all gradients."""
    readout, smoothing, has_bias = FORMS[form]

    def total(x, table, bias):
        targets = Targets(ids, smoothing, weights)
        found = vocabulary_scores(x, table, bias if has_bias else None, readout, targets, room)
        return 0.5 * found.total, found  # whatever is made of the sum

    (_, found), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, table, bias)
    return found, grads


def close(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1)


@pytest.mark.parametrize("form", FORMS)
def test_chunks_change_nothing(form):
    """In float64: 35 tokens in chunks of 12, of which the last is filled up, or of one."""
    with jax.enable_x64(True):
        given = example(jnp.float64, lead=(5, 7))
        want = judged(form, PLAIN, *given)
        for room in (13 * V, V):
            got = jax.jit(judged, static_argnums=(0, 1))(form, room, *given)
            close(got, want, 1e-13)
    assert 0 < np.asarray(want[0].hits).sum() < 35


def test_bfloat16_is_rounded_as_without_chunks():
    """What is multiplied is narrow; the table's gradient is added up wide, as it is without chunks."""
    given = example(jnp.bfloat16)
    got, want = (jax.jit(judged, static_argnums=(0, 1))("all", room, *given) for room in (5 * V, PLAIN))
    close(got[0], want[0], 1e-6)
    close(got[1][1:], want[1][1:], 1e-3)
    close(got[1][0], want[1][0], 2e-2)


def test_no_logit_is_made_twice():
    """A chunk's logits, and while they are there what vectors and table get: three products, as without chunks."""
    given = example()
    program = jax.make_jaxpr(lambda *given: judged("all", 5 * V, *given))(*given).jaxpr
    products = [eqn.outvars[0].aval.shape for eqn in equations(program, "dot_general")]
    assert sorted(products) == sorted([(5, V), (5, D), (V, D)])


@pytest.mark.parametrize("room", [PLAIN, V])
def test_the_sum_alone_has_a_gradient(room):
    """Or a loss of one's own making would train small models and leave others as they were."""
    x, table, _, _, ids = example()
    slope = jax.grad(lambda x: vocabulary_scores(x, table, None, Readout(), Targets(ids), room).loss.sum())(x)
    assert not slope.any()


def test_a_target_ties_with_the_first_alone():
    """Answers that are equally likely: the first counts, as it does for argmax."""
    x, table = jnp.ones((2, 1)), jnp.zeros((V, 1))
    found = vocabulary_scores(x, table, None, Readout(), Targets(jnp.array([0, 3])), room=V)
    assert found.hits.tolist() == [True, False]


@pytest.mark.quick
@pytest.mark.parametrize("V", [2048, 6 * PART, 5 * PART + 3, 1009, PART - 1])
def test_the_likeliest_is_the_first_of_the_highest(V):
    logits = np.random.default_rng(0).integers(0, 3, (5, 7, V)).astype(np.float32)  # ties everywhere
    logits[0, 0] = np.sort(logits[0, 0])
    logits[0, 1, :] = -np.inf
    np.testing.assert_array_equal(jax.jit(likeliest)(logits), logits.argmax(-1))
    logits[1, 2, V // 2] = np.nan
    assert likeliest(logits)[1, 2] == V // 2, "what is no number is told, as by argmax"


def test_all_logits_are_never_there():
    """4,096 tokens and as many answers, in 16 chunks: the loss and its gradients."""
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in example(lead=(2, 2048), V=4096, D=64)]

    def memory(room):
        program = jax.jit(judged, static_argnums=(0, 1)).lower("plain", room, *given).compile()
        return program.memory_analysis().temp_size_in_bytes

    logits = 4 * 4096 * 4096
    assert memory(PLAIN) >= logits
    assert memory(2**20) <= logits / 5


@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2, sequence=2), dict(fsdp=2, tensor=4)], ids=str)
def test_devices_share_tokens_and_answers(sizes):
    """Each makes the logits of its own tokens and answers; none gathers them."""
    mesh, given = mesh_of(**sizes), example()
    axes = [("data", "fsdp"), "sequence"], ["tensor", "fsdp"], ["tensor"], [("data", "fsdp")], [("data", "fsdp")]
    placed = [jax.device_put(a, NamedSharding(mesh, P(*at))) for a, at in zip(given, axes, strict=True)]
    room = 2 * V // sizes["tensor"]  # two tokens at a time
    program = on_mesh(lambda *given: judged("all", room, *given), mesh)
    close(program(*placed), judged("all", PLAIN, *given), 1e-5)
    with in_force(mesh, RULES):
        jaxpr = str(jax.make_jaxpr(lambda *given: judged("all", room, *given))(*given))
    assert f"f32[2,{V // sizes['tensor']}]" in jaxpr
    assert f"f32[{B},{L},{V}]" not in jaxpr


@pytest.mark.few(1)
@pytest.mark.usefixtures("quick_draws", "quickly_compiled")
@pytest.mark.parametrize("kind", ["stack", "encoder_decoder", "seq2seq"])
def test_models_score_what_they_would_answer(kind):
    """A model that is given targets tells what its logits are worth."""
    mixers = () if kind == "seq2seq" else ("attention",)
    given = {"kind": kind, "width": 16, "layers": 1, "tied": False, "mixers": mixers}
    section = configs.resolve({"model": given}).model.to_dict()
    model = build.build(section, Asked(20, tail=0 if kind == "stack" else 3))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 8)), jnp.int32)
    at = jnp.array([[7, 2], [6, 7]])

    @jax.jit
    def both():
        variables = model.init(jax.random.key(0), tokens, at=at)
        scored = model.apply(variables, tokens, at=at, targets=Targets(tokens[:, :2]))
        return model.apply(variables, tokens, at=at)[0], scored[0]

    logits, found = both()
    want = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, :2, None], -1)[..., 0]
    np.testing.assert_allclose(found.loss, want, rtol=1e-5)  # before the target both are NaN
    np.testing.assert_array_equal(found.hits, (logits.argmax(-1) == tokens[:, :2]) & ~jnp.isnan(want))
    assert jnp.isnan(found.total) == jnp.isnan(want).any()
