"""Attention to blocks that the content chooses, against loops that follow the papers' definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.ops.choice import order_of
from model.ops.chosen import attend
from model.ops.lsh import rotations
from tests import zoo
from tests.host_mesh import mesh_of, on_mesh

H, L = 4, 23


def made(name: str, causal: bool = True, **settings):
    """A mixer in float64, its parameters and inputs, and what comes out; call with x64 enabled."""
    mixer = zoo.make((name, settings, "none"), dtype=jnp.float64, causal=causal)
    variables = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), zoo.params(mixer))
    x = np.random.default_rng(0).normal(size=(1, L, zoo.WIDTH))
    y, _ = jax.jit(mixer.apply)(variables, x, Context())
    return variables["params"], x[0], np.asarray(y[0])


def projected(params, name: str, x: np.ndarray) -> np.ndarray:
    """`[L, H, K]`."""
    return np.einsum("ld,dhk->lhk", x, params[name]["kernel"])


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def out(params, heads: np.ndarray) -> np.ndarray:
    return np.einsum("lhk,hkd->ld", heads, params["out"]["kernel"])


@pytest.mark.parametrize(("block", "top", "groups"), [(4, 2, 4), (5, 1, 2), (3, 0, 1), (64, 3, 4)])
def test_moba_is_the_papers(block, top, groups):
    with jax.enable_x64(True):
        params, x, y = made("moba", block=block, top=top, n_kv_heads=groups)
    q, k, v = (projected(params, name, x) for name in "qkv")
    heads = np.zeros_like(q)
    for t in range(L):
        for h in range(H):
            keys, values = k[:, h // (H // groups)], v[:, h // (H // groups)]
            own = t // block
            gate = [q[t, h] @ keys[i * block : (i + 1) * block].mean(0) for i in range(own)]
            blocks = [*np.argsort(gate)[::-1][:top], own]
            seen = [s for i in blocks for s in range(i * block, (i + 1) * block) if s <= t]
            weights = softmax(np.array([q[t, h] @ keys[s] for s in seen]) / np.sqrt(q.shape[-1]))
            heads[t, h] = sum(w * values[s] for w, s in zip(weights, seen, strict=True))
    np.testing.assert_allclose(y, out(params, heads), atol=1e-10)


NSA = [
    dict(length=4, stride=2, block=4, top=3, sliding=3, n_kv_heads=2),
    dict(length=3, stride=3, block=6, top=4, sliding=5, n_kv_heads=4),
    dict(length=4, stride=1, block=5, top=3, sliding=1, n_kv_heads=1),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("settings", NSA, ids=str)
def test_nsa_is_the_papers(settings):
    l, d, block, top, w, G = (settings[k] for k in ("length", "stride", "block", "top", "sliding", "n_kv_heads"))
    with jax.enable_x64(True):
        params, x, y = made("nsa", **settings)
    q = projected(params, "q", x)
    K, R = q.shape[-1], H // G
    gate = 1 / (1 + np.exp(-np.einsum("ld,dhb->lhb", x, params["gate"]["kernel"]) - params["gate"]["bias"]))

    def compressed(name, tokens):
        hidden = np.einsum("jk,jki->i", tokens + params[f"{name}_embed"], params[f"{name}_hidden"]["kernel"])
        return (hidden / (1 + np.exp(-hidden))) @ params[f"{name}_made"]["kernel"]

    def look(query, keys, values):
        weights = softmax(np.array([query @ key for key in keys]) / np.sqrt(K))
        return sum(p * value for p, value in zip(weights, values, strict=True)), weights

    k, v = ({n: projected(params, f"{kind}_{n}", x) for n in ("compressed", "chosen", "near")} for kind in "kv")
    heads = np.zeros_like(q)
    for t in range(L):
        for g in range(G):
            starts = range(0, t - l + 2, d)  # of windows that end at t or before
            short = [
                [compressed(kind, one["compressed"][i : i + l, g]) for i in starts]
                for kind, one in (("k", k), ("v", v))
            ]
            own, score = t // block, np.zeros(t // block + 1)
            for h in range(g * R, (g + 1) * R):
                if starts:
                    heads[t, h], p = look(q[t, h], *short)
                    heads[t, h] *= gate[t, h, 0]
                    for j in range(own + 1):
                        for m in range(block // d):  # stretches of the block, and the windows that cover each
                            for n in range(l // d):
                                i = block // d * j + m - n
                                score[j] += p[i] if 0 <= i < len(p) else 0
            always = {0, own, max(own - 1, 0)}
            others = sorted(set(range(own)) - always, key=lambda j, s=score: (-s[j], j))
            # Of the blocks that a query always has, those that coincide leave room for others.
            blocks = [*always, *others[: top - len(always)]]
            seen = [s for j in blocks for s in range(j * block, (j + 1) * block) if s <= t]
            for h in range(g * R, (g + 1) * R):
                heads[t, h] += gate[t, h, 1] * look(q[t, h], k["chosen"][seen, g], v["chosen"][seen, g])[0]
                near = slice(max(0, t - w + 1), t + 1)
                heads[t, h] += gate[t, h, 2] * look(q[t, h], k["near"][near, g], v["near"][near, g])[0]
    np.testing.assert_allclose(y, out(params, heads), atol=1e-10)


@pytest.mark.few(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("chunk", "n_buckets", "rounds"), [(3, 4, 2), (4, 6, 1), (64, 8, 3)])
def test_reformer_is_the_papers(chunk, n_buckets, rounds, causal):
    with jax.enable_x64(True):
        params, x, y = made("reformer", chunk=chunk, n_buckets=n_buckets, rounds=rounds, causal=causal)
    qk, v = (projected(params, name, x) for name in ("qk", "v"))
    keys = qk / np.sqrt(np.sum(qk**2, -1, keepdims=True) + 1e-6 * qk.shape[-1])
    directions = rotations(0, H, qk.shape[-1], rounds, n_buckets).astype(np.float64)
    heads = np.zeros_like(v)
    for h in range(H):
        found, sums = np.zeros((rounds, L, v.shape[-1])), np.zeros((rounds, L))
        for r in range(rounds):
            turned = qk[:, h] @ directions[h, :, r]
            bucket = np.argmax(np.concatenate([turned, -turned], axis=-1), axis=-1)
            ranks = sorted(range(L), key=lambda t, b=bucket: (b[t], t))
            for t in range(L):
                if causal:
                    seen = [s for s in range(t) if bucket[s] == bucket[t]][-chunk:]
                else:
                    chunks = ranks.index(t) // chunk, ranks.index(t) // chunk - 1
                    seen = [s for s in range(L) if s != t and ranks.index(s) // chunk in chunks]
                scores = np.array([qk[t, h] @ keys[s, h] for s in seen] or [-1e5])
                sums[r, t] = np.log(np.sum(np.exp(scores - scores.max()))) + scores.max()
                found[r, t] = softmax(scores) @ v[seen or [t], h]
        for t in range(L):
            heads[t, h] = softmax(sums[:, t]) @ found[:, t]
    np.testing.assert_allclose(y, out(params, heads), atol=1e-10)


def test_reformers_chunks_are_those_of_each_document():
    """Both ways, where documents begin anywhere and padding lies between: as by all scores, in values and gradients."""
    rng, n = np.random.default_rng(1), 40
    segments = np.sort(rng.integers(1, 4, (2, n)), axis=1) * (rng.random((2, n)) > 0.2)
    x, weight = rng.normal(size=(2, 2, n, zoo.WIDTH)).astype(np.float32) * (segments > 0)[..., None]
    case = ("reformer", {"chunk": 3, "n_buckets": 4}, "rope")
    sort, every = (
        zoo.run(zoo.make(case, causal=False, implementation=one), x, weight, zoo.context(segments))
        for one in (None, "reference")
    )
    for one, other in zip(sort, every, strict=True):
        np.testing.assert_allclose(one[segments > 0], other[segments > 0], atol=1e-5)


SMALL = {
    "moba": {"block": 3, "top": 2, "n_kv_heads": 2},
    "nsa": {"length": 2, "stride": 1, "block": 3, "top": 3, "sliding": 3, "n_kv_heads": 2},
    "reformer": {"chunk": 3, "n_buckets": 4},
}
PACKED = np.asarray([[1] * 4 + [0, 1, 0] + [2] * 9 + [3] * 7, [0, 0] + [5] * 20 + [0]])


@pytest.mark.scale
@pytest.mark.parametrize(("name", "position"), [(name, "t5") for name in SMALL] + [("moba", "alibi")])
def test_biases_are_of_the_pairs_that_are_seen(name, position):
    """Values and gradients, those of the bias among them, are the same whether few pairs are made or all."""
    case, rng = (name, SMALL[name], position), np.random.default_rng(2)
    x, weight = rng.normal(size=(2, *PACKED.shape, zoo.WIDTH)).astype(np.float32) * (PACKED > 0)[..., None]
    few, every = (zoo.make(case, implementation=one) for one in (None, "reference"))
    (grads, pull), y = zoo.gradient(few)(zoo.params(few), x, zoo.context(PACKED), weight)
    (all_grads, all_pull), all_y = zoo.gradient(every)(zoo.params(every), x, zoo.context(PACKED), weight)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(all_grads), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    np.testing.assert_allclose(pull, all_pull, atol=2e-4)
    np.testing.assert_allclose(y[PACKED > 0], all_y[PACKED > 0], atol=2e-5)


@pytest.mark.scale
@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2, sequence=2), dict(sequence=8)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_devices_that_share_the_length_change_nothing(name, sizes):
    """Where they take heads for tokens, and where there are too few heads for that."""
    rng, mesh = np.random.default_rng(3), mesh_of(**sizes)
    segments = np.concatenate([PACKED, PACKED[:, -1:]], axis=1)
    x, weight = rng.normal(size=(2, *segments.shape, zoo.WIDTH)).astype(np.float32) * (segments > 0)[..., None]
    mixer, ctx = zoo.make((name, SMALL[name], "t5")), zoo.context(segments)

    def step(variables, x):
        def objective(variables, x):
            return jnp.sum(mixer.apply(variables, x, ctx)[0] * weight)

        return jax.value_and_grad(objective, argnums=(0, 1))(variables, x)

    placed = jax.device_put(x, NamedSharding(mesh, P("data", "sequence")))
    shared = on_mesh(step, mesh)(zoo.params(mixer), placed)
    for one, other in zip(jax.tree.leaves(shared), jax.tree.leaves(jax.jit(step)(zoo.params(mixer), x)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_blocks_that_were_not_chosen_are_not_read():
    """Not in the gradient either: there is no number in them that could be."""
    order = order_of((1, L), None, 16, 4)  # the queries are a block, which sees itself and the first
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 4, 1, 1, 4), (1, L, 1, 4)))
    k[:, 4:16] = np.nan
    chosen = jnp.broadcast_to(jnp.asarray([16, 0, -1]), (1, 4, 1, 3))

    def total(q, k):
        places = dict(q_positions=order.index, k_positions=jnp.arange(L)[None])
        return jnp.sum(attend(q, k, k, chosen, order, 4, bias=None, **places))

    value, (d_q, d_k) = jax.value_and_grad(total, argnums=(0, 1))(q, k)
    assert np.isfinite(value) and np.isfinite(d_q).all()
    assert np.isfinite(d_k).all() and (d_k != 0).any(-1)[0, :, 0].nonzero()[0].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


@pytest.mark.parametrize("name", ["moba", "nsa"])
def test_they_look_back_only(name):
    with pytest.raises(UserError, match=f"{name} runs forward only; set model.causal=True, or use attention"):
        zoo.shapes(MIXERS[name](width=16, causal=False))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(length=24), r"nsa\.stride 16 does not divide model\.nsa\.length 24; closest that does: 12"),
        (dict(block=40), r"nsa\.stride 16 does not divide model\.nsa\.block 40"),
        (dict(length=128), r"nsa\.length 128 is more than model\.nsa\.block 64; closest: 64"),
        (dict(top=2), r"NSA\.top is 2; allowed: a whole number from 3 to .*; closest: 3"),
    ],
)
def test_nsa_refuses_sizes_that_do_not_fit(settings, says):
    with pytest.raises(UserError, match=says):
        zoo.shapes(MIXERS["nsa"](width=16, **settings))
